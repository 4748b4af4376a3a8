"""A training over two nodes, both of them this machine: an agent with shim, torchrun, keeper and sockets is the second one."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Kgorch

HOSTS = '[nodes]\nhosts = ["first", "second"]\nstart = ["env", "KGORCH_TEST_NODE={host}", "{words}"]\naddress = "127.0.0.1"\n'
PROBLEM = {"epochs": 8, "pad": 3}


def plan_of(kgorch: Kgorch, nodes: str = "2", **changes: object) -> Path:
    return kgorch.plan(ranks=f"1\nnodes = {nodes}", extra=HOSTS, **{"args": PROBLEM, **changes})


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the training, uncut, over two nodes."""
    place = tmp_path_factory.mktemp("uncut")
    (place / "work").mkdir()
    made = Kgorch(place / "work", place / "home")
    made("start", str(plan_of(made)))
    assert made.status()["state"] == "finished", made.logs()
    return made.export()


def test_a_training_runs_over_two_nodes_to_its_end(kgorch, uncut):
    assert uncut
