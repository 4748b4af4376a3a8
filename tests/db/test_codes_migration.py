"""A database of before codes: sentences and class names become codes, by the migration alone."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kgorch.core.codes import OVER, EventKind, Outcome, Phase, Reason, RunState
from kgorch.db import checkpoints, queue, runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.integrity_check import first_invalid_value

DUMP = (Path(__file__).parents[1] / "promises" / "database_0007.sql").read_text()
"""Of a run that was killed four times, stopped once, and came to its end; as version 0007 left it."""


@pytest.fixture
def home(tmp_path):
    """The state folder of a run of before."""
    (tmp_path / "home").mkdir(mode=0o700)
    with closing(sqlite3.connect(tmp_path / "home" / "kgorch.db")) as old:
        old.executescript(DUMP)
    return tmp_path / "home"


def change(home: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(home / "kgorch.db")) as old:
        old.execute(statement, values)
        old.commit()


def test_a_real_database_of_before_reads_in_codes_and_is_sound(home):
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    found = sessions.of_run(engine, run.id)
    assert [(row.phase, row.reason) for row in found] == [
        *[(Phase.CUT_OFF, Reason.LOST)] * 3,
        (Phase.SUSPENDED, Reason.USER),
        (Phase.CUT_OFF, Reason.LOST),
        (Phase.FINISHED, Reason.NONE),
    ]
    assert {row.wall_kind for row in found} == {Reason.QUOTA} and run.state is RunState.FINISHED
    outcomes = [attempt.outcome for attempt in sessions.attempts(engine, run.id)]
    assert outcomes == [*[Outcome.LOST] * 3, Outcome.STOPPED, Outcome.LOST, Outcome.FINISHED]
    events = sessions.events(engine, run.id, limit=1000)
    assert events and all(isinstance(event.kind, EventKind) for event in events)
    assert {event.phase for event in events} <= {"", *Phase}
    [stop] = [event for event in events if event.kind is EventKind.STOP_REQUESTED]
    assert stop.facts == {"reason": "user"}
    assert checkpoints.newest_verified(engine, run.id) and queue.pending_resume(engine, run.id) is None
    assert first_invalid_value(engine, {}) is None


@pytest.mark.parametrize(
    ("why", "phase", "reason"),
    [
        ("the wall", "suspended", Reason.TIME_LIMIT),
        ("the wall; then: rank 0: ValueError: x", "cut off", Reason.TIME_LIMIT),
        ("the time that was given", "suspended", Reason.UNTIL),
        ("the quota came before the last save was done", "cut off", Reason.QUOTA),
        ("the end of the Slurm job", "suspended", Reason.SLURM),
        ("a notice that the machine is taken back", "suspended", Reason.SPOT),
        ("a person's stop", "suspended", Reason.USER),
        ("the daemon was stopped", "suspended", Reason.DAEMON),
        ("SIGTERM", "suspended", Reason.SIGTERM),
        ("nothing of it was running any more", "cut off", Reason.LOST),
        ("nothing of it was heard after this state was kept", "cut off", Reason.LOST),
        ("rank 1 was killed (torchrun ended with 1)", "cut off", Reason.LOST),
        ("the wall came before the first step: …; the attempt before it came to no step either", "failed", Reason.ERROR),
        ("", "finished", Reason.NONE),
        ("", "training", Reason.NONE),
    ],
)  # fmt: skip
def test_what_a_session_ended_by_becomes_its_reason(home, why, phase, reason):
    change(home, "UPDATE sessions SET why = ?, phase = ?", why, phase)
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    for row in sessions.of_run(engine, run.id):
        assert (row.reason, row.why, row.phase) == (reason, why, phase.replace(" ", "_"))
        assert (row.phase in OVER) == (phase != "training")


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("the quota", Reason.QUOTA),
        ("a person asked", Reason.QUEUED),
        ("its supervisor was gone", Reason.LOST),
        ("a person took it out of the queue", Reason.REMOVED),
        ("a person's stop", Reason.USER),
    ],
)
def test_why_a_run_waits_becomes_its_reason(home, why, reason):
    change(home, "UPDATE resumes SET why = ?, state = 'due' WHERE id = (SELECT max(id) FROM resumes)", why)
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    assert queue.pending_resume(engine, run.id).reason is reason


@pytest.mark.parametrize(
    ("before", "now"),
    [("wall", Outcome.TIME_LIMIT), ("out of memory", Outcome.OUT_OF_MEMORY), ("unwell", Outcome.DIVERGED)],
)
def test_outcomes_of_attempts_become_codes(home, before, now):
    change(home, "UPDATE attempts SET outcome = ?", before)
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    assert {attempt.outcome for attempt in sessions.attempts(engine, run.id)} == {now}


def test_every_kind_of_event_of_before_is_one_of_today(home):
    from importlib import import_module

    kinds = import_module("kgorch.db.migrations.versions.0008_codes").KINDS
    assert set(kinds.values()) <= set(EventKind) and not set(kinds) & set(EventKind)
    for number, kind in enumerate(kinds):
        facts = '{"why": "SIGTERM", "event": "SaveFailed"}'
        change(
            home,
            "INSERT INTO events (run_id, at, kind, phase, facts) SELECT id, '2026-11-23 10:00:00', ?, 'cut off', ? FROM runs",
            kind,
            facts.replace("SIGTERM", "the quota") if number % 2 else facts,
        )
    engine = open_database(home)
    [run] = runs.all_runs(engine)
    found = sessions.events(engine, run.id, limit=len(kinds))
    assert [event.kind for event in found] == list(kinds.values()) and {event.phase for event in found} == {"cut_off"}
    moved = next(event.facts for event in found if event.kind is EventKind.WALL_MOVED)
    assert moved["wall"] in ("quota", "sigterm")
    ignored = next(event.facts for event in found if event.kind is EventKind.EVENT_IGNORED)
    assert ignored["event"] == "save_failed"


def test_no_class_name_or_sentence_is_left_in_a_column_of_codes(home):
    open_database(home).dispose()
    with closing(sqlite3.connect(home / "kgorch.db")) as now:
        kept = {
            value
            for column in ("phase FROM sessions", "phase FROM events", "kind FROM events", "outcome FROM attempts",
                           "reason FROM sessions", "reason FROM resumes", "wall_kind FROM sessions")
            for (value,) in now.execute(f"SELECT DISTINCT {column}")
        }  # fmt: skip
    assert kept and all(re.fullmatch("[a-z_]*", value) for value in kept)
