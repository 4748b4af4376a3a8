"""The journal of a run as programs read it: the lines of `kgorch events --json` (docs/json.md)."""

from __future__ import annotations

from kgorch.db.rows import EventInfo, RunInfo
from kgorch.report.json_fields import View, stamp


def event_view(run: RunInfo, event: EventInfo) -> View:
    """One event. `id` grows within a state folder; a program that was interrupted goes on after the last one that it has read."""
    return {
        "id": event.id,
        "run": run.name,
        "run_number": run.number,
        "at": stamp(event.at),
        "kind": event.kind,
        "phase": event.phase,
        "facts": dict(event.facts),
    }
