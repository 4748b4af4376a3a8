"""The sessions of a run at another place, in the fields that `--json` promises (docs/json.md). Reads the database alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Engine

from kgorch.admission import remote_sessions
from kgorch.core.codes import REMOTE_OPEN
from kgorch.db import remote
from kgorch.db.rows import RemoteSessionInfo, RunInfo
from kgorch.report.json_fields import View, stamp


def of_run(engine: Engine, run: RunInfo) -> View | None:
    """The newest session at another place, and the furthest verified state there; None for a run of this machine."""
    rows = remote.of_run(engine, run.id)
    if not rows:
        return None
    good = [row for row in remote_sessions.sources(rows) if row.reached_step >= 0]
    best = max(good, key=lambda row: (row.reached_position, row.reached_step), default=None)
    return session(rows[-1]) | {
        "checkpoint": {"stage": best.stage, "step": best.reached_step, "session": best.number} if best else None,
        "sessions": len(rows),
    }


def session(row: RemoteSessionInfo) -> View:
    is_open = row.state in REMOTE_OPEN
    return {
        "place": row.place,
        "account": row.account or None,
        "session": row.number,
        "name": row.name,
        "url": row.url or None,
        "state": row.state,
        "wait": row.wait,
        "why": row.why,
        "status": row.status or None,
        "status_at": stamp(row.status_at),
        "pushed_at": stamp(row.pushed_at),
        "running_at": stamp(row.running_at),
        "session_s": row.session_s,
        "from_step": row.expected_step if row.expected_step >= 0 else None,
        "next_at": stamp(row.due_at) if is_open else None,
        "stopped": row.is_last,
        "version": row.version or None,
        "outcome": row.outcome or None,
    }


def following(run: RunInfo, view: View, *, is_here: bool) -> View:
    """What `next` says of a run at another place; nothing where it is over there, and its state came here.

    Args:
        is_here: whether a session of the run is known that was here, or came with what was fetched.
    """
    if view["next_at"]:
        return {"what": "remote", "at": view["next_at"], "command": "kgorch daemon"}
    if is_here:
        return {}
    command = f"kgorch remote fetch {run.name}" if view["checkpoint"] else "kgorch remote start PLAN"
    return {"what": "fetch" if view["checkpoint"] else "mend", "at": None, "command": command}


def history(engine: Engine, run: RunInfo, known: Sequence[datetime]) -> list[View]:
    """Sessions at another place, but for those that came here with what was fetched.

    Args:
        known: when the sessions began that the database here has.
    """
    rows = remote.of_run(engine, run.id)
    return [history_entry(row) for row in rows if not any(_covers(row, at) for at in known)]


def _covers(row: RemoteSessionInfo, at: datetime) -> bool:
    if not row.record:
        return False
    return datetime.fromisoformat(row.record["began_at"]) <= at <= datetime.fromisoformat(row.record["ended_at"])


def history_entry(row: RemoteSessionInfo) -> View:
    """In the fields of a session of this machine (run_view.history): those that only the place knows are empty."""
    began_at = row.running_at or row.pushed_at or row.created_at
    ended_at = row.status_at if row.state not in REMOTE_OPEN and row.pushed_at else None
    return {
        "number": row.number,
        "site": row.place,
        "phase": row.state,
        "reason": row.wait,
        "why": row.why,
        "started_at": stamp(began_at),
        "ended_at": stamp(ended_at),
        "lasted_s": max(0.0, (ended_at - began_at).total_seconds()) if ended_at else 0.0,
        "stages": [{"name": row.stage, "first_step": max(0, row.expected_step), "last_step": row.reached_step}]
        if row.stage
        else [],
        "attempts": [],
        "rungs": [],
        "checkpoint": None,
        "metrics": {},
        "remote": session(row),
    }


def queue_entries(engine: Engine) -> list[View]:
    """The runs at other places, in the fields of a run that waits to be started here (docs/json.md)."""
    return [
        {
            "run": name,
            "run_number": number,
            "state": "remote",
            "due_at": stamp(row.due_at),
            "priority": 0,
            "reason": str(row.wait),
            "why": f"session {row.number} at {row.place}: {row.state}",
            "failed_starts": row.tries,
            "last_error": row.why or None,
            "ranks": None,
            "share": None,
        }
        for name, number, row in remote.open_sessions(engine)
    ]
