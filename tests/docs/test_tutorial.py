"""The tutorial: its change fits its script, and what it says of the weights is so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return text


@pytest.mark.slow
def test_the_script_of_the_tutorial_ends_with_the_same_weights_plain_alone_and_cut(kgorch):
    script = kgorch.folder / "train.py"
    weights = kgorch.folder / "spirals.pt"

    def run_alone() -> bytes:
        subprocess.run([sys.executable, script], cwd=kgorch.folder, check=True, env=kgorch.env())
        return weights.read_bytes()

    script.write_text(block("python").replace("range(60)", "range(8)"))
    plain = run_alone()
    change = block("diff").replace("range(60)", "range(8)").replace("session.epochs(60)", "session.epochs(8)")
    subprocess.run(["git", "apply"], input=change, text=True, cwd=kgorch.folder, check=True)
    assert run_alone() == plain
    weights.unlink()
    fast = script.read_text()
    script.write_text(fast.replace("optimizer.step()", "optimizer.step(); __import__('time').sleep(0.02)"))
    (kgorch.folder / "plan.toml").write_text(block("toml").replace('wall = "40s"', 'wall = "1h"'))
    supervisor = kgorch.background("start")
    kgorch.wait_for_step(200)  # in the second epoch
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 10
    assert not weights.exists()
    script.write_text(fast)
    kgorch("start")
    assert weights.read_bytes() == plain
