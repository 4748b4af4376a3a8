"""Real daemons: what is due begins, once; what was killed is taken over; what is stopped is saved."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from harness import processes_of, wait_until
from sqlalchemy.exc import OperationalError

from kgorch.admission import moved_state, session_start
from kgorch.admission.requests import SILENT
from kgorch.core import scheduling as core
from kgorch.core.codes import NotStarted, Reason
from kgorch.db import active_sessions, queue, queue_claims, runs, sessions
from kgorch.db.engine import open_database
from kgorch.hardware.gpu_locks import GpusUnavailable, GpusUnlisted
from kgorch.platforms.generic import PROFILE
from kgorch.protocol.messages import Response
from kgorch.scheduler import claimed_resume, daemon_api
from kgorch.scheduler.daemon import Daemon
from kgorch.supervisor import ending_files
from kgorch.system import process_identity
from kgorch.system.sockets import control_socket

TAKES = """
import subprocess, sys
from pathlib import Path
from kgorch.db.engine import open_database
from kgorch.scheduler.daemon import Daemon
home = Path(sys.argv[1])
def start(entry, token):
    return subprocess.Popen([sys.executable, "-c", WORK, str(home), entry.run, token])
WORK = '''
import sys
from pathlib import Path
from kgorch.db import queue, queue_claims
from kgorch.db.engine import open_database
from kgorch.db.queue import Claimant
from kgorch.scheduler import claimed_resume
home, run, token = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(":")
engine = open_database(home)
before = Claimant(int(token[1]), int(token[2]), token[3])
if queue_claims.hand_over(engine, int(token[0]), before, claimed_resume.own_identity(engine), by="daemon"):
    with open(home / "done", "a") as file:
        file.write(run + "\\\\n")
    queue.mark_started(engine, "id-" + run, claimed_resume.own_identity(engine), by="x")
'''
Daemon(open_database(home), home, at_once=2, start=start).run()
"""


def make(engine, home, name: str, plan: str = "") -> str:
    folder = home / "runs" / name / "1"
    folder.mkdir(parents=True)
    run = runs.create(
        engine,
        id=f"id-{name}",
        name=name,
        number=1,
        folder=str(folder),
        workdir=str(home),
        checkpoints=str(folder),
        plan=plan,
        overrides=[],
        plan_hash="h",
        stages=["train"],
    )
    return run.id


def daemon(kgorch, *args: str) -> subprocess.Popen[str]:
    process = kgorch.background("daemon", *args)
    wait_until(lambda: (found := daemon_api.ask(kgorch.home, "ping")) and found["pid"] == process.pid, what="a daemon")
    return process


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(timeout=150)  # a stop may wait for a save, on a machine that does much else


def test_two_daemons_take_each_due_run_once(kgorch):
    engine = open_database(kgorch.home)
    for number in range(20):
        queue.put(engine, make(engine, kgorch.home, f"run{number}"), reason=Reason.QUEUED, due_at=datetime.now(UTC))
    for _ in range(2):
        kgorch.started.append(
            subprocess.Popen([sys.executable, "-c", TAKES, str(kgorch.home)], env=kgorch.env(), text=True)
        )
    done = kgorch.home / "done"
    wait_until(
        lambda: done.exists() and len(done.read_text().split()) >= 20 and not queue.entries(engine),
        within_s=200,
        what="twenty runs",
    )
    assert sorted(done.read_text().split()) == sorted(f"run{number}" for number in range(20))
    assert [end(process) for process in kgorch.started] == [0, 0]


SLEEPS = """
import subprocess, sys
from pathlib import Path
from kgorch.db.engine import open_database
from kgorch.scheduler import daemon
daemon.POLL_S = daemon.MAX_IDLE_S = 3600.0
made = daemon.Daemon(open_database(Path(sys.argv[1])), Path(sys.argv[1]), start=lambda *_: subprocess.Popen(["sleep", "1"]))
made._has_work_left = True  # the first look does not wait
made.run()
"""


def test_the_end_of_a_session_is_seen_without_waiting_for_the_next_look(kgorch):
    engine = open_database(kgorch.home)
    queue.put(engine, make(engine, kgorch.home, "a"), reason=Reason.QUEUED, due_at=datetime.now(UTC))
    kgorch.started.append(
        subprocess.Popen([sys.executable, "-c", SLEEPS, str(kgorch.home)], env=kgorch.env(), text=True)
    )
    wait_until(lambda: [entry.resume.failed_starts for entry in queue.entries(engine)] == [1], within_s=30)
    assert end(kgorch.started[0]) == 0


def test_people_are_told_of_a_run_that_is_given_up(kgorch, monkeypatch):
    engine = open_database(kgorch.home)
    told = kgorch.folder / "told.json"
    plan = kgorch.plan(extra=f"""[notify]\ncommand = ["sh", "-c", "cat > {told}"]""").read_text()
    run = make(engine, kgorch.home, "hopeless", plan=plan)
    queue.put(engine, run, reason=Reason.QUEUED, due_at=datetime.now(UTC))
    row, us = queue.pending_resume(engine, run), claimed_resume.own_identity(engine)
    assert queue_claims.claim(
        engine, row.id, us, by="x", snapshot=queue_claims.QueueSnapshot(0, queue_claims.newest_session_id(engine))
    )
    for name, value in kgorch.env().items():
        monkeypatch.setenv(name, value)
    assert claimed_resume.put_back(engine, row._replace(failed_starts=core.TRIES - 1), us, "no such disk")
    wait_until(lambda: told.exists() and told.read_text().endswith("}"))
    message = json.loads(told.read_text())
    assert message["event"] == "failed" and message["run"] == "hopeless" and "no such disk" in message["text"]
    assert runs.by_id(engine, run).state == "failed" and queue.pending_resume(engine, run) is None


def test_a_run_that_a_person_queues_again_begins_at_once_whatever_it_had_tried(kgorch):
    plan = kgorch.plan()
    kgorch("start", str(plan), "--queue")
    engine = open_database(kgorch.home)
    run = runs.newest(engine, "test").id
    session = sessions.open_session(engine, run, boot_id="b", step=5, first_step=5)
    about = {"stage": "train", "ranks": 1, "first_step": 5, "folder_of": lambda _: str(kgorch.folder)}
    sessions.open_attempt(engine, session.id, **about)
    queue.put(engine, run, reason=Reason.LOST, due_at=datetime.now(UTC), resource_request={"failed_starts": core.TRIES})
    for words in (("queue", "add", "test"), ("start", str(plan), "--queue")):
        kgorch(*words)
        assert queue.pending_resume(engine, run).failed_starts == 0
    told = kgorch("start", str(plan), "--queue", "--until", "18:30", code=2).stderr
    assert "leave out --until and --detach" in told
    plan.write_text(plan.read_text().replace("learns.py", "crashes.py"))
    assert "--accept-changes" in kgorch("start", str(plan), "--queue", code=2).stderr
    kgorch("start", str(plan), "--queue", "--accept-changes")


def test_a_run_whose_sessions_are_lost_again_and_again_before_a_step_is_given_up(kgorch):
    engine = open_database(kgorch.home)
    run = make(engine, kgorch.home, "lost", plan=kgorch.plan().read_text())
    process = daemon(kgorch)
    long_ago = datetime.now(UTC) - timedelta(hours=3)  # its back-off is over
    queue.put(engine, run, reason=Reason.LOST, due_at=long_ago, resource_request={"failed_starts": core.TRIES})
    wait_until(lambda: runs.by_id(engine, run).state == "failed")
    assert f"{core.TRIES} consecutive sessions ended without progress" in runs.by_id(engine, run).why
    assert sessions.last(engine, run) is None and queue.pending_resume(engine, run) is None
    assert end(process) == 0


def test_a_run_that_cannot_begin_is_tried_again_later_and_says_why(kgorch):
    engine = open_database(kgorch.home)
    run = make(engine, kgorch.home, "broken")  # its plan is empty
    process = daemon(kgorch)
    queue.put(engine, run, reason=Reason.QUEUED, due_at=datetime.now(UTC))
    row = wait_until(
        lambda: (row := queue.pending_resume(engine, run)) and row.failed_starts and row.state == "due" and row
    )
    assert row.failed_starts == 1 and "is not a plan" in row.last_error
    assert 10 < (row.due_at - datetime.now(UTC)).total_seconds() < 40
    [entry] = json.loads(kgorch("queue", "--json").stdout)
    assert entry["failed_starts"] == 1 and entry["last_error"] == row.last_error
    assert end(process) == 0


def test_claims_of_the_dead_and_of_another_boot_are_due_again(kgorch):
    engine = open_database(kgorch.home)
    found = []
    for name, claimant in (
        ("dead", queue.Claimant(2**22 - 1, 5, "")),
        ("rebooted", queue.Claimant(os.getpid(), 1, "another boot")),
    ):
        run = make(engine, kgorch.home, name)
        queue.put(engine, run, reason=Reason.QUEUED, due_at=datetime.now(UTC))
        queue_claims.claim(
            engine,
            queue.pending_resume(engine, run).id,
            claimant,
            by="daemon",
            snapshot=queue_claims.QueueSnapshot(9, 9),
        )
        found.append(run)
    process = daemon(kgorch, "--at-once", "2")
    for run in found:  # begun at once; their plans are empty, so it did not get far
        row = wait_until(lambda run=run: (row := queue.pending_resume(engine, run)) and row.failed_starts >= 2 and row)
        assert "is not a plan" in row.last_error
    assert end(process) == 0


def test_the_socket_is_the_owners_and_stands_garbage_silence_and_crowds(kgorch):
    process = daemon(kgorch)
    path = kgorch.home / daemon_api.SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    crowd = []
    for words in (b"garbage\n", b'{"ask": 5}\n', b"[" * 9000 + b"\n", b"x" * 300_000, b"\xff\xfe\n", b'{"ask": "st'):
        for _ in range(20):
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(str(path))
            peer.settimeout(5)
            try:
                peer.sendall(words)
            except OSError:
                pass
            crowd.append(peer)
    assert wait_until(lambda: daemon_api.ask(kgorch.home, "status"))["pid"] == process.pid
    assert daemon_api.ask(kgorch.home, "nonsense") == {"ok": False, "error": "expected ping, status, wake or stop"}
    for peer in crowd:
        peer.close()
    assert "has stopped" in kgorch("daemon", "stop").stdout
    assert process.wait(timeout=10) == 0 and not path.exists()
    assert "no daemon is running" in kgorch("daemon", "status").stdout


def test_a_second_daemon_leaves_the_socket_to_the_first(kgorch):
    first = daemon(kgorch)
    second = kgorch.background("daemon")
    log = kgorch.home / "logs" / "daemon.log"
    wait_until(lambda: "another daemon answers" in log.read_text())
    assert daemon_api.ask(kgorch.home, "ping")["pid"] == first.pid
    third = kgorch.background("daemon")
    wait_until(lambda: log.read_text().count("another daemon answers") == 2)
    assert end(second) == 0 and daemon_api.ask(kgorch.home, "ping")["pid"] == first.pid
    assert end(first) == 0
    wait_until(lambda: (found := daemon_api.ask(kgorch.home, "ping")) and found["pid"] == third.pid, what="an heir")
    assert end(third) == 0


@pytest.fixture
def sleepers():
    """Processes that stand for supervisors."""
    made: list[subprocess.Popen[bytes]] = []

    def make_one() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["sleep", "100"]))
        return made[-1]

    yield make_one
    for process in made:
        process.kill()
        process.wait()


def begun_by_a_daemon(engine, run: str, process: subprocess.Popen[bytes]) -> int:
    ticks, boot = process_identity.start_ticks(process.pid), process_identity.boot_id()
    queue.mark_started(engine, run, queue.Claimant(process.pid, ticks, boot), by=claimed_resume.BY_DAEMON)
    who = {"supervisor_pid": process.pid, "supervisor_started_ticks": ticks, "boot_id": boot}
    return sessions.open_session(engine, run, **who).id


@pytest.mark.parametrize("meanwhile", ["stopped by a user", "adopted", "queued by a user"])
def test_what_happens_to_a_session_while_a_daemon_looks_at_it_is_not_undone(kgorch, sleepers, monkeypatch, meanwhile):
    """It has lost its supervisor by the rows that the daemon has read."""
    engine = open_database(kgorch.home)
    run, supervisor, tomorrow = make(engine, kgorch.home, "ink"), sleepers(), datetime.now(UTC) + timedelta(days=1)
    session = begun_by_a_daemon(engine, run, supervisor)
    supervisor.kill()
    supervisor.wait()
    seen = active_sessions.all_of(engine)
    if meanwhile == "stopped by a user":
        resume = {"reason": Reason.USER, "why": "", "due_at": None}
        ended = {"kind": "attempt_suspended", "phase": "suspended", "facts": {}}
        sessions.record(engine, run, session, **ended, reason=Reason.USER, resume=resume)
    elif meanwhile == "adopted":
        sessions.update_session(engine, session, supervisor_pid=os.getpid(), supervisor_started_ticks=1)
    else:
        queue.put(engine, run, reason=Reason.QUEUED, due_at=tomorrow)
    before = queue.pending_resume(engine, run)
    monkeypatch.setattr(active_sessions, "all_of", lambda _: seen)
    Daemon(engine, kgorch.home)._queue_orphans(datetime.now(UTC))
    assert queue.pending_resume(engine, run) == before
    engine.dispose()


def claimed(engine, run: str) -> str:
    """The claim of the run's row by this process, as its daemon."""
    row, us = queue.pending_resume(engine, run), claimed_resume.own_identity(engine)
    assert queue_claims.claim(engine, row.id, us, by="daemon", snapshot=queue_claims.QueueSnapshot(9, 9))
    return claimed_resume.token(row.id, us)


