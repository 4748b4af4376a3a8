"""A run that the first version began in the middle of its training is finished by this one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Kgorch, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FIRST = "6f157ee4dc2f3255b5fb7faf528b22995228110c"
"""The commit of the first version: database 0001, checkpoint format 1. Its package was called `orchestrator`."""
STEPS = 120
SCRIPT = runpy.run_path(str(ROOT / "docs" / "demo_remote.py"))["TRAIN"]


@pytest.fixture
def first_version(tmp_path: Path) -> Path:
    """The folder of a checkout of the first version."""
    archive = subprocess.run(["git", "archive", FIRST, "orchestrator", "db"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"needs the history of the repository: {archive.stderr.decode()}")
    folder = tmp_path / "first"
    folder.mkdir()
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder


class FirstVersion(Kgorch):
    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator.cli", *args]


def test_a_run_of_the_first_version_is_finished_by_this_one_with_the_same_bits(kgorch, first_version, tmp_path):
    plan, script = kgorch.plan("train.py", ranks=2, args={"pause": 0.2}), kgorch.folder / "train.py"
    script.write_text(SCRIPT.replace("from kgorch import", "from orchestrator.worker import"))
    old = FirstVersion(
        kgorch.folder,
        kgorch.home,
        started=kgorch.started,
        extra_env={"PYTHONPATH": str(first_version)},
        own_standby=True,
    )
    began = old.background("start", str(plan))
    wait_until(old.checkpoints, within_s=120, what="a checkpoint of the first version")
    old("stop", "test")
    assert began.wait(timeout=60) == 10, old.logs()

    script.write_text(SCRIPT)
    before = kgorch.status()
    assert before["phase"] == "suspended" and 0 < before["step"] < STEPS
    kgorch("start", str(plan), "--set", "stage.train.args.pause=0")
    assert kgorch.status()["step"] == STEPS
    first, second = (session["stages"][0] for session in kgorch.history())
    assert first["last_step"] == second["first_step"] == before["step"]

    alone = Kgorch(kgorch.folder, tmp_path / "alone")
    alone("start", str(plan), "--set", "stage.train.args.pause=0")
    assert kgorch.export() == alone.export()
