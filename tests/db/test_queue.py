"""The queue's rows: one taker each, whoever asks and whatever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from kgorch.core.codes import REASON_TEXT, Reason
from kgorch.db import active_sessions, queue, queue_claims, runs, sessions
from kgorch.db.queue import Claimant
from kgorch.db.queue_claims import LEASE, QueueSnapshot
from kgorch.system import process_identity

pytestmark = pytest.mark.usefixtures("database")
ANY = QueueSnapshot(10**6, 10**6)
WE = Claimant(os.getpid(), process_identity.start_ticks(os.getpid()), process_identity.boot_id())
OTHER = Claimant(1, 2, "another boot")


def make(engine, name: str = "ink", **resource_request) -> str:
    run = runs.create(
        engine,
        id=f"id-{name}",
        name=name,
        number=1,
        folder="/f",
        workdir="/w",
        checkpoints="/c",
        plan="",
        overrides=[],
        plan_hash="h",
        stages=["train"],
    )
    if resource_request:
        due_at = datetime.now(UTC) - timedelta(seconds=resource_request.pop("since_s", 0.0))
        queue.put(engine, run.id, reason=Reason.QUEUED, due_at=due_at, resource_request=resource_request)
    return run.id


def due(engine) -> list[str]:
    return [entry.run for entry in queue.due_entries(engine, datetime.now(UTC), limit=100)]


def test_a_claimed_row_is_nobody_elses(engine):
    row = queue.pending_resume(engine, make(engine, ranks=1))
    assert queue_claims.claim(engine, row.id, WE, by="daemon", snapshot=ANY)
    assert not queue_claims.claim(engine, row.id, OTHER, by="daemon", snapshot=ANY)
    assert due(engine) == [] and queue_claims.claimed_entries(engine)[0].resume.claimant_pid == os.getpid()


def test_a_claim_that_follows_from_an_older_look_fails(engine):
    first, second = (queue.pending_resume(engine, make(engine, name, ranks=1)) for name in ("a", "b"))
    snapshot = QueueSnapshot(0, queue_claims.newest_session_id(engine))
    assert queue_claims.claim(engine, first.id, OTHER, by="daemon", snapshot=snapshot)
    assert not queue_claims.claim(engine, second.id, WE, by="daemon", snapshot=snapshot), (
        "somebody has claimed meanwhile"
    )
    queue.mark_started(engine, "id-a", OTHER, by="x")
    sessions.open_session(engine, "id-a", boot_id="b")
    assert not queue_claims.claim(engine, second.id, WE, by="daemon", snapshot=snapshot), (
        "a session was opened meanwhile"
    )
    assert queue_claims.claim(
        engine, second.id, WE, by="daemon", snapshot=QueueSnapshot(0, queue_claims.newest_session_id(engine))
    )


CLAIMS = """
import sys
from pathlib import Path
from kgorch.db import queue_claims
from kgorch.db.engine import open_database
from kgorch.db.queue import Claimant
from kgorch.db.queue_claims import QueueSnapshot
engine = open_database(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
me = Claimant(int(sys.argv[2]), 1, "b")
print(*[number for number in range(1, 61) if queue_claims.claim(engine, number, me, by="x", snapshot=QueueSnapshot(10**6, 10**6))])
"""


def test_each_of_many_rows_goes_to_one_of_two_processes(engine, tmp_path):
    for number in range(60):
        make(engine, f"run{number}", ranks=1)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMS, str(tmp_path / "home"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        print("", file=process.stdin, flush=True)
    taken = [[int(word) for word in process.communicate(timeout=120)[0].split()] for process in both]
    assert sorted(taken[0] + taken[1]) == list(range(1, 61))


def test_the_order_is_priority_then_the_longest_ago_then_the_hour(engine):
    make(engine, "late", ranks=1, since_s=10)
    make(engine, "early", ranks=1, since_s=20)
    make(engine, "first", ranks=1, since_s=1, priority=5)
    again = make(engine, "again", ranks=1, since_s=90)
    sessions.open_session(engine, again, boot_id="b")
    queue.put(engine, again, reason=Reason.QUEUED, due_at=datetime.now(UTC) - timedelta(seconds=90))
    assert due(engine) == ["first", "early", "late", "again"]


def test_what_is_due_later_or_when_asked_or_of_a_failed_run_is_not_due(engine):
    later, asked, failed = make(engine, "later"), make(engine, "asked"), make(engine, "failed", ranks=1)
    hour = datetime.now(UTC) + timedelta(hours=1)
    queue.put(engine, later, reason=Reason.QUOTA, due_at=hour)
    queue.put(engine, asked, reason=Reason.USER, due_at=None)
    runs.set_state(engine, failed, "failed")
    assert due(engine) == []
    assert queue.next_due_at(engine, datetime.now(UTC)) == hour
    assert [entry.run for entry in queue.entries(engine)] == ["failed", "later", "asked"]


def test_what_a_run_wants_of_a_machine_is_inherited_by_its_next_place_in_the_queue(engine):
    run = make(engine, ranks=2, share=True, priority=7)
    queue.mark_started(engine, run, WE, by="x")
    queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
    row = queue.pending_resume(engine, run)
    assert (row.ranks, row.share, row.priority, row.why) == (2, True, 7, REASON_TEXT[Reason.TIME_LIMIT])


def test_tries_count_on_while_sessions_come_no_step_further(engine):
    run = make(engine, ranks=1)
    for expected in (1, 2):
        row = queue.pending_resume(engine, run)
        queue_claims.claim(engine, row.id, WE, by="daemon", snapshot=ANY)
        session = sessions.open_session(engine, run, boot_id="b")
        queue.mark_started(engine, run, WE, by="x")
        sessions.update_session(engine, session.id, phase="cut_off")
        queue.put(engine, run, reason=Reason.LOST, due_at=datetime.now(UTC))
        assert queue.pending_resume(engine, run).failed_starts == expected
    attempted(engine, session.id, "train", 0, 5, made_progress=True)
    queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
    assert queue.pending_resume(engine, run).failed_starts == 0


def attempted(
    engine,
    session_id: int,
    stage: str,
    first_step: int,
    last_step: int,
    *,
    made_progress: bool,
    outcome: str = "time_limit",
):
    row = sessions.open_attempt(
        engine, session_id, stage=stage, ranks=1, first_step=first_step, folder_of=lambda number: f"/{number}"
    )
    sessions.close_attempt(engine, row.id, outcome=outcome, cause="", last_step=last_step, made_progress=made_progress)


def test_a_session_that_ends_in_a_shorter_stage_than_it_began_in_has_come_further(engine):
    """Its step was compared with that of the stage before: three such sessions of real work counted as three in vain."""
    run = make(engine, ranks=1)
    for steps in (600, 400):
        session = sessions.open_session(engine, run, boot_id="b", first_step=8000, step=steps)
        attempted(engine, session.id, "train", 8000, 8100, made_progress=True, outcome="finished")
        attempted(engine, session.id, "tune", 0, steps, made_progress=steps == 600)
        sessions.update_session(engine, session.id, phase="suspended")
        queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
        assert queue.pending_resume(engine, run).failed_starts == 0


def test_a_session_that_was_killed_with_all_else_has_come_further_by_the_steps_that_it_told_of(engine):
    """The daemon puts it into the queue before anybody has ended its attempt."""
    run = make(engine, ranks=1)
    for step, expected in ((0, 1), (7, 0)):
        queue_claims.claim(engine, queue.pending_resume(engine, run).id, WE, by="daemon", snapshot=ANY)
        session = sessions.open_session(engine, run, boot_id="b")
        queue.mark_started(engine, run, WE, by="x")
        row = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
        sessions.record_heartbeat(engine, session.id, row.id, step=step)
        sessions.update_session(engine, session.id, phase="cut_off")
        queue.put(engine, run, reason=Reason.LOST, due_at=datetime.now(UTC))
        assert queue.pending_resume(engine, run).failed_starts == expected


def test_an_attempt_is_closed_with_the_session_that_it_ends_and_counts_for_it(engine):
    run = make(engine, ranks=1)
    session = sessions.open_session(engine, run, boot_id="b")
    row = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    closes = {"attempt_id": row.id, "outcome": "wall", "cause": "", "last_step": 9, "made_progress": True}
    resume = {"reason": Reason.TIME_LIMIT, "why": "the wall", "due_at": datetime.now(UTC)}
    sessions.record(
        engine, run, session.id, kind="exit_overdue", phase="suspended", facts={}, resume=resume, closes=closes
    )
    assert (
        queue.pending_resume(engine, run).failed_starts == 0
        and sessions.last_attempt(engine, session.id).outcome == "wall"
    )


def test_an_attempt_that_could_not_be_started_leaves_no_row(engine):
    session = sessions.open_session(engine, make(engine, ranks=1), boot_id="b")
    attempted(engine, session.id, "train", 0, 5, made_progress=True)
    for _ in range(3):
        sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    sessions.delete_open_attempts(engine, session.id)
    assert [row.last_step for row in sessions.attempts_of_sessions(engine, [session.id])] == [5]


def test_a_claim_passes_to_the_process_that_was_started_for_it_and_to_no_other(engine):
    row = queue.pending_resume(engine, make(engine, ranks=1))
    queue_claims.claim(engine, row.id, OTHER, by="daemon", snapshot=ANY)
    assert queue_claims.hand_over(engine, row.id, OTHER, WE, by="daemon")
    assert not queue_claims.hand_over(engine, row.id, OTHER, WE, by="daemon")
    assert not queue_claims.put_back(engine, row.id, OTHER, due_at=datetime.now(UTC), failed_starts=1, error="x")
    assert queue_claims.put_back(engine, row.id, WE, due_at=datetime.now(UTC), failed_starts=1, error="x")
    assert queue.pending_resume(engine, "id-ink").last_error == "x" and due(engine) == ["ink"]


def test_a_lease_is_renewed_by_its_holder_alone(engine):
    row = queue.pending_resume(engine, make(engine, ranks=1))
    queue_claims.claim(engine, row.id, WE, by="daemon", snapshot=ANY)
    before = queue.pending_resume(engine, "id-ink").lease_expires_at
    assert datetime.now(UTC) < before <= datetime.now(UTC) + LEASE
    assert not queue_claims.renew(engine, row.id, OTHER)
    assert queue_claims.renew(engine, row.id, WE)
    assert queue.pending_resume(engine, "id-ink").lease_expires_at > before


def test_a_row_that_failed_too_often_fails_its_run(engine):
    row = queue.pending_resume(engine, make(engine, ranks=1))
    queue_claims.claim(engine, row.id, WE, by="daemon", snapshot=ANY)
    queue_claims.put_back(engine, row.id, WE, due_at=None, failed_starts=8, error="no such disk")
    assert queue.pending_resume(engine, "id-ink") is None
    run = runs.newest(engine, "ink")
    assert run.state == "failed" and "8 times in a row: no such disk" in run.why


def test_opening_a_session_ends_the_wait_whatever_state_it_was_in(engine):
    for name in ("due", "claimed"):
        row = queue.pending_resume(engine, make(engine, name, ranks=1))
        if name == "claimed":
            queue_claims.claim(engine, row.id, OTHER, by="daemon", snapshot=ANY)
        queue.mark_started(engine, f"id-{name}", WE, by="a person")
        assert queue.pending_resume(engine, f"id-{name}") is None


def test_a_dropped_run_goes_on_when_a_person_asks(engine):
    run = make(engine, ranks=1)
    assert queue.unschedule(engine, run) and not queue.unschedule(engine, run)
    assert due(engine) == [] and queue.pending_resume(engine, run).due_at is None


def test_who_has_claimed_a_run_keeps_it_while_it_settles_what_was_and_opens_the_next_session(engine):
    run = make(engine, ranks=1)
    lost = sessions.open_session(engine, run, boot_id="b")
    queue_claims.claim(engine, queue.pending_resume(engine, run).id, WE, by="daemon", snapshot=ANY)
    resume = {"reason": Reason.LOST, "why": "cut_off", "due_at": datetime.now(UTC)}
    sessions.record(engine, run, lost.id, kind="session_lost", phase="cut_off", facts={}, resume=resume)
    assert due(engine) == [] and queue.pending_resume(engine, run).why == "cut_off"
    sessions.open_session(engine, run, boot_id="b")
    queue.mark_started(engine, run, WE, by="pid 7")
    assert [one.started_by for one in active_sessions.all_of(engine)] == ["daemon"]


def test_who_has_claimed_a_run_that_has_to_wait_puts_it_back_for_later(engine):
    run, later = make(engine, ranks=1), datetime.now(UTC) + timedelta(hours=1)
    queue_claims.claim(engine, queue.pending_resume(engine, run).id, WE, by="daemon", snapshot=ANY)
    queue.put(engine, run, reason=Reason.QUOTA, due_at=later)
    waits = queue.pending_resume(engine, run)
    assert (waits.state, waits.why, waits.due_at, waits.failed_starts) == ("due", "the quota", later, 0)
    assert queue_claims.claimed_entries(engine) == []


def test_what_a_clock_that_ran_ahead_has_queued_is_due_now_and_nothing_else(engine, monkeypatch):
    now = datetime.now(UTC)
    tomorrow = make(engine, "tomorrow")
    queue.put(engine, tomorrow, reason=Reason.QUOTA, due_at=now + timedelta(days=1))
    ahead = make(engine, "ahead")
    monkeypatch.setattr(queue, "now", lambda: now + timedelta(days=365))
    queue.put(engine, ahead, reason=Reason.TIME_LIMIT, due_at=now + timedelta(days=365))
    assert due(engine) == []
    assert queue.repair_future_timestamps(engine, now) == 1
    assert due(engine) == ["ahead"]


def test_what_was_put_back_while_the_clock_ran_ahead_is_due_now(engine, monkeypatch):
    now, month = datetime.now(UTC), timedelta(days=30)
    row = queue.pending_resume(engine, make(engine, ranks=1))
    monkeypatch.setattr(queue_claims, "now", lambda: now + month)
    assert queue_claims.claim(engine, row.id, WE, by="daemon", snapshot=ANY)
    assert queue_claims.put_back(engine, row.id, WE, due_at=now + month, failed_starts=0, error="no GPU is free")
    assert due(engine) == []
    assert queue.repair_future_timestamps(engine, now) == 1
    assert due(engine) == ["ink"]
