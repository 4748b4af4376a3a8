"""The page about sharded models: its example runs as it stands, and its commands do what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

PAGE = (Path(__file__).parents[2] / "docs" / "sharded.md").read_text()


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return text


@pytest.mark.slow
def test_the_program_and_the_commands_of_the_page_work_on_two_ranks(kgorch):
    (kgorch.folder / "train.py").write_text(block("python"))
    (kgorch.folder / "plan.toml").write_text(block("toml").replace('"auto"', "2"))
    for line in re.findall(r"^kgorch (.*)$", PAGE, re.MULTILINE):
        kgorch(*line.split())
    assert kgorch.status()["exactness"]["sharding"].startswith("mesh 2 (dp)")
    weights = load_file(kgorch.folder / "model.safetensors")
    assert weights["0.0.weight"].shape == (64, 64) and weights["4.bias"].shape == (1,)