def test_a_stop_that_comes_while_a_claimed_run_is_resumed_is_not_undone(kgorch, monkeypatch):
    """As in a fleet, where the machine of the session comes back."""
    kgorch("start", str(kgorch.plan()), "--queue")
    engine = open_database(kgorch.home)
    run = runs.newest(engine, "test").id
    session, claim = sessions.open_session(engine, run, boot_id="b"), claimed(engine, run)

    def stop(*_) -> None:
        resume = {"reason": Reason.USER, "why": "", "due_at": None}
        ended = {"kind": "attempt_suspended", "phase": "suspended", "facts": {}}
        sessions.record(engine, run, session.id, **ended, reason=Reason.USER, resume=resume)

    monkeypatch.setattr(moved_state, "bring", stop)
    result = claimed_resume.resume(engine, kgorch.home, PROFILE, "test", claim, SILENT)
    assert result.why is NotStarted.STOPPED
    waits = queue.pending_resume(engine, run)
    assert (waits.state, waits.reason, waits.due_at) == ("due", "user", None)
    assert len(sessions.of_run(engine, run)) == 1
    engine.dispose()


@pytest.mark.parametrize("is_in_file", [False, True], ids=["cut off while it stopped", "known by a file"])
def test_a_run_that_a_user_queues_after_a_stop_that_was_not_recorded_stays_queued(kgorch, monkeypatch, is_in_file):
    kgorch("start", str(kgorch.plan()), "--queue")
    engine = open_database(kgorch.home)
    run = runs.newest(engine, "test")
    session = sessions.open_session(engine, run.id, boot_id="b")
    queue.mark_started(engine, run.id, claimed_resume.own_identity(engine), by="x")
    if is_in_file:
        resume = {"reason": Reason.USER, "why": "", "due_at": None}
        ended = {"kind": "attempt_suspended", "phase": "suspended", "facts": {}, "reason": Reason.USER}
        ending_files.write(Path(run.folder), session.number, {**ended, "resume": resume})
    else:
        sessions.update_session(engine, session.id, phase="stopping", reason=Reason.USER)
    kgorch("queue", "add", "test")

    def busy(*_):
        raise GpusUnavailable("1 GPU is free, the run needs 2")

    monkeypatch.setattr(session_start, "open_session", busy)
    for _ in range(2):  # the second time the stop is recorded
        claim = claimed(engine, run.id)
        assert claimed_resume.resume(engine, kgorch.home, PROFILE, "test", claim, SILENT) is None
        waits = queue.pending_resume(engine, run.id)
        assert (waits.state, waits.reason) == ("due", "queued") and waits.due_at is not None
    assert sessions.last(engine, run.id).reason == "user"
    engine.dispose()


