"""The daemon's visits of runs at other places: which are begun, how often, and what becomes of those that fail or hang."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from harness import wait_until

from kgorch.core.codes import REMOTE_OPEN, RemoteState, RemoteWait, RunState
from kgorch.core.remote.session_states import RemoteSession
from kgorch.db import remote, runs
from kgorch.remote.session_rows import columns_of
from kgorch.scheduler import remote_visits
from kgorch.scheduler.daemon import Daemon
from kgorch.scheduler.remote_visits import AGAIN_S, AT_ONCE, LIMIT_S, RemoteVisits

NOW = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Visits(RemoteVisits):
    """Visits whose processes do what a test says; `begun`: names of the runs, in their order."""

    def __init__(self, program: str = "pass") -> None:
        self.begun: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clock = Clock()

        def start(run, without):
            self.begun.append(run.run)
            self.processes.append(subprocess.Popen([sys.executable, "-S", "-c", program]))
            return self.processes[-1]

        super().__init__(self.clock, (), start)

    def wait(self) -> None:
        for process in self.processes:
            process.wait(timeout=30)


@pytest.fixture
def make(engine, tmp_path):
    def made(name: str, state: RemoteState = RemoteState.RUNNING, due_at: datetime = NOW, run_state=RunState.ACTIVE):
        folder = tmp_path / "home" / "runs" / name / "1"
        folder.mkdir(parents=True)
        run = runs.create(
            engine, id=f"id-{name}", name=name, number=1, folder=str(folder), workdir=str(tmp_path),
            checkpoints=str(folder), plan="", plan_hash="", overrides=(), stages=["train"],
        )  # fmt: skip
        runs.set_state(engine, run.id, run_state)
        columns = columns_of(RemoteSession(1, state, due_at)) | {"place": "local", "name": name, "nonce": "0"}
        return remote.plan(engine, run.id, columns)

    return made


@pytest.mark.parametrize("state", RemoteState)
def test_what_is_due_and_not_over_is_visited(engine, make, state):
    make("there", state)
    visits = Visits()
    visits.tick(engine, NOW)
    visits.wait()
    assert visits.begun == (["there"] if state in REMOTE_OPEN else [])


def test_what_is_due_later_wakes_the_daemon_then_and_a_run_that_failed_is_left_alone(engine, make):
    make("later", due_at=NOW + timedelta(seconds=90))
    make("failed", run_state=RunState.FAILED)
    visits = Visits()
    assert visits.tick(engine, NOW) == NOW + timedelta(seconds=90) and visits.begun == []


def test_a_clock_that_ran_ahead_puts_no_visit_off_to_its_date(engine, make, tmp_path):
    now, day = datetime.now(UTC), timedelta(days=1)
    make("running", due_at=now + 30 * day)
    hours = timedelta(hours=7)  # of a clock that is set to the local time
    remote.save(engine, make("seen", due_at=now + hours).id, {"status_at": now + hours})
    remote.save(engine, make("no_hours", RemoteState.PLANNED, now + 30 * day).id, {"wait": RemoteWait.QUOTA})
    make("resting", due_at=now + day)
    remote.save(engine, make("renewal", RemoteState.PLANNED, now + 7 * day).id, {"wait": RemoteWait.QUOTA})
    make("over", RemoteState.COLLECTED, now + 30 * day)
    daemon = Daemon(engine, tmp_path / "home")
    daemon._remote_visits = visits = Visits()
    daemon.tick()
    visits.wait()
    assert sorted(visits.begun) == ["no_hours", "running", "seen"]
    assert remote.next_due_at(engine, datetime.now(UTC)) == now + day


def test_a_run_has_one_visit_at_a_time(engine, make):
    row = make("slow")
    visits = Visits("import time; time.sleep(600)")
    visits.tick(engine, NOW)
    remote.save(engine, row.id, {"due_at": NOW - timedelta(seconds=5)})
    visits.tick(engine, NOW)
    assert visits.begun == ["slow"] and not visits.has_ended
    visits.stop()
    visits.wait()
    assert visits.has_ended


def test_a_visit_that_changes_nothing_is_not_made_again_at_once(engine, make, caplog):
    row = make("broken")
    visits = Visits("raise SystemExit(3)")
    for at_s, expected in ((0.0, 1), (1.0, 1), (AGAIN_S - 1, 1), (AGAIN_S, 2), (AGAIN_S + 1, 2)):
        visits.clock.at_s = at_s
        visits.tick(engine, NOW)
        visits.wait()
        assert len(visits.begun) == expected, at_s
    assert "ended with 3" in caplog.text
    remote.save(engine, row.id, {"due_at": NOW - timedelta(seconds=1)})  # something else is due: a visit has written it
    visits.tick(engine, NOW)
    visits.wait()
    assert len(visits.begun) == 3


def test_a_crowd_is_visited_a_few_at_a_time_the_longest_due_first(engine, make):
    names = [f"run{number}" for number in range(AT_ONCE + 2)]
    for number, name in enumerate(names):
        make(name, due_at=NOW - timedelta(seconds=100 - number))
    visits = Visits()
    visits.tick(engine, NOW)
    assert visits.begun == names[:AT_ONCE]
    visits.wait()
    visits.tick(engine, NOW)
    visits.wait()
    assert visits.begun == names


def test_a_visit_that_hangs_is_killed(engine, make):
    make("hangs")
    visits = Visits("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    visits.tick(engine, NOW)
    visits.clock.at_s = LIMIT_S + 1
    visits.tick(engine, NOW)
    wait_until(lambda: visits.has_ended)
    assert visits.processes[0].returncode == -9


def test_a_visit_that_cannot_be_started_is_tried_again_later(engine, make, monkeypatch, caplog):
    make("gone")
    monkeypatch.setattr(remote_visits.sys, "executable", "/nonexistent/python")
    clock = Clock()
    visits = RemoteVisits(clock, ())
    visits.tick(engine, NOW)
    assert "gone cannot be visited" in caplog.text and not visits.has_ended
