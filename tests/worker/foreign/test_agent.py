"""How the agent of a foreign program records its end: finished only where nothing of the training was cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until

from kgorch.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec

WITH_LINGER = "from kgorch.worker.foreign import agent; agent.LINGER_S = {}; agent.main()"


@dataclass
class AgentProcess:
    """An agent of its own, without a supervisor, and the folder of its attempt."""

    root: Path

    def start(self, script: str, linger_s: float = 3.0, **foreign: Any) -> subprocess.Popen[bytes]:
        """Start it. Args: script: of the shell, the program."""
        section = {
            "checkpoint": "out/ckpt.json", "incomplete": [], "settled_s": 60.0, "first": [], "again": [], "step": None,
            "stop": {"signal": "SIGTERM", "file": None, "grace_s": 3.0}, "metrics": {}, "processes": 1, "lead_s": 4.0,
            "claims": str(self.root / "claims"),
        } | foreign  # fmt: skip
        folders = [self.root / name for name in ("attempt", "work", "store", "output")]
        for folder in folders:
            folder.mkdir()
        attempt, work, store, output = map(str, folders)
        launch = LaunchSpec(
            "run", "1", "train", "1.1", attempt, "sh", work, 1, str(self.root / "socket"), store, output, "",
            argv=["-c", script], launcher="none", foreign=section,
        )  # fmt: skip
        path = launch.write()
        variables = {**os.environ, LAUNCH_VARIABLE: str(path)}
        return subprocess.Popen([sys.executable, "-c", WITH_LINGER.format(linger_s)], env=variables)

    def record(self) -> dict[str, Any]:
        """How it ended."""
        record: dict[str, Any] = json.loads((self.root / "attempt" / "rank0.status.json").read_text())
        return record


@pytest.fixture
def agent(tmp_path):
    return AgentProcess(tmp_path)


def test_a_program_that_a_signal_to_all_processes_has_ended_is_not_finished(agent, tmp_path):
    started, ended = tmp_path / "started", tmp_path / "ended"
    script = (
        f"trap 'touch {ended}; exit 0' TERM; mkdir out; echo 1 > out/ckpt.json; echo $$ > {started};"
        " while :; do sleep 0.01; done"
    )
    process = agent.start(script)
    wait_until(lambda: started.exists() and started.read_text().strip() and list((tmp_path / "store").glob("step-*")))
    process.send_signal(signal.SIGSTOP)  # as where it looks a moment later
    os.kill(int(started.read_text()), signal.SIGTERM)
    wait_until(ended.exists)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=30) == 0
    assert agent.record()["outcome"] == "unsaved" and agent.record()["final_step"] is None


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        ({"log": r"step (\d+)", "file": None, "key": None}, "suspended"),
        ({"log": None, "file": "out/*/state.json", "key": "global_step"}, "unsaved"),
    ],
)
def test_a_checkpoint_at_the_step_of_the_log_is_saved_in_time_and_one_at_its_own_step_is_not(agent, step, outcome):
    """The step that is read in a checkpoint is that of the checkpoint, however far the program has come since."""
    save = "mkdir -p out/checkpoint-500; echo '{\"global_step\": 500}' > out/checkpoint-500/state.json"
    script = f"echo step 500; {save}; exec sleep 600"
    process = agent.start(script, checkpoint="out/checkpoint-*", step=step, settled_s=0.5)
    wait_until(lambda: list((agent.root / "store").glob("step-00000500/manifest.json")), within_s=30)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert agent.record()["outcome"] == outcome


def test_a_checkpoint_whose_writer_was_killed_does_not_end_the_training(agent):
    script = "mkdir out; (printf '{\"step\": ' > out/ckpt.json; exec sleep 60) & sleep 0.5"
    assert agent.start(script).wait(timeout=60) == 0
    record = agent.record()
    assert record["outcome"] == "failed" and "'ckpt.json' is cut off" in record["error"]["message"]
    assert not list((agent.root / "store").iterdir())


def test_a_last_checkpoint_that_cannot_be_taken_does_not_make_an_earlier_one_the_result(agent):
    script = (
        f"mkdir -p out/1 out/2; echo '{{}}' > out/1/state.json; until ls {agent.root}/store/step-*; do sleep 0.1; done;"
        " ln -s gone out/2/model.bin; echo '{}' > out/2/state.json"
    )
    assert agent.start(script, checkpoint="out/*", incomplete=["*.tmp"]).wait(timeout=60) == 0
    record = agent.record()
    assert record["outcome"] == "failed" and record["final_step"] is None
    assert "its last checkpoint out/2 is not taken: it holds the link 'model.bin'" in record["error"]["message"]


@pytest.mark.parametrize("seconds_after_its_checkpoint", [0, 3])
def test_a_process_that_is_left_behind_and_writes_nothing_does_not_matter(agent, seconds_after_its_checkpoint):
    script = f"mkdir out; echo '{{\"step\": 1}}' > out/ckpt.json; sleep 60 & sleep {seconds_after_its_checkpoint}"
    assert agent.start(script).wait(timeout=60) == 0
    assert agent.record()["outcome"] == "finished"


def test_a_process_that_is_left_behind_and_saves_is_the_training(agent):
    later = "(sleep 4; echo '{\"step\": 2}' > out/new; mv out/new out/ckpt.json; sleep 60)"
    script = f"mkdir out; echo '{{\"step\": 1}}' > out/ckpt.json; {later} &"
    assert (
        agent.start(script, linger_s=30.0).wait(timeout=120) == 0
    )  # on a busy machine it looks at the disk less often
    record = agent.record()
    assert record["outcome"] == "failed" and "went on to train" in record["error"]["message"]
