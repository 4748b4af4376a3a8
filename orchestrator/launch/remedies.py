"""Remedies of a training whose loss went wrong (batches left out, a lower learning rate), as rows for every later attempt.

They are in the table of the rungs. The `settings` of a remedy's row are an entry of the schedule without its step
(core/health/training_health.py); those of a rung have a key "settings" in it. A remedy holds on any device, so its
row names none, and no later row replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.health.training_health import PastRemedy, changes_result
from kgorch.core.session import events
from kgorch.db import rungs
from kgorch.db.rows import AttemptInfo, RungInfo, RunInfo
from kgorch.launch.rungs import ANEW
from kgorch.plan import Plan
from kgorch.protocol.messages import RemedyApplied


def past(engine: Engine, run: RunInfo, stage: str) -> list[PastRemedy]:
    """The remedies of this stage, oldest first; none while the database cannot be read."""
    try:
        return [_past_remedy(row) for row in _rows(engine, run, stage)]
    except SQLAlchemyError:
        return []


def launch_health(engine: Engine, run: RunInfo, plan: Plan, stage: str) -> dict[str, Any]:
    """`health` of a launch (LaunchSpec): which remedies the plan allows, and those that were used."""
    past = [asdict(_past_remedy(row)) for row in _rows(engine, run, stage)]
    return {"nan": list(plan.health.nan), "spike": plan.health.spike, "past": past}


def arguments(schedule: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The stage's arguments that remedies have set; the last one counts."""
    values: dict[str, Any] = {}
    for entry in schedule:
        values |= entry.get("arguments", {})
    return values


def write(
    engine: Engine, run: RunInfo, session_id: int, attempt: AttemptInfo, applied: RemedyApplied, at: datetime
) -> None:
    """Remember a remedy that the ranks took by themselves at that instant, for every attempt after this one.

    Once, although each rank on a GPU tells of the same step, and each attempt that repeats it: so many remedies would seem used up.
    """
    made = columns(run, attempt, applied)
    what = made["step"], made["rung"], made["settings"]
    if what not in [(row.step, row.rung, row.settings) for row in _rows(engine, run, attempt.stage)]:
        rungs.add(engine, run.id, session_id, at=at, **made)


def columns(run: RunInfo, attempt: AttemptInfo, remedy: RemedyApplied | events.AttemptDiverged) -> dict[str, Any]:
    """A remedy as kgorch.db.rungs.add takes it."""
    change = dict(remedy.change)
    return {
        "plan_hash": run.plan_hash,
        "stage": attempt.stage,
        "device": "",
        "world_size": attempt.ranks,
        "step": change.pop("step"),
        "rung": remedy.remedy,
        "why": remedy.why if isinstance(remedy, RemedyApplied) else remedy.cause,
        "changes_result": changes_result(change),
        "settings": change,
    }


def _rows(engine: Engine, run: RunInfo, stage: str) -> list[RungInfo]:
    """Of the stage's present beginning: the steps of one that was given up are no steps of this one."""
    rows = [row for row in rungs.of_run(engine, run.id) if row.stage == stage]
    began = max((number for number, row in enumerate(rows) if row.settings.get(ANEW)), default=0)
    return [row for row in rows[began:] if "settings" not in row.settings]


def _past_remedy(row: RungInfo) -> PastRemedy:
    went_back = "seen" in row.settings and not changes_result(row.settings)
    return PastRemedy(row.step, row.rung, row.why, row.settings.get("seen", row.step), went_back)
