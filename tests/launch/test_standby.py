"""Attempts that are forked from a process which has imported PyTorch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import processes_of, wait_until

from kgorch.launch.standby import Standby, StandbyUnavailable
from kgorch.system import process_title


@pytest.fixture
def alone(kgorch):
    """No daemon has a standby for it."""
    kgorch.own_standby = True
    return kgorch


def launches(kgorch) -> list[bool]:
    """Of each launch of the run, whether it was forked from the standby."""
    return [entry["facts"]["standby"] for entry in kgorch.events("launched")]


def test_every_launch_of_a_session_is_forked_and_a_dead_standby_is_replaced(alone):
    supervisor = alone.background("start", str(alone.plan(ranks=2, args={"epochs": 400, "sleep": 0.02})))
    alone.wait_for_step(5)
    shim = alone.pids()["shim"]
    assert Path(f"/proc/{shim}/cmdline").read_bytes().split(b"\0")[1:4] == [
        b"-m",
        b"kgorch.launch.shim",
        os.fsencode(alone.attempt()),
    ]

    os.kill(alone.pids()["rank1"], signal.SIGKILL)
    wait_until(lambda: len(launches(alone)) == 2, what="a second launch")
    assert launches(alone) == [True, True]
    alone.wait_for_step(5)

    alone.standby().kill()
    os.kill(alone.pids()["torchrun"], signal.SIGKILL)
    wait_until(lambda: len(launches(alone)) == 3, what="a third launch")
    assert launches(alone)[2] is False, "a new process, because the standby was dead"
    alone.wait_for_step(5)
    os.kill(alone.pids()["shim"], signal.SIGKILL)
    wait_until(lambda: len(launches(alone)) == 4, what="a fourth launch")
    assert launches(alone)[3] is True, "another standby was started meanwhile"

    alone.wait_for_step(5)
    alone("stop", "test")
    assert supervisor.wait(timeout=60) == 10
    assert not alone.standby()


def test_a_standby_ends_with_its_supervisor_and_the_training_goes_on(alone):
    supervisor = alone.background("start", str(alone.plan(args={"epochs": 400, "sleep": 0.02})))
    alone.wait_for_step(5)
    assert launches(alone) == [True]
    supervisor.kill()
    wait_until(lambda: not alone.standby(), what="the standby has ended")
    wait_until(lambda: alone.pids().keys() >= {"shim", "torchrun", "rank0"}, what="the training lives")


def test_a_program_that_needs_no_torchrun_gets_no_standby(alone):
    plan = alone.plan(args={"epochs": 400, "sleep": 0.02})
    plan.write_text(plan.read_text().replace("ranks = 1", 'ranks = 1\nlauncher = "torchrun-cli"'))
    alone.background("start", str(plan))
    alone.wait_for_step(1)
    assert launches(alone) == [False] and not alone.standby()


def test_a_plan_with_a_mistake_leaves_no_standby(alone):
    plan = alone.plan()
    plan.write_text(plan.read_text().replace("entry", "entri"))
    assert "entri" in alone("start", str(plan), code=2).stderr
    assert not alone.standby()


@pytest.mark.parametrize("words", [["start", "plan.toml"], ["resume"]])
def test_a_standby_is_started_before_what_takes_long_to_import(words, tmp_path):
    program = (
        "import sys\n"
        "from kgorch.launch import standby\n"
        "standby.prepare = lambda: sys.exit(str({'sqlalchemy', 'pydantic'} & set(sys.modules)))\n"
        "from kgorch.cli import main\n"
        f"main({words})\n"
    )
    environ = {**os.environ, "KGORCH_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "set()"


@pytest.fixture
def standby(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # another one in each phase of a test
    made = Standby()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "7"), ("LD_LIBRARY_PATH", "/nowhere"), ("SOMETHING", "new")]
)
def test_a_launch_under_other_conditions_is_refused(standby, tmp_path, monkeypatch, name, value):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="other conditions"):
        standby.launch(tmp_path, {**os.environ, name: value}, (log.fileno(),))
    assert standby.is_usable


def test_a_launch_with_fewer_processors_is_refused(standby, tmp_path, monkeypatch):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("one processor")
    try:
        os.sched_setaffinity(0, {min(allowed)})
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
        with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="other conditions"):
            standby.launch(tmp_path, os.environ, (log.fileno(),))
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_environment_that_does_not_fit_is_refused(standby, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="too large"):
        standby.launch(tmp_path, {**os.environ, "KGORCH_LONG": "x" * (2 * process_title.ROOM_BYTES)}, (log.fileno(),))


def test_for_a_client_that_has_stopped_waiting_nothing_is_started(standby, tmp_path, monkeypatch):
    """It has started another process meanwhile: two would train in one folder."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    impatient = Standby(standby.connect_another())
    monkeypatch.setattr("kgorch.launch.standby.ANSWER_S", 0.05)  # PyTorch's import takes longer
    with open(tmp_path / "log", "wb") as log, pytest.raises(StandbyUnavailable, match="does not answer"):
        impatient.launch(tmp_path, os.environ, (log.fileno(),))
    monkeypatch.setattr("kgorch.launch.standby.ANSWER_S", 60.0)
    for _ in range(2):  # behind the first one it has answered the other client, too
        with open(os.devnull, "wb") as log, pytest.raises(StandbyUnavailable, match="other conditions"):
            standby.launch(tmp_path, {**os.environ, "SOMETHING": "new"}, (log.fileno(),))
    assert not psutil.Process(standby._process.pid).children() and not (tmp_path / "log").read_text()


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


def test_nothing_of_a_state_folder_is_left_by_a_start_that_trains_nothing(alone):
    plan = alone.plan(args={"epochs": 1})
    alone("start", str(plan))
    alone("start", str(plan))  # it is finished
    assert not processes_of(alone.home)
