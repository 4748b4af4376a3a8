"""The plan that a run stores, and how it changed between its sessions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Engine

from kgorch.core.codes import EventKind
from kgorch.db import sessions
from kgorch.db.rows import EventInfo, RunInfo
from kgorch.report.json_fields import View, stamp

MAX_CHANGES = 200


def of_run(engine: Engine, run: RunInfo) -> View:
    """`text` (TOML as it was written), `overrides` (of --set), `hash`, `workdir`; `changes`, newest first: `at`, `after_session`,
    `what`, `changed` (`key`, `old`, `new`), `accepted` (refusals that the user overruled).
    """
    events = sessions.events_of_kind(engine, run.id, EventKind.PLAN_CHANGED, limit=MAX_CHANGES)
    starts = [(row.started_at, row.number) for row in sessions.of_run(engine, run.id)] if events else []
    return {
        "text": run.plan,
        "overrides": list(run.overrides),
        "hash": run.plan_hash,
        "workdir": run.workdir,
        "changes": [_change(event, starts) for event in reversed(events)],
    }


def _change(event: EventInfo, starts: Sequence[tuple[datetime, int]]) -> View:
    facts = event.facts
    changed = facts.get("changed")
    return {
        "at": stamp(event.at),
        "after_session": max((number for at, number in starts if at <= event.at), default=None),
        "what": str(facts.get("what") or ""),
        "changed": [
            {name: str(item.get(name)) for name in ("key", "old", "new")}
            for item in (changed if isinstance(changed, list) else ())
            if isinstance(item, dict)
        ],
        "accepted": [str(item) for item in facts.get("accepted") or ()],
    }
