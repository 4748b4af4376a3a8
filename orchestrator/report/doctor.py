"""Diagnosis of a run's newest session: how busy the GPUs were, what slowed them, what happened, what to change.

The rules are in core/health/bottlenecks.py. The fields are those that `kgorch doctor --json` promises (docs/json.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.admission.resolve_run import load_stored_plan
from kgorch.core.codes import EventKind
from kgorch.core.health import bottlenecks
from kgorch.db import rungs, samples, sessions
from kgorch.db.rows import AttemptInfo, EventInfo, RunInfo, SampleInfo, SessionInfo
from kgorch.launch.attempts import device_of
from kgorch.launch.rungs import RungScope, launch_settings
from kgorch.report.json_fields import View, stamp

RECENT_S = 600
"""Advice is about the last ten minutes, of which samples of single seconds exist; the series are about the whole session."""

MAX_EVENTS = 2000
"""Newest events of the run that are searched for those of the session."""

MIN_MINUTES = 10
"""A session with fewer samples of minutes is shown by seconds."""

K = EventKind
USUAL = {
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
"""Kinds of events that a healthy session has, or that other fields show."""


def of_run(engine: Engine, run: RunInfo) -> View:
    row = sessions.last(engine, run.id)
    advice = (
        bottlenecks.advise([item.values for item in _recent(engine, row)], _facts(engine, run, row)) if row else None
    )
    return {
        "run": run.name,
        "run_number": run.number,
        "session": row.number if row else None,
        "utilization": {
            "of": advice.of if advice else None,
            "percent": advice.percent if advice else None,
            "band": advice.band if advice else None,
        },
        "series": _series(_whole(engine, row) if row else []),
        "findings": [asdict(item) | {"figures": dict(item.figures)} for item in advice.findings] if advice else [],
        "rungs": [
            {"at": stamp(item.at), "step": item.step, "rung": item.rung, "why": item.why, "up": item.up}
            for item in rungs.of_run(engine, run.id)
        ],
        "happened": _unusual_events(engine, run, row) if row else [],
    }


def _recent(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    """The last RECENT_S of the session, in the finest resolution that exists: samples are rolled up and pruned as they age."""
    for span_s in (samples.SECOND, samples.MINUTE, samples.HOUR):
        if series := samples.series(engine, row.id, row.started_at, span_s):
            length = timedelta(seconds=max(RECENT_S, span_s))
            return [item for item in series if series[-1].at - item.at <= length]
    return []


def _whole(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    """The session from its beginning, by minutes; a short one by seconds."""
    minutes = samples.series(engine, row.id, row.started_at, samples.MINUTE)
    if len(minutes) >= MIN_MINUTES:
        return minutes
    return samples.series(engine, row.id, row.started_at, samples.SECOND) or minutes


def _facts(engine: Engine, run: RunInfo, row: SessionInfo) -> bottlenecks.TrainingSetup:
    plan, attempt = load_stored_plan(run), sessions.last_attempt(engine, row.id)
    event = sessions.newest_event(engine, row.run_id, (EventKind.MEMORY_FACTS,), session_id=row.id)
    facts = event.facts if event else {}
    return bottlenecks.TrainingSetup(
        workers=_count(facts, "num_workers"),
        ranks=attempt.ranks if attempt else None,
        batch=_count(facts, "batch") if facts.get("divides") != "False" else 0,
        microbatch=launch_settings(engine, run, plan, _place(attempt)).now.microbatch if attempt else None,
        cached=bool(plan.data.cache),
    )


def _place(attempt: AttemptInfo) -> RungScope:
    return RungScope(attempt.stage, device_of(Path(attempt.folder)), attempt.ranks)


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    """A fact as a number; None if it is missing or none. Ranks report facts as text."""
    text = str(facts.get(name))
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def _series(every: Sequence[SampleInfo]) -> View:
    """Of each sample: the busiest GPU or rank, the longest wait for data, the host's CPU; null where nothing was measured."""
    rows = {
        "gpu": [_greatest(item.values, r"(node\d+\.)?gpu\d+\.util") for item in every],
        "ranks": [_greatest(item.values, r"rank\d+\.cpu") for item in every],
        "data_wait": [_greatest(item.values, r"rank\d+\.data_wait") for item in every],
        "host": [_greatest(item.values, r"host\.cpu") for item in every],
    }
    return {
        "from": stamp(every[0].at) if every else None,
        "to": stamp(every[-1].at) if every else None,
        **{name: values for name, values in rows.items() if any(value is not None for value in values)},
    }


def _greatest(values: Mapping[str, float], pattern: str) -> float | None:
    return max((float(value) for key, value in values.items() if re.fullmatch(pattern, key)), default=None)


def _unusual_events(engine: Engine, run: RunInfo, row: SessionInfo) -> list[View]:
    """Kinds of events that a healthy session does not have, with their number, and the time and facts of the newest one."""
    kinds: dict[str, list[EventInfo]] = {}
    for event in sessions.events(engine, run.id, limit=MAX_EVENTS):
        if event.session_id == row.id and event.kind not in USUAL:
            kinds.setdefault(event.kind, []).append(event)
    return [
        {"kind": kind, "count": len(events), "last_at": stamp(events[-1].at), "facts": dict(events[-1].facts)}
        for kind, events in sorted(kinds.items(), key=lambda item: item[1][-1].at)
    ]