def test_a_driver_that_does_not_answer_counts_as_a_failed_start_where_gpus_in_use_do_not(kgorch, monkeypatch):
    """A run that waits for a GPU has no fault; nobody would hear of a driver that hangs for days."""
    kgorch("start", str(kgorch.plan()), "--queue")
    engine = open_database(kgorch.home)
    run = runs.newest(engine, "test")
    raised = [GpusUnavailable("in use"), GpusUnlisted("the driver does not answer"), GpusUnlisted("the same")]

    def fail(*_):
        raise raised.pop(0)

    monkeypatch.setattr(session_start, "open_session", fail)
    assert claimed_resume.resume(engine, kgorch.home, PROFILE, "test", claimed(engine, run.id), SILENT) is None
    for _ in range(2):
        with pytest.raises(GpusUnlisted):
            claimed_resume.resume(engine, kgorch.home, PROFILE, "test", claimed(engine, run.id), SILENT)
    waits = queue.pending_resume(engine, run.id)
    assert (waits.state, waits.failed_starts) == ("due", 2) and waits.last_error == "the same"
    engine.dispose()


def test_a_daemon_that_stops_leaves_alone_what_another_begins_meanwhile(kgorch, sleepers, monkeypatch):
    engine = open_database(kgorch.home)
    run, old, new = make(engine, kgorch.home, "ink"), sleepers(), sleepers()
    session = begun_by_a_daemon(engine, run, old)

    def saves_and_goes_on_under_the_other(*_, **__):
        old.kill()
        old.wait()
        sessions.record(engine, run, session, kind="attempt_suspended", phase="suspended", facts={})
        begun_by_a_daemon(engine, run, new)
        return Response(True, "stopping")

    monkeypatch.setattr(control_socket, "ask", saves_and_goes_on_under_the_other)
    began_s = time.monotonic()
    Daemon(engine, kgorch.home, stop_timeout_s=60.0)._stop_sessions()
    assert time.monotonic() - began_s < 30 and new.poll() is None


