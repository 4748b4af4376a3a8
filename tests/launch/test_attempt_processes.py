"""Processes that a training starts end with its attempt, whatever ended that, and no others do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from harness import Kgorch, processes_of, wait_until

from kgorch.launch import attempt_processes
from kgorch.system.clock import boottime_s
from kgorch.system.process_identity import start_ticks

pytestmark = pytest.mark.slow


def helpers(kgorch: Kgorch) -> list[int]:
    try:
        return [int(line) for line in (kgorch.folder / "helpers.txt").read_text().split()]
    except OSError:
        return []


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if start_ticks(pid)]


@pytest.mark.parametrize(
    "args",
    [{}, {"stubborn": True}, {"vietnamese": True}],
    ids=["helpers that heed SIGTERM", "helpers that do not", "helpers whose names are not UTF-8"],
)
def test_helpers_of_a_killed_attempt_end_before_the_next_one_begins_and_with_the_session(kgorch, args):
    supervisor = kgorch.background("start", str(kgorch.plan("helped.py", args=args, every="1s")))
    kgorch.wait_for_step(2)
    first, attempt = helpers(kgorch), kgorch.attempt().name
    assert len(first) == len(living(first)) == 2
    os.kill(json.loads((kgorch.attempt() / "shim.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: kgorch.attempt().name != attempt, what="the next attempt")
    assert not living(first), "before the next attempt begins"
    wait_until(lambda: len(living(helpers(kgorch))) == 2)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10, supervisor.communicate()[0]
    assert not living(helpers(kgorch)) and not processes_of(kgorch.home)
    end = json.loads((kgorch.attempt() / "exit.json").read_text())
    assert end["status"] == 0 and 0 <= boottime_s() - end["at_s"] < 600


def test_helpers_of_an_attempt_that_lost_shim_and_supervisor_end_before_the_next_session_trains(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan("helped.py", every="1s")))
    kgorch.wait_for_step(2)
    first = helpers(kgorch)
    supervisor.kill()
    supervisor.wait()
    os.kill(json.loads((kgorch.attempt() / "shim.json").read_text())["pid"], signal.SIGKILL)
    assert len(living(first)) == 2
    second = kgorch.background("start", "plan.toml")
    wait_until(lambda: len(living(helpers(kgorch))) == 2 and len(helpers(kgorch)) == 4)
    assert not living(first)
    kgorch("stop")
    assert second.wait(timeout=60) == 10, second.communicate()[0]
    assert not living(helpers(kgorch))


def sleeper(**env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], env={**os.environ, **env}, start_new_session=True)


def test_only_what_carries_the_launch_of_that_attempt_is_ended(tmp_path):
    mine, other = tmp_path / "home/runs/a/1/attempts/1.1", tmp_path / "home/runs/a/1/attempts/1.10"
    copy = tmp_path / "copy/runs/a/1/attempts/1.1"
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for folder in (mine, other, copy):
        folder.mkdir(parents=True)
    linked = tmp_path / "link/runs/a/1/attempts/1.1"
    ended = [sleeper(KGORCH_LAUNCH=f"{folder}/launch.json") for folder in (mine, linked)]
    spared = [sleeper(KGORCH_LAUNCH=f"{folder}/launch.json") for folder in (other, copy)]
    spared += [sleeper(NOT_KGORCH_LAUNCH=f"{mine}/launch.json"), sleeper()]
    try:
        assert sorted(attempt_processes.attempt_pids(mine)) == sorted(process.pid for process in ended)
        assert attempt_processes.terminate_attempt(mine)
        assert all(process.wait(timeout=10) == -signal.SIGTERM for process in ended)
        assert all(process.poll() is None for process in spared)
    finally:
        for process in [*ended, *spared]:
            process.kill()
            process.wait()


def test_a_supervisor_that_was_started_from_within_a_training_does_not_end_itself(tmp_path):
    program = (
        "import subprocess, sys; from pathlib import Path; from kgorch.launch import attempt_processes;"
        f"print(attempt_processes.terminate_attempt(Path({str(tmp_path)!r})))"
    )
    inner = [sys.executable, "-c", program]
    outer = [
        sys.executable,
        "-c",
        f"import subprocess; print(subprocess.run({inner!r}, capture_output=True, text=True))",
    ]
    done = subprocess.run(
        outer, env={**os.environ, "KGORCH_LAUNCH": f"{tmp_path}/launch.json"}, capture_output=True, text=True
    )
    assert "stdout='True\\n'" in done.stdout, done
