"""A quick test as a stage, and `kgorch check`: measured in a child, foretold, held against what came."""

from __future__ import annotations

import pytest
from harness import Kgorch

QUICK = '[[stage]]\nname = "quick"\nquick_test_of = "train"\n\n'


@pytest.fixture
def kgorch(tmp_path):
    return Kgorch(tmp_path, tmp_path / "home")


def test_a_quick_test_does_one_step_and_the_stage_after_it_all(kgorch):
    path = kgorch.plan(ranks=1, args={"epochs": 2, "sleep": 0.0})
    path.write_text(path.read_text().replace("[[stage]]", QUICK + "[[stage]]", 1))
    kgorch("start", str(path))
    found = kgorch.status()
    assert found["state"] == "finished"
    quick, train = kgorch.history()[0]["stages"]
    assert (quick["name"], quick["last_step"]) == ("quick", 1)
    assert (train["name"], train["first_step"], train["last_step"]) == ("train", 0, 12)