def test_a_daemon_that_stops_while_the_database_is_held_still_has_its_sessions_saved(kgorch, sleepers, monkeypatch):
    engine = open_database(kgorch.home)
    session = sleepers()
    begun_by_a_daemon(engine, make(engine, kgorch.home, "ink"), session)
    stopping = Daemon(engine, kgorch.home, stop_timeout_s=60.0)
    stopping.tick()

    def is_held(*_):
        raise OperationalError("", {}, sqlite3.OperationalError("database is locked"))

    monkeypatch.setattr(active_sessions, "all_of", is_held)
    monkeypatch.setattr(
        control_socket, "ask", lambda *_, **__: session.kill() or (session.wait() and Response(True, ""))
    )
    stopping._stop_sessions()
    assert session.poll() == -signal.SIGKILL, "asked, and waited for"


def test_a_daemon_that_stops_kills_what_has_not_ended_in_time(kgorch, sleepers, monkeypatch):
    engine = open_database(kgorch.home)
    session, of_a_user = sleepers(), sleepers()
    begun_by_a_daemon(engine, make(engine, kgorch.home, "ink"), session)
    ticks, boot = process_identity.start_ticks(of_a_user.pid), process_identity.boot_id()
    who = {"supervisor_pid": of_a_user.pid, "supervisor_started_ticks": ticks, "boot_id": boot}
    sessions.open_session(engine, make(engine, kgorch.home, "own"), **who)
    limits_s: list[float] = []
    monkeypatch.setattr(
        control_socket, "ask", lambda *_, within_s, **__: limits_s.append(within_s) or Response(True, "stopping")
    )
    Daemon(engine, kgorch.home, stop_timeout_s=1.0)._stop_sessions()
    assert session.wait(timeout=10) == -signal.SIGKILL and of_a_user.poll() is None
    assert len(limits_s) == 1 and limits_s[0] < 1.0, "asked once, to be over before the daemon's own limit"


