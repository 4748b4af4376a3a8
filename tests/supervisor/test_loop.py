"""The supervisor's loop waits for nothing: not for a database that is locked, not for a disk, not for a terminal."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from harness import Kgorch, wait_until
from sqlalchemy import event

from kgorch.admission import session_start
from kgorch.admission.open_session import ReadySession
from kgorch.admission.requests import LocalState, StartRequest
from kgorch.core.backoff import Backoff
from kgorch.core.codes import Phase
from kgorch.core.session import events
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db.engine import open_database
from kgorch.errors import KgorchError
from kgorch.launch import attempts
from kgorch.platforms.detect import detect
from kgorch.supervisor.attempts import attempt_control, attempt_end, attempt_launch
from kgorch.supervisor.live_session import Refined
from kgorch.supervisor.loop import Supervisor
from kgorch.supervisor.messages import MessageHandler
from kgorch.supervisor.refinement import Refinement
from kgorch.system.sockets import control_socket

TURN_S = 2.5
"""Seconds. A turn that waits for the database takes its busy timeout, 3 s; any other takes less than 50 ms on an idle machine."""

_watched: dict[int, list[str]] = {}


def _hook(name: str, args: tuple) -> None:
    calls = _watched.get(threading.get_ident())
    if calls is not None and name in (
        "execute",
        "open",
        "sqlite3.connect",
        "subprocess.Popen",
        "os.listdir",
        "os.scandir",
        "os.remove",
    ):
        calls.append(f"{name} {args[:1]}")


class Watched(Supervisor):
    """Notes how long each turn takes besides waiting for its input, and which files it opens and statements it executes."""

    def watch(self) -> None:
        self.turns_s: list[float] = []
        self.calls: list[str] = []
        self._waited_s = 0.0
        get = self._queue.get
        outer = self

        class Inputs:
            def put(self, item) -> None:
                queue.put(item)

            def get(self, timeout: float):
                began_s = time.perf_counter()
                try:
                    return get(timeout=timeout)
                finally:
                    outer._waited_s += time.perf_counter() - began_s

        queue, self._queue = self._queue, Inputs()

    def _turn(self) -> None:
        _watched[threading.get_ident()] = self.calls
        began_s, self._waited_s = time.perf_counter(), 0.0
        try:
            super()._turn()
        finally:
            del _watched[threading.get_ident()]
            self.turns_s.append(time.perf_counter() - began_s - self._waited_s)


@pytest.fixture
def supervised(kgorch: Kgorch, monkeypatch):
    """A supervisor in a thread of the test, over a real training of two ranks."""
    sys.addaudithook(_hook)
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    plan = kgorch.plan(args={"epochs": 500, "sleep": 0.02})
    engine = open_database(kgorch.home)
    event.listen(engine, "before_cursor_execute", lambda _, __, statement, *___: _hook("execute", (statement,)))
    started = []

    def start(**observers) -> tuple[Watched, threading.Thread]:
        opened = session_start.start(LocalState(engine, kgorch.home, detect()), StartRequest(plan.read_text(), plan))
        assert isinstance(opened, ReadySession)
        supervisor = Watched(engine, opened, **observers)
        supervisor.watch()
        thread = threading.Thread(target=supervisor.run)
        thread.start()
        started.append((thread, opened))
        kgorch.wait_for_step(5)
        return supervisor, thread

    yield start
    for thread, opened in started:
        control_socket.ask(kgorch.home / "runs/test/1/control.sock", "stop")
        thread.join(timeout=60)
        opened.claim.release()
        opened.lock.release()
    engine.dispose()


def kill_ranks(kgorch: Kgorch) -> None:
    ranks = [pid for who, pid in kgorch.pids().items() if who.startswith("rank")]
    assert ranks
    for pid in ranks:
        os.kill(pid, 9)


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ask(kgorch: Kgorch, what: str):
    return control_socket.ask(kgorch.home / "runs/test/1/control.sock", what)


def test_no_turn_waits_for_a_locked_database_or_touches_a_file(kgorch, supervised):
    supervisor, thread = supervised()
    with closing(sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        saved = len(kgorch.checkpoints())
        assert ask(kgorch, "save").ok
        wait_until(lambda: len(kgorch.checkpoints()) > saved, what="a checkpoint, though the database is locked")
        assert ask(kgorch, "stop").ok
        wait_until(lambda: supervisor._live.state.phase is Phase.SUSPENDED, what="the session's end, in the loop")
        other.execute("ROLLBACK")
    thread.join(timeout=60)
    assert not thread.is_alive() and kgorch.status()["phase"] == "suspended"
    assert max(supervisor.turns_s) < TURN_S
    assert not supervisor.calls


def test_an_attempt_that_crashes_is_judged_and_launched_again_beside_the_loop(kgorch, supervised):
    supervisor, _ = supervised()
    name = supervisor._live.attempt.name
    kill_ranks(kgorch)
    wait_until(lambda: (now := supervisor._live.attempt) and now.name != name, what="the next attempt")
    assert not supervisor.calls and max(supervisor.turns_s) < TURN_S


def test_a_crash_while_the_database_is_locked_is_launched_again_however_long_that_lasts(
    kgorch, supervised, monkeypatch
):
    monkeypatch.setattr(attempt_control, "AGAIN", Backoff(0.05, longest_s=0.1))
    monkeypatch.setattr(attempt_launch, "FLUSH_S", 0.05)
    monkeypatch.setattr(attempt_end, "WRITTEN_S", 0.1)
    supervisor, _ = supervised()
    first = supervisor._live.attempt.name
    with closing(sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        kill_ranks(kgorch)
        failed = supervisor._attempts._failed
        wait_until(lambda: sum(failed.values()) > 3 * attempt_launch.LAUNCH_TRIES, what="launches that failed")
        assert supervisor._live.state.phase is Phase.RECOVERING
        other.execute("ROLLBACK")
    wait_until(lambda: (now := supervisor._live.attempt) and now.name != first, what="the next attempt")
    wait_until(lambda: supervisor._live.state.phase is Phase.TRAINING, what="training")
    assert kgorch.events("launch_failed") and not kgorch.status()["notices"]


@pytest.mark.parametrize("found", [events.RetriesExhausted("the wall came first"), events.DeadlineReached()])
def test_a_wall_before_the_first_step_means_nothing_to_what_has_attached_while_that_was_looked_into(found):
    live = SimpleNamespace(state=LifecycleState(phase=Phase.STARTING))
    refinement = Refinement(live, None, (None, None), lambda _: None)
    assert refinement.conclude(Refined(found)) is found
    live.state = LifecycleState(phase=Phase.TRAINING)
    assert refinement.conclude(Refined(found)) is None


@pytest.mark.parametrize("is_rescued", [False, True])
def test_after_a_kill_what_the_keeper_writes_is_waited_for_before_the_lost_steps_are_counted(monkeypatch, is_rescued):
    """It may be writing what it was asked for a second before, or have got a newer snapshot since: 43 steps were told as lost."""
    asked = []
    live = SimpleNamespace(state=LifecycleState(phase=Phase.STOPPING, is_rescued=is_rescued), left_s=lambda: 0.5)
    saves = SimpleNamespace(persist=lambda timeout_s: asked.append(("persist", timeout_s)))
    records = SimpleNamespace(verify_left_by=lambda attempt: asked.append("verify"))
    monkeypatch.setattr("kgorch.supervisor.refinement.launcher.kill", lambda folder: asked.append("kill"))
    refinement = Refinement(live, None, (records, saves), lambda _: None)
    refinement._after_kill(events.GraceExpired(), SimpleNamespace(folder=None))
    assert asked == ["kill", ("persist", 0.5), "verify"]


def test_a_launch_waits_for_room_on_a_full_disk_and_status_says_so(kgorch, supervised, monkeypatch):
    monkeypatch.setattr(attempt_control, "AGAIN", Backoff(0.05, longest_s=0.1))
    supervisor, _ = supervised()
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "prepare", no_room)
        kill_ranks(kgorch)
        failed = supervisor._attempts._failed
        wait_until(lambda: sum(failed.values()) > 3 * attempt_launch.LAUNCH_TRIES, what="launches that failed")
        [said] = wait_until(lambda: kgorch.status()["notices"])
        assert said.startswith("nothing trains") and "No space left" in said
    wait_until(lambda: supervisor._live.state.phase is Phase.TRAINING, what="training")


def test_a_launch_that_fails_after_a_crash_is_not_told_with_the_traceback_of_the_crash(kgorch, monkeypatch):
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    plan = kgorch.plan("crashes.py", ranks=1, args={"at": 5})
    engine = open_database(kgorch.home)
    opened = session_start.start(LocalState(engine, kgorch.home, detect()), StartRequest(plan.read_text(), plan))
    find, found = attempts.find_restore_point, []

    def once(*given):
        if found:
            raise KgorchError("no checkpoint is whole")
        found.append(find(*given))
        return found[0]

    monkeypatch.setattr(attempts, "find_restore_point", once)
    assert opened.supervise(engine).phase is Phase.FAILED
    engine.dispose()
    assert (kgorch.status()["why"], kgorch.status()["failure"]) == ("no checkpoint is whole", None)


def test_the_step_of_a_failure_is_known_without_its_last_heartbeats(kgorch, monkeypatch):
    """They may come after the end of the processes, on a machine that is busy."""
    monkeypatch.setattr(MessageHandler, "_on_heartbeat", lambda self, beat: None)
    monkeypatch.setenv("KGORCH_HOME", str(kgorch.home))
    plan = kgorch.plan("crashes.py", ranks=1, args={"at": 5})
    engine = open_database(kgorch.home)
    opened = session_start.start(LocalState(engine, kgorch.home, detect()), StartRequest(plan.read_text(), plan))
    assert isinstance(opened, ReadySession)
    assert opened.supervise(engine).phase is Phase.FAILED
    engine.dispose()
    assert (kgorch.status()["failure"]["step"], kgorch.status()["step"]) == (5, 5)


def test_a_terminal_that_takes_nothing_holds_no_order_up(kgorch, supervised):
    stopped = threading.Event()
    supervisor, thread = supervised(observer=lambda _: stopped.wait(60), listener=lambda _: stopped.wait(60))
    assert ask(kgorch, "stop").ok
    thread.join(timeout=60)
    assert not thread.is_alive() and supervisor._live.state.phase is Phase.SUSPENDED
    stopped.set()
