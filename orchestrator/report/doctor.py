"""A run's newest session as a physician would ask for it: how busy, since when, what happened, what to change.

The fields are those that `kgorch doctor --json` promises (docs/json.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import rungs, samples, sessions
from db.records import AttemptInfo, EventInfo, RunInfo, SampleInfo, SessionInfo
from orchestrator.admission.resolve_run import plan_of
from orchestrator.core import bottlenecks
from orchestrator.core.codes import EventKind
from orchestrator.launch.attempts import device_of
from orchestrator.launch.rungs import Place, standing
from orchestrator.report.run_view import View, stamp

RECENT_S = 600
"""Advice is of the last ten minutes, where single seconds are kept; a picture is of the whole session."""

EVENTS_LOOKED_AT = 2000
K = EventKind
IN_ORDER = {
    K.SESSION_OPENED,
    K.ADOPTED,
    K.ATTACHED,
    K.LAUNCHED,
    K.CHECKPOINT_DUE,
    K.CHECKPOINT_VERIFIED,
    K.SAVE_REQUESTED,
    K.STOP_REQUESTED,
    K.DEADLINE_REACHED,
    K.STAGE_FINISHED,
    K.RUN_FINISHED,
    K.ATTEMPT_SUSPENDED,
    K.EXACTNESS,
    K.MEMORY_FACTS,
    K.MIRRORING,
    K.MIRRORED,
    K.WEIGHTS_LOADED,
    K.TELEMETRY_BACK,
    K.EVENT_IGNORED,
    K.CHECKPOINT_IMPORTED,
    K.RUNG_TAKEN,
    K.LONGEST_WAITS,
    K.DATA_CACHED,
}
"""Kinds of events that a healthy session has, or that are told elsewhere."""


def of_run(engine: Engine, run: RunInfo) -> View:
    row = sessions.last(engine, run.id)
    told = bottlenecks.advise([item.values for item in _recent(engine, row)], _facts(engine, run, row)) if row else None
    return {
        "run": run.name,
        "run_number": run.number,
        "session": row.number if row else None,
        "utilization": {
            "of": told.of if told else None,
            "percent": told.percent if told else None,
            "band": told.band if told else None,
        },
        "series": _series(_whole(engine, row) if row else []),
        "findings": [asdict(finding) | {"figures": dict(finding.figures)} for finding in told.findings] if told else [],
        "rungs": [
            {"at": stamp(item.at), "step": item.step, "rung": item.rung, "why": item.why, "up": item.up}
            for item in rungs.of_run(engine, run.id)
        ],
        "happened": _happened(engine, run, row) if row else [],
    }


def _recent(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    """The last minutes of the session, as finely as they are kept."""
    for span_s in (samples.SECOND, samples.MINUTE, samples.HOUR):
        if found := samples.series(engine, row.id, row.started_at, span_s):
            lasts = timedelta(seconds=max(RECENT_S, span_s))
            return [item for item in found if found[-1].at - item.at <= lasts]
    return []


def _whole(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    """The session from its beginning, by minutes; a short one by seconds."""
    minutes = samples.series(engine, row.id, row.started_at, samples.MINUTE)
    if len(minutes) >= 10:
        return minutes
    return samples.series(engine, row.id, row.started_at, samples.SECOND) or minutes


def _facts(engine: Engine, run: RunInfo, row: SessionInfo) -> bottlenecks.Facts:
    plan, attempt = plan_of(run), sessions.last_attempt(engine, row.id)
    told = sessions.newest_event(engine, row.run_id, (EventKind.MEMORY_FACTS,), session_id=row.id)
    facts = told.facts if told else {}
    return bottlenecks.Facts(
        workers=_count(facts, "num_workers"),
        ranks=attempt.ranks if attempt else None,
        batch=_count(facts, "batch"),
        microbatch=standing(engine, run, plan, _place(attempt)).now.microbatch if attempt else None,
        cached=bool(plan.data.cache),
    )


def _place(attempt: AttemptInfo) -> Place:
    return Place(attempt.stage, device_of(Path(attempt.folder)), attempt.ranks)


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    """A fact comes as text."""
    told = str(facts.get(name))
    return int(told) if re.fullmatch(r"\d{1,9}", told) else None


def _series(found: Sequence[SampleInfo]) -> View:
    """Over time: busiest GPU or rank, waiting for data, host CPU; null where nothing was measured."""
    rows = {
        "gpu": [_greatest(item.values, r"gpu\d+\.util") for item in found],
        "ranks": [_greatest(item.values, r"rank\d+\.cpu") for item in found],
        "data_wait": [_greatest(item.values, r"rank\d+\.data_wait") for item in found],
        "host": [_greatest(item.values, r"host\.cpu") for item in found],
    }
    return {
        "from": stamp(found[0].at) if found else None,
        "to": stamp(found[-1].at) if found else None,
        **{name: values for name, values in rows.items() if any(value is not None for value in values)},
    }


def _greatest(values: Mapping[str, float], pattern: str) -> float | None:
    return max((float(value) for key, value in values.items() if re.fullmatch(pattern, key)), default=None)


def _happened(engine: Engine, run: RunInfo, row: SessionInfo) -> list[View]:
    """What is out of the ordinary in this session, a kind once: how often, when last, and what was said then."""
    kinds: dict[str, list[EventInfo]] = {}
    for event in sessions.events(engine, run.id, limit=EVENTS_LOOKED_AT):
        if event.session_id == row.id and event.kind not in IN_ORDER:
            kinds.setdefault(event.kind, []).append(event)
    return [
        {"kind": kind, "count": len(events), "last_at": stamp(events[-1].at), "facts": dict(events[-1].facts)}
        for kind, events in sorted(kinds.items(), key=lambda item: item[1][-1].at)
    ]
