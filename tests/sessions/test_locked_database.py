"""A database that another process holds: it delays what is written down, and nothing that is done."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from harness import Kgorch, wait_until

from kgorch.core.codes import EventKind, Phase, Reason
from kgorch.db import queue, runs, sessions
from kgorch.db.engine import open_database
from kgorch.launch import launcher
from kgorch.supervisor import ending_files
from kgorch.system.sockets import control_socket


@contextmanager
def held(kgorch: Kgorch) -> Iterator[sqlite3.Connection]:
    """The database, locked against writers."""
    with closing(sqlite3.connect(kgorch.home / "kgorch.db", timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def training(kgorch: Kgorch, **changes):
    supervisor = kgorch.background("start", str(kgorch.plan(args={"epochs": 500, "sleep": 0.02}, **changes)))
    kgorch.wait_for_step(5)
    return supervisor


def test_a_stop_reaches_the_training_at_once_and_is_written_down_when_it_can_be(kgorch):
    supervisor = training(kgorch)
    with held(kgorch) as connection:
        stop = kgorch.background("stop")
        attempt = kgorch.attempt()
        wait_until(lambda: not launcher.is_running(attempt), within_s=60, what="the training is over")
        assert supervisor.poll() is None and kgorch.status()["phase"] in ("training", "saving"), (
            "it waits to write that down"
        )
        connection.execute("ROLLBACK")
    assert supervisor.wait(timeout=60) == 10 and stop.wait(timeout=60) == 0, stop.communicate()
    status = kgorch.status()
    assert (status["phase"], status["reason"]) == ("suspended", "user")
    assert status["checkpoint"]["step"] == status["step"] and status["next"]["at"] is None
    [attempt] = kgorch.history()[0]["attempts"]
    assert attempt["outcome"] == "stopped"


def test_orders_are_given_while_the_database_is_locked(kgorch):
    supervisor = training(kgorch, every="600s")
    known = len(kgorch.checkpoints())
    with held(kgorch):
        kgorch("save", "--no-wait")
        wait_until(lambda: len(kgorch.checkpoints()) > known, within_s=60, what="a checkpoint on disk")
    wait_until(lambda: list(kgorch.events("save_requested")))
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10


def test_the_end_of_a_session_that_the_database_never_took_is_known_to_the_next_start(kgorch):
    """The wall leaves no time to wait for the lock: no daemon may take a person's stop for a death."""
    supervisor = training(kgorch)
    with held(kgorch):
        stopped = kgorch.background("stop")
        socket = next(kgorch.home.glob("runs/*/*/control.sock"))
        wait_until(
            lambda: (now := control_socket.ask(socket, "ping")) is None or now.text not in ("training", "saving")
        )
        supervisor.send_signal(signal.SIGTERM)  # which leaves it 25 s
        assert supervisor.wait(timeout=60) == 10
        assert stopped.wait(timeout=30) == 0
        assert "suspended" in stopped.communicate()[0]
        [ending] = kgorch.home.glob("runs/test/1/session-1.ended.json")
        assert json.loads(ending.read_text())["reason"] == "user"
    engine = open_database(kgorch.home)
    kgorch.background("daemon")
    run = runs.newest(engine, "test")
    wait_until(lambda: (row := queue.pending_resume(engine, run.id)) and row.state == "due" and row.due_at is None)
    assert sessions.last(engine, run.id).number == 1 and sessions.last(engine, run.id).phase == "suspended"
    wait_until(lambda: not ending.exists())
    engine.dispose()


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_failure_that_the_database_never_took_is_tried_again_only_when_a_person_asks(kgorch, is_asked):
    supervisor = training(kgorch)
    kgorch.kill_everything()
    supervisor.wait()
    failed = {
        "kind": EventKind.RETRIES_EXHAUSTED,
        "phase": Phase.FAILED,
        "facts": {},
        "reason": Reason.ERROR,
        "why": "no",
    }
    ending_files.write(kgorch.home / "runs/test/1", 1, failed)
    engine = open_database(kgorch.home)
    if is_asked:
        kgorch("queue", "add", "test")
    kgorch.background("daemon")
    run = runs.newest(engine, "test")
    wait_until(lambda: sessions.of_run(engine, run.id)[0].phase == "failed")
    wait_until(lambda: queue.pending_resume(engine, run.id) is None)
    assert len(sessions.of_run(engine, run.id)) == (2 if is_asked else 1)
    run = runs.newest(engine, "test")
    assert (run.state, run.why) == (("active", "") if is_asked else ("failed", "no"))
    engine.dispose()