def test_a_daemon_that_stops_still_answers(kgorch, sleepers):
    engine = open_database(kgorch.home)
    session = sleepers()
    begun_by_a_daemon(engine, make(engine, kgorch.home, "ink"), session)
    process = daemon(kgorch, "--stop-timeout", "600s")
    process.send_signal(signal.SIGTERM)
    assert "was asked to stop" in kgorch("daemon", "stop", "--no-wait").stdout
    session.kill()
    assert process.wait(timeout=60) == 0


def test_a_question_that_cannot_be_answered_ends_no_daemon(kgorch, monkeypatch):
    asked = Daemon(open_database(kgorch.home), kgorch.home)
    monkeypatch.setattr(queue, "counts", lambda *_: 1 / 0)  # a row that cannot be read
    told: list[dict] = []
    for question in ("status", "ping"):
        asked._jobs.put(lambda question=question: asked._answer(question, told.append))
    asked.turn()
    asked.turn()
    assert [answer["ok"] for answer in told] == [True], "the one that it can answer"


def test_a_database_that_another_program_holds_is_waited_for(kgorch):
    engine = open_database(kgorch.home)
    run = make(engine, kgorch.home, "broken")
    process = daemon(kgorch)
    queue.put(engine, run, reason=Reason.QUEUED, due_at=datetime.now(UTC))
    other = sqlite3.connect(kgorch.home / "kgorch.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    log = kgorch.home / "logs" / "daemon.log"
    wait_until(lambda: "database is locked" in log.read_text() or queue_claims.claimed_entries(engine))
    time.sleep(0.5)
    assert process.poll() is None
    other.execute("ROLLBACK")
    wait_until(lambda: (row := queue.pending_resume(engine, run)) and row.failed_starts)
    assert end(process) == 0


@pytest.mark.parametrize("gone", [("kgorch.db",), ("kgorch.db", "kgorch.db-wal", "kgorch.db-shm"), ("kgorch.db-wal",)])
def test_a_database_that_is_replaced_under_a_living_daemon_is_the_one_that_counts(kgorch, gone):
    process = daemon(kgorch)
    for name in gone:
        (kgorch.home / name).rename(kgorch.home / f"{name}.broken")
    log = kgorch.home / "logs" / "daemon.log"
    wait_until(lambda: "is missing" in log.read_text() or "was replaced" in log.read_text())
    engine = open_database(kgorch.home)
    run = make(engine, kgorch.home, "broken")
    queue.put(engine, run, reason=Reason.QUEUED, due_at=datetime.now(UTC))
    wait_until(lambda: (row := queue.pending_resume(engine, run)) and row.failed_starts, what="a try")
    assert daemon_api.ask(kgorch.home, "status")["waiting"] == 1
    assert end(process) == 0


@pytest.mark.soak
def test_an_idle_daemon_costs_next_to_nothing_and_takes_what_is_due_within_a_second(kgorch):
    engine = open_database(kgorch.home)
    run = make(engine, kgorch.home, "broken")
    process = psutil.Process(daemon(kgorch).pid)
    time.sleep(5)
    before, began_s = process.cpu_times(), time.monotonic()
    time.sleep(30)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / (time.monotonic() - began_s)
    assert share <= 0.004, "0.2% of a core; twice that on a machine whose caches others empty"
    assert process.memory_info().rss <= 70e6
    due_at = datetime.now(UTC)
    queue.put(engine, run, reason=Reason.QUEUED, due_at=due_at)
    wait_until(lambda: queue.pending_resume(engine, run).state == "claimed", what="a claim")


@pytest.mark.soak  # the evening and the storm do it
def test_a_run_goes_on_through_kills_of_the_daemon_a_stop_and_a_reboot(kgorch):
    plan = kgorch.plan(args={"epochs": 100_000, "sleep": 0.05}, ranks=1)
    engine = open_database(kgorch.home)
    first = daemon(kgorch)
    assert "is queued: due now" in kgorch("start", str(plan), "--queue").stdout
    kgorch.wait_for_step(5)
    supervisor, pids = kgorch.status()["session"]["supervisor"]["pid"], kgorch.pids()

    end(first, signal.SIGKILL)
    second = daemon(kgorch)
    wait_until(lambda: daemon_api.ask(kgorch.home, "status")["running"] == ["test"])
    assert kgorch.status()["session"]["supervisor"] == {"pid": supervisor, "alive": True}
    assert kgorch.pids() == pids and kgorch.status()["session"]["number"] == 1

    os.kill(supervisor, signal.SIGKILL)  # its training goes on, and is taken over
    wait_until(lambda: (found := kgorch.status()["session"]["supervisor"])["alive"] and found["pid"] != supervisor)
    assert kgorch.pids() == pids and kgorch.status()["session"]["number"] == 1

    assert end(second) == 0
    stopped = kgorch.status()
    assert stopped["phase"] == "suspended" and stopped["why"] == "the daemon was stopped"
    assert stopped["checkpoint"]["step"] == stopped["step"] > 5
    assert stopped["next"]["at"] is not None, "due for the next daemon"
    assert not processes_of(kgorch.home)

    daemon(kgorch)
    wait_until(lambda: kgorch.status()["session"]["number"] == 2)
    kgorch.wait_for_step(stopped["step"] + 3, within_s=150)
    kgorch.kill_everything()  # as a reboot does
    last = daemon(kgorch)
    wait_until(lambda: kgorch.status()["session"]["number"] == 3)
    kgorch.wait_for_step(stopped["step"] + 4, within_s=150)
    assert [entry["phase"] for entry in kgorch.history()][:2] == ["suspended", "cut_off"]
    assert queue.entries(engine) == [] and sessions.last(engine, runs.newest(engine, "test").id).number == 3
    assert end(last) == 0 and kgorch.status()["phase"] == "suspended"


@pytest.mark.slow
def test_resume_from_anywhere_without_a_terminal_and_with_the_plan_file_gone(kgorch, tmp_path):
    plan = kgorch.plan(args={"epochs": 2, "sleep": 0.0}, ranks=1)
    kgorch("start", str(plan), "--queue")
    plan.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "kgorch.cli", "resume"],
        cwd="/",
        env=kgorch.env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert kgorch.status()["state"] == "finished"
    assert "there is no unfinished run to continue" in kgorch("resume").stdout
    assert "is finished" in kgorch("resume", "test").stdout


