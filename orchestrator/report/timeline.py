"""What happened to a run and when: sessions, attempts, saves, changes of memory and health, as spans and marks of a timeline."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Engine

from kgorch.core.codes import EventKind, Outcome
from kgorch.db import checkpoints, rungs, sessions
from kgorch.db.rows import CheckpointInfo, RungInfo, RunInfo
from kgorch.report.json_fields import View, stamp

MAX_SESSIONS, MAX_MARKS = 1000, 4000
"""Newest ones that are shown."""

TROUBLES = (
    EventKind.SAVE_FAILED,
    EventKind.LAST_SAVE_LATE,
    EventKind.RANKS_HUNG,
    EventKind.SESSION_LOST,
    EventKind.GPU_LOST,
    EventKind.GPU_XID,
    EventKind.SPOT_NOTICE,
    EventKind.CHECKPOINT_QUARANTINED,
    EventKind.PLAN_CHANGED,
    EventKind.STAGE_FINISHED,
    EventKind.RUN_FINISHED,
)
"""Events that are marks of their own; the end of an attempt, a save and a rung have rows of their own."""

BAD = frozenset({Outcome.CRASHED, Outcome.OUT_OF_MEMORY, Outcome.DIVERGED, Outcome.HUNG, Outcome.LOST, Outcome.UNSAVED})


def of_run(engine: Engine, run: RunInfo, now: datetime) -> View:
    """`from`, `to`; `sessions`, `attempts` (spans); `marks`: `at`, `kind` (`save`, `rung`, `remedy`, `crash`, `wall`, or that of an
    event), `text`, `step`, `session`. A span that has not ended ends now.
    """
    rows = sessions.of_run(engine, run.id, limit=MAX_SESSIONS)
    numbers = {row.id: row.number for row in rows}
    since = rows[0].started_at if rows else run.created_at
    spans, attempts, marks = [], [], []
    for row in rows:
        end = row.ended_at or (now if row is rows[-1] else row.heartbeat_at or row.started_at)
        spans.append(
            _span(row.started_at, end)
            | {"number": row.number, "site": row.site, "phase": row.phase, "reason": row.reason, "why": row.why}
            | {"stage": row.stage, "first_step": row.first_step, "last_step": row.step, "wall_at": stamp(row.wall_at)}
            | {"over": row.ended_at is not None}
        )
        if row.wall_at:
            marks.append(_mark(row.wall_at, "wall", "time limit of the session", None, row.number))
    for item in sessions.attempts_of_sessions(engine, list(numbers)):
        end = item.ended_at or now
        attempts.append(
            _span(item.started_at, end)
            | {"session": numbers[item.session_id], "number": item.number, "stage": item.stage, "ranks": item.ranks}
            | {"first_step": item.first_step, "last_step": item.last_step, "outcome": item.outcome, "cause": item.cause}
        )
        if item.outcome in BAD:
            text = f"{item.outcome.replace('_', ' ')}: {item.cause}" if item.cause else item.outcome.replace("_", " ")
            marks.append(_mark(end, "crash", text, item.last_step, numbers[item.session_id]))
    marks += [_save(item, numbers) for item in checkpoints.of_run(engine, run.id) if item.created_at >= since][
        -MAX_MARKS:
    ]
    marks += [_rung(item, numbers) for item in rungs.of_run(engine, run.id) if item.at >= since][-MAX_MARKS:]
    for kind in TROUBLES:
        for event in sessions.events_of_kind(engine, run.id, kind, limit=MAX_MARKS // len(TROUBLES)):
            if event.at >= since:
                why = str(event.facts.get("why") or event.facts.get("cause") or event.facts.get("what") or "")
                text = kind.replace("_", " ") + (f": {why}" if why else "")
                marks.append(
                    _mark(event.at, str(kind), text, event.facts.get("step"), numbers.get(event.session_id or 0))
                )
    marks.sort(key=lambda mark: mark["at"])
    ends = [item["to"] for item in (*spans, *attempts)] + [mark["at"] for mark in marks if mark["kind"] != "wall"]
    return {
        "from": stamp(since),
        "to": max(ends, default=stamp(now)),
        "sessions": spans,
        "attempts": attempts,
        "marks": marks,
        "older_sessions": rows[0].number - 1 if rows else 0,
    }


def _span(start: datetime, end: datetime) -> View:
    """The wall clock may have been set back between the two."""
    return {"from": stamp(start), "to": stamp(max(start, end))}


def _mark(at: datetime, kind: str, text: str, step: object, session: int | None) -> View:
    return {
        "at": stamp(at),
        "kind": kind,
        "text": text[:500],
        "step": step if isinstance(step, int) else None,
        "session": session,
    }


def _save(item: CheckpointInfo, numbers: dict[int, int]) -> View:
    text = f"checkpoint of step {item.step}, {item.stage}, {item.state}" + (", final" if item.final else "")
    return _mark(item.created_at, "save", text, item.step, numbers.get(item.session_id or 0)) | {
        "state": item.state,
        "stage": item.stage,
        "best": bool(item.best),
    }


def _rung(item: RungInfo, numbers: dict[int, int]) -> View:
    kind = "rung" if "settings" in item.settings else "remedy"
    text = f"{item.rung}{' undone' if item.up else ''}: {item.why}" + (
        "; changes the result" if item.changes_result else ""
    )
    return _mark(item.at, kind, text, item.step, numbers.get(item.session_id or 0)) | {"stage": item.stage}
