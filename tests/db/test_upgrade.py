"""A run that the first version began in the middle of its training is finished by this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import Kgorch, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FIRST = "6f157ee4dc2f3255b5fb7faf528b22995228110c"
"""The commit of the first version: database 0001, checkpoint format 1. Its package was called `orchestrator`."""
EPOCHS, STEPS = 40, 320
SCRIPT = """
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch import attach

with attach(seed=0) as session:
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :1] - x[:, 1:2])
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    session.track(model=model, optimizer=optimizer)
    loader = session.loader(data, 32)
    for epoch in session.epochs(40):
        for batch in session.steps(loader):
            loss = session.backward(batch, lambda part: (model(part[0]) - part[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            session.report(loss=loss)
            time.sleep(float(sys.argv[2]))
"""


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