def test_a_person_queues_a_run_for_an_hour_and_takes_it_out_again(kgorch):
    plan = kgorch.plan(ranks=2)
    assert "there is no state of 'test' to resume" in kgorch("queue", "add", str(plan), "--continue", code=2).stderr
    assert json.loads(kgorch("queue", "--json").stdout) == []
    assert "no daemon is running" in kgorch("queue", "add", str(plan), "--at", "2099-01-02T03:04:00Z").stdout
    assert "need a PLAN.toml" in kgorch("queue", "add", "test", "--accept-plan", code=2).stderr
    [entry] = json.loads(kgorch("queue", "--json").stdout)
    assert (entry["run"], entry["due_at"], entry["ranks"]) == ("test", "2099-01-02T03:04:00.000Z", 2)
    assert kgorch.status()["next"]["at"] == "2099-01-02T03:04:00.000Z"
    told = kgorch("stop", "test").stdout
    assert "is not running" in told and "next: kgorch queue drop test" in told, "a daemon would begin it all the same"
    kgorch("queue", "drop", "test")
    assert "next" not in kgorch("stop", "test").stdout
    assert json.loads(kgorch("queue", "--json").stdout)[0]["due_at"] is None
    for told in ("teatime", "25:00", "0001-01-01T00:00+14:00", "9999-12-31T23:59Z", "2020-01-01T00:00Z"):
        assert "--at" in kgorch("queue", "add", "test", "--at", told, code=2).stderr
    kgorch("queue", "add", "test", "--at", "18:30")
    assert json.loads(kgorch("queue", "--json").stdout)[0]["due_at"] is not None
    kgorch("start", str(plan), "--queue", "--fresh")
    assert "kgorch queue add test queues that one" in kgorch("queue", "add", "test/1", code=2).stderr


