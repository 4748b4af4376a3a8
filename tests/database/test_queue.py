"""The queue's rows: one taker each, whoever asks and whatever dies."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

from db import queue, runs, sessions
from db.queue import LEASE, Claimant, Seen
from orchestrator.core.codes import REASON_TEXT, Reason
from orchestrator.system import process_identity

ANY = Seen(10**6, 10**6)
WE = Claimant(os.getpid(), process_identity.start_ticks(os.getpid()), process_identity.boot_id())
OTHER = Claimant(1, 2, "another boot")


def make(engine, name: str = "ink", **wants) -> str:
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
    if wants:
        due_at = datetime.now(UTC) - timedelta(seconds=wants.pop("since_s", 0.0))
        queue.put(engine, run.id, reason=Reason.QUEUED, due_at=due_at, wants=wants)
    return run.id


def due(engine) -> list[str]:
    return [entry.run for entry in queue.due(engine, datetime.now(UTC), limit=100)]


def test_a_claimed_row_is_nobody_elses(engine):
    row = queue.open_resume(engine, make(engine, ranks=1))
    assert queue.claim(engine, row.id, WE, by="daemon", seen=ANY)
    assert not queue.claim(engine, row.id, OTHER, by="daemon", seen=ANY)
    assert due(engine) == [] and queue.claimed(engine)[0].resume.claimed_pid == os.getpid()


def test_a_claim_that_follows_from_an_older_look_fails(engine):
    first, second = (queue.open_resume(engine, make(engine, name, ranks=1)) for name in ("a", "b"))
    seen = Seen(0, queue.newest_session(engine))
    assert queue.claim(engine, first.id, OTHER, by="daemon", seen=seen)
    assert not queue.claim(engine, second.id, WE, by="daemon", seen=seen), "somebody has claimed meanwhile"
    queue.taken(engine, "id-a", by="x", **OTHER._asdict())
    sessions.open_session(engine, "id-a", boot_id="b")
    assert not queue.claim(engine, second.id, WE, by="daemon", seen=seen), "a session was opened meanwhile"
    assert queue.claim(engine, second.id, WE, by="daemon", seen=Seen(0, queue.newest_session(engine)))


CLAIMS = """
import sys
from pathlib import Path
from db import queue
from db.engine import open_database
from db.queue import Claimant, Seen
engine = open_database(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
me = Claimant(int(sys.argv[2]), 1, "b")
print(*[number for number in range(1, 61) if queue.claim(engine, number, me, by="x", seen=Seen(10**6, 10**6))])
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
    queue.taken(engine, run, by="x", **WE._asdict())
    queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
    row = queue.open_resume(engine, run)
    assert (row.ranks, row.share, row.priority, row.why) == (2, True, 7, REASON_TEXT[Reason.TIME_LIMIT])


def test_tries_count_on_while_sessions_come_no_step_further(engine):
    run = make(engine, ranks=1)
    for expected in (1, 2):
        row = queue.open_resume(engine, run)
        queue.claim(engine, row.id, WE, by="daemon", seen=ANY)
        session = sessions.open_session(engine, run, boot_id="b")
        queue.taken(engine, run, by="x", **WE._asdict())
        queue.put(engine, run, reason=Reason.LOST, due_at=datetime.now(UTC))
        assert queue.open_resume(engine, run).tries == expected
    attempted(engine, session.id, "train", 0, 5, gained=True)
    queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
    assert queue.open_resume(engine, run).tries == 0


def attempted(
    engine, session_id: int, stage: str, first_step: int, last_step: int, *, gained: bool, outcome: str = "time_limit"
):
    row = sessions.open_attempt(
        engine, session_id, stage=stage, ranks=1, first_step=first_step, folder_of=lambda number: f"/{number}"
    )
    sessions.close_attempt(engine, row.id, outcome=outcome, cause="", last_step=last_step, gained=gained)


def test_a_session_that_ends_in_a_shorter_stage_than_it_began_in_has_come_further(engine):
    """Its step was compared with that of the stage before: three such sessions of real work counted as three in vain."""
    run = make(engine, ranks=1)
    for steps in (600, 400):
        session = sessions.open_session(engine, run, boot_id="b", first_step=8000, step=steps)
        attempted(engine, session.id, "train", 8000, 8100, gained=True, outcome="finished")
        attempted(engine, session.id, "tune", 0, steps, gained=steps == 600)
        queue.put(engine, run, reason=Reason.TIME_LIMIT, due_at=datetime.now(UTC))
        assert queue.open_resume(engine, run).tries == 0


def test_a_session_that_was_killed_with_all_else_has_come_further_by_the_steps_that_it_told_of(engine):
    """The daemon puts it into the queue before anybody has ended its attempt."""
    run = make(engine, ranks=1)
    for step, expected in ((0, 1), (7, 0)):
        queue.claim(engine, queue.open_resume(engine, run).id, WE, by="daemon", seen=ANY)
        session = sessions.open_session(engine, run, boot_id="b")
        queue.taken(engine, run, by="x", **WE._asdict())
        row = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
        sessions.beat(engine, session.id, row.id, step=step)
        queue.put(engine, run, reason=Reason.LOST, due_at=datetime.now(UTC))
        assert queue.open_resume(engine, run).tries == expected


def test_an_attempt_is_closed_with_the_session_that_it_ends_and_counts_for_it(engine):
    run = make(engine, ranks=1)
    session = sessions.open_session(engine, run, boot_id="b")
    row = sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    closes = {"attempt_id": row.id, "outcome": "wall", "cause": "", "last_step": 9, "gained": True}
    resume = {"reason": Reason.TIME_LIMIT, "why": "the wall", "due_at": datetime.now(UTC)}
    sessions.record(
        engine, run, session.id, kind="exit_overdue", phase="suspended", facts={}, resume=resume, closes=closes
    )
    assert queue.open_resume(engine, run).tries == 0 and sessions.last_attempt(engine, session.id).outcome == "wall"


def test_an_attempt_that_could_not_be_started_leaves_no_row(engine):
    session = sessions.open_session(engine, make(engine, ranks=1), boot_id="b")
    attempted(engine, session.id, "train", 0, 5, gained=True)
    for _ in range(3):
        sessions.open_attempt(engine, session.id, stage="train", ranks=1, first_step=0, folder_of=str)
    sessions.drop_open_attempts(engine, session.id)
    assert [row.last_step for row in sessions.attempts_of(engine, [session.id])] == [5]


def test_a_claim_passes_to_the_process_that_was_started_for_it_and_to_no_other(engine):
    row = queue.open_resume(engine, make(engine, ranks=1))
    queue.claim(engine, row.id, OTHER, by="daemon", seen=ANY)
    assert queue.hand_over(engine, row.id, OTHER, WE, by="daemon")
    assert not queue.hand_over(engine, row.id, OTHER, WE, by="daemon")
    assert not queue.put_back(engine, row.id, OTHER, due_at=datetime.now(UTC), tries=1, error="x")
    assert queue.put_back(engine, row.id, WE, due_at=datetime.now(UTC), tries=1, error="x")
    assert queue.open_resume(engine, "id-ink").last_error == "x" and due(engine) == ["ink"]


def test_a_lease_is_renewed_by_its_holder_alone(engine):
    row = queue.open_resume(engine, make(engine, ranks=1))
    queue.claim(engine, row.id, WE, by="daemon", seen=ANY)
    before = queue.open_resume(engine, "id-ink").lease_until_at
    assert datetime.now(UTC) < before <= datetime.now(UTC) + LEASE
    assert not queue.renew(engine, row.id, OTHER)
    assert queue.renew(engine, row.id, WE)
    assert queue.open_resume(engine, "id-ink").lease_until_at > before


def test_a_row_that_failed_too_often_fails_its_run(engine):
    row = queue.open_resume(engine, make(engine, ranks=1))
    queue.claim(engine, row.id, WE, by="daemon", seen=ANY)
    queue.put_back(engine, row.id, WE, due_at=None, tries=8, error="no such disk")
    assert queue.open_resume(engine, "id-ink") is None
    run = runs.newest(engine, "ink")
    assert run.state == "failed" and "8 times in a row: no such disk" in run.why


def test_opening_a_session_ends_the_wait_whatever_state_it_was_in(engine):
    for name in ("due", "claimed"):
        row = queue.open_resume(engine, make(engine, name, ranks=1))
        if name == "claimed":
            queue.claim(engine, row.id, OTHER, by="daemon", seen=ANY)
        queue.taken(engine, f"id-{name}", by="a person", **WE._asdict())
        assert queue.open_resume(engine, f"id-{name}") is None


def test_a_dropped_run_goes_on_when_a_person_asks(engine):
    run = make(engine, ranks=1)
    assert queue.drop(engine, run) and not queue.drop(engine, run)
    assert due(engine) == [] and queue.open_resume(engine, run).due_at is None


def test_who_has_claimed_a_run_keeps_it_while_it_settles_what_was_and_opens_the_next_session(engine):
    run = make(engine, ranks=1)
    lost = sessions.open_session(engine, run, boot_id="b")
    queue.claim(engine, queue.open_resume(engine, run).id, WE, by="daemon", seen=ANY)
    resume = {"reason": Reason.LOST, "why": "cut_off", "due_at": datetime.now(UTC)}
    sessions.record(engine, run, lost.id, kind="session_lost", phase="cut_off", facts={}, resume=resume)
    assert due(engine) == [] and queue.open_resume(engine, run).why == "cut_off"
    sessions.open_session(engine, run, boot_id="b")
    queue.taken(engine, run, by="pid 7", **WE._asdict())
    assert [one.begun_by for one in queue.open_sessions(engine)] == ["daemon"]


def test_who_has_claimed_a_run_that_has_to_wait_puts_it_back_for_later(engine):
    run, later = make(engine, ranks=1), datetime.now(UTC) + timedelta(hours=1)
    queue.claim(engine, queue.open_resume(engine, run).id, WE, by="daemon", seen=ANY)
    queue.put(engine, run, reason=Reason.QUOTA, due_at=later)
    waits = queue.open_resume(engine, run)
    assert (waits.state, waits.why, waits.due_at, waits.tries) == ("due", "the quota", later, 0)
    assert queue.claimed(engine) == []


def test_what_a_clock_that_ran_ahead_has_queued_is_due_now_and_nothing_else(engine, monkeypatch):
    now = datetime.now(UTC)
    tomorrow = make(engine, "tomorrow")
    queue.put(engine, tomorrow, reason=Reason.QUOTA, due_at=now + timedelta(days=1))
    ahead = make(engine, "ahead")
    monkeypatch.setattr(queue, "now", lambda: now + timedelta(days=365))
    queue.put(engine, ahead, reason=Reason.TIME_LIMIT, due_at=now + timedelta(days=365))
    assert due(engine) == []
    assert queue.mend_clock(engine, now) == 1
    assert due(engine) == ["ahead"]
