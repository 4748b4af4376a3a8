"""Attempts that are forked from a process which has imported PyTorch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import processes_of, wait_until

from kgorch.launch.standby import Standby, StandbyUnavailable
from kgorch.system import process_title


def launches(kgorch) -> list[bool]:
    """Of each launch of the run, whether it was forked from the standby."""
    return [entry["facts"]["standby"] for entry in kgorch.events("launched")]


def test_every_launch_of_a_session_is_forked_and_a_dead_standby_is_replaced(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(ranks=2, args={"epochs": 400, "sleep": 0.02})))
    kgorch.wait_for_step(5)
    shim = kgorch.pids()["shim"]
    assert Path(f"/proc/{shim}/cmdline").read_bytes().split(b"\0")[1:4] == [
        b"-m",
        b"kgorch.launch.shim",
        os.fsencode(kgorch.attempt()),
    ]

    os.kill(kgorch.pids()["rank1"], signal.SIGKILL)
    wait_until(lambda: len(launches(kgorch)) == 2, what="a second launch")
    assert launches(kgorch) == [True, True]
    kgorch.wait_for_step(5)

    kgorch.standby().kill()
    os.kill(kgorch.pids()["torchrun"], signal.SIGKILL)
    wait_until(lambda: len(launches(kgorch)) == 3, what="a third launch")
    assert launches(kgorch)[2] is False, "a new process, because the standby was dead"
    kgorch.wait_for_step(5)
    os.kill(kgorch.pids()["shim"], signal.SIGKILL)
    wait_until(lambda: len(launches(kgorch)) == 4, what="a fourth launch")
    assert launches(kgorch)[3] is True, "another standby was started meanwhile"

    kgorch.wait_for_step(5)
    kgorch("stop", "test")
    assert supervisor.wait(timeout=60) == 10
    assert not kgorch.standby()


def test_a_standby_ends_with_its_supervisor_and_the_training_goes_on(kgorch):
    supervisor = kgorch.background("start", str(kgorch.plan(args={"epochs": 400, "sleep": 0.02})))
    kgorch.wait_for_step(5)
    assert launches(kgorch) == [True]
    supervisor.kill()
    wait_until(lambda: not kgorch.standby(), what="the standby has ended")
    wait_until(lambda: kgorch.pids().keys() >= {"shim", "torchrun", "rank0"}, what="the training lives")


def test_a_program_that_needs_no_torchrun_gets_no_standby(kgorch):
    plan = kgorch.plan(args={"epochs": 400, "sleep": 0.02})
    plan.write_text(plan.read_text().replace("ranks = 1", 'ranks = 1\nlauncher = "torchrun-cli"'))
    kgorch.background("start", str(plan))
    kgorch.wait_for_step(1)
    assert launches(kgorch) == [False] and not kgorch.standby()


@pytest.fixture
def standby():
    made = Standby()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "7"), ("LD_LIBRARY_PATH", "/nowhere"), ("SOMETHING", "new")]
)
def test_a_launch_under_other_conditions_is_refused(standby, tmp_path, name, value):
    with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="other conditions"):
        standby.launch(tmp_path, {**os.environ, name: value}, (log.fileno(),))
    assert standby.is_usable


def test_a_launch_with_fewer_processors_is_refused(standby, tmp_path):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    try:
        os.sched_setaffinity(0, {min(allowed)})
        with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="other conditions"):
            standby.launch(tmp_path, os.environ, (log.fileno(),))
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_environment_that_does_not_fit_is_refused(standby, tmp_path):
    with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="too large"):
        standby.launch(tmp_path, {**os.environ, "KGORCH_LONG": "x" * (2 * process_title.ROOM_BYTES)}, (log.fileno(),))


def test_what_is_no_request_ends_the_connection(standby):
    standby._socket.sendall(b"\xff" * 8)
    wait_until(lambda: not standby.is_usable, what="closed")


_SHOWN = """
import os, sys
from kgorch.system import process_title
assert process_title.fits({"A": "1"}) and not process_title.fits({"A": "x" * 50_000})
process_title.replace(["other", "words"], {"A": "1", "LONG": "y" * 2000})
assert os.environ == {"A": "1", "LONG": "y" * 2000}
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_is_shown_with_its_new_command_line_and_environment():
    process = subprocess.Popen(
        [sys.executable, "-c", _SHOWN],
        env={**os.environ, **process_title.room()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"ready\n"
    proc = Path(f"/proc/{process.pid}")
    assert proc.joinpath("environ").read_bytes().rstrip(b"\0").split(b"\0") == [b"A=1", b"LONG=" + b"y" * 2000]
    assert proc.joinpath("cmdline").read_bytes().rstrip(b"\0").split(b"\0") == [b"other", b"words"]
    process.communicate()
    assert process.returncode == 0


def test_nothing_of_a_state_folder_is_left_by_a_start_that_trains_nothing(kgorch):
    plan = kgorch.plan(args={"epochs": 1})
    kgorch("start", str(plan))
    kgorch("start", str(plan))  # it is finished
    assert not processes_of(kgorch.home)
