"""What went wrong in a run and what was done about it, oldest first: for `kgorch report`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from sqlalchemy import Engine

from kgorch.core.codes import EventKind, Phase
from kgorch.db import rungs, sessions
from kgorch.db.rows import AttemptInfo, EventInfo, RunInfo, SessionInfo
from kgorch.report import timeline
from kgorch.report.json_fields import View, stamp

EVENTS: Mapping[EventKind, str] = {
    EventKind.SAVE_FAILED: "the next save was tried at its time",
    EventKind.LAST_SAVE_LATE: "the newest snapshot in memory was written as the checkpoint",
    EventKind.CHECKPOINT_QUARANTINED: "set aside; the checkpoint before it was used",
    EventKind.MIRROR_FAILED: "tried again; the checkpoints stay here",
    EventKind.LAUNCH_FAILED: "launched again",
    EventKind.GPU_LOST: "",
    EventKind.GPU_XID: "",
    EventKind.SPOT_NOTICE: "saved before the machine was reclaimed",
    EventKind.SNAPSHOTS_OFF: "recovery from checkpoints alone",
    EventKind.METRICS_DROPPED: "",
    EventKind.NOTICES_FAILED: "tried again",
    EventKind.BUG: "",
}
"""Events that are problems, and what kgorch does about each; empty for nothing but the note."""

MAX_OF_KIND = 200
"""Newest events of a kind that are read."""


def of_run(engine: Engine, run: RunInfo, rows: Sequence[SessionInfo], attempts: Sequence[AttemptInfo]) -> list[View]:
    """Entries with `at`, `session`, `stage`, `step`, `what`, `done` and `changes_result`.

    Args:
        rows, attempts: the run's sessions, and their attempts, oldest first.
    """
    numbers = {row.id: row.number for row in rows}
    whole = {row.id: row.why for row in rows if row.phase in (Phase.CUT_OFF, Phase.FAILED)}
    # What ended a session is told once, with the steps that it cost.
    alone = [item for item in attempts if not item.cause or item.cause not in whole.get(item.session_id, "")]
    entries = [*_of_attempts(alone, attempts, numbers), *_of_sessions(rows, attempts)]
    for rung in rungs.of_run(engine, run.id):
        entry = _entry(rung.at, numbers.get(rung.session_id or 0), rung.stage, rung.step, rung.why, rung.rung)
        entries.append(entry | {"changes_result": rung.changes_result})
    for kind, remedy in EVENTS.items():
        entries += _of_events(sessions.events_of_kind(engine, run.id, kind, limit=MAX_OF_KIND), numbers, remedy)
    return sorted(entries, key=lambda entry: entry["at"] or "")


def _of_attempts(
    shown: Sequence[AttemptInfo], attempts: Sequence[AttemptInfo], numbers: Mapping[int, int]
) -> Iterator[View]:
    for attempt in shown:
        if attempt.outcome not in timeline.BAD:
            continue
        later = next((item for item in attempts if item.id > attempt.id and item.stage == attempt.stage), None)
        what = attempt.outcome.replace("_", " ") + (f": {attempt.cause}" if attempt.cause else "")
        yield _entry(
            attempt.ended_at,
            numbers.get(attempt.session_id),
            attempt.stage,
            attempt.last_step,
            what,
            _continued(later, numbers),
        )


def _continued(later: AttemptInfo | None, numbers: Mapping[int, int]) -> str:
    if later is None:
        return "not continued yet"
    return (
        f"continued from step {later.first_step} (session {numbers.get(later.session_id, '?')}, attempt {later.number})"
    )


def _of_sessions(rows: Sequence[SessionInfo], attempts: Sequence[AttemptInfo]) -> Iterator[View]:
    """Sessions that ended without their last save."""
    numbers = {row.id: row.number for row in rows}
    for row in rows:
        if row.phase not in (Phase.CUT_OFF, Phase.FAILED):
            continue
        later = next((item for item in attempts if numbers.get(item.session_id, 0) > row.number), None)
        what = f"session {row.phase.replace('_', ' ')}" + (f": {row.why}" if row.why else "")
        yield _entry(
            row.ended_at or row.heartbeat_at, row.number, row.stage, row.step, what, _continued(later, numbers)
        )


def _of_events(events: Sequence[EventInfo], numbers: Mapping[int, int], remedy: str) -> Iterator[View]:
    """Equal ones of a session as one entry: a full disk fails every few seconds."""
    groups: dict[tuple[int | None, str], list[EventInfo]] = defaultdict(list)
    for event in events:
        why = event.facts.get("why") or event.facts.get("what") or event.facts.get("cause") or ""
        groups[event.session_id, f"{event.kind.replace('_', ' ')}: {why}".removesuffix(": ")].append(event)
    for (session_id, what), group in groups.items():
        times = f" ({len(group)} times)" if len(group) > 1 else ""
        yield _entry(group[0].at, numbers.get(session_id or 0), "", None, what + times, remedy)


def _entry(at: datetime | None, session: int | None, stage: str, step: int | None, what: str, done: str) -> View:
    return {
        "at": stamp(at),
        "session": session,
        "stage": stage,
        "step": step,
        "what": what,
        "done": done,
        "changes_result": False,
    }