def fill_queue(kgorch, count: int) -> None:
    """So many due rows of runs whose folders are gone, as after a disk was replaced."""
    engine = open_database(kgorch.home)
    queue.put(
        engine, make(engine, kgorch.home, "gone"), reason=Reason.QUEUED, due_at=datetime.now(UTC) - timedelta(minutes=1)
    )
    shutil.rmtree(kgorch.home / "runs")
    engine.dispose()
    with contextlib.closing(sqlite3.connect(kgorch.home / "kgorch.db")) as database, database:
        for table, fields in (
            ("runs", {"id": "'id-' || n", "name": "'gone' || n", "folder": "folder || n"}),
            ("resumes", {"id": "1000 + n", "run_id": "'id-' || n"}),
        ):
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            chosen = ", ".join(fields.get(column, column) for column in columns)
            database.execute(
                f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count - 1})"
                f" INSERT INTO {table} ({', '.join(columns)}) SELECT {chosen} FROM {table}, numbers"
            )


def test_ten_thousand_rows_that_cannot_begin_leave_the_daemon_answering_fed_and_obedient(kgorch, tmp_path):
    fill_queue(kgorch, 10_000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        kgorch.extra_env |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4000000"}
        process = kgorch.background("daemon")
        while systemd.recv(4096) != b"READY=1":
            pass
        fed_s, longest_s = time.monotonic(), 0.0
        for _ in range(8):  # of a watchdog of four seconds each, fed twice in its time
            found = daemon_api.ask(kgorch.home, "status")
            assert found and found["pid"] == process.pid and found["waiting"] == 10_000
            while b"WATCHDOG=1" not in systemd.recv(4096):
                pass
            longest_s, fed_s = max(longest_s, time.monotonic() - fed_s), time.monotonic()
        assert longest_s < 4
        assert found["due"] < 10_000, "none of them was tried meanwhile"
        assert end(process) == 0
