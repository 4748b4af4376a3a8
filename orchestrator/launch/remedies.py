"""What was done about a training gone bad, remembered in the table of rungs and told to every later attempt.

A row's `settings` are the schedule's entry without its step (core/training_health.py); rungs have a key of that name in it. What
has been left out or lowered stays so: no later row supersedes it, on whatever device the stage goes on, so rows name none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import rungs
from db.records import AttemptInfo, RungInfo, RunInfo
from orchestrator.core import lifecycle as core
from orchestrator.core.training_health import Taken
from orchestrator.plan import Plan
from orchestrator.protocol.messages import RemedyApplied


def past(engine: Engine, run: RunInfo, stage: str) -> list[Taken]:
    """What was done in this stage, oldest first; nothing while the database cannot be read."""
    try:
        return [_taken(row) for row in _rows(engine, run, stage)]
    except SQLAlchemyError:
        return []


def told(engine: Engine, run: RunInfo, plan: Plan, stage: str) -> dict[str, Any]:
    """`health` of a launch."""
    past = [asdict(_taken(row)) for row in _rows(engine, run, stage)]
    return {"nan": list(plan.health.nan), "spike": plan.health.spike, "past": past}


def arguments(schedule: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the stage, as remedies have changed them."""
    found: dict[str, Any] = {}
    for entry in schedule:
        found |= entry.get("arguments", {})
    return found


def write(
    engine: Engine, run: RunInfo, session_id: int, attempt: AttemptInfo, taken: RemedyApplied | core.Unwell
) -> None:
    """Remember a remedy for every attempt after this one."""
    change = dict(taken.change)
    rungs.add(
        engine,
        run.id,
        session_id,
        plan_hash=run.plan_hash,
        stage=attempt.stage,
        device="",
        world=attempt.ranks,
        step=change.pop("step"),
        rung=taken.remedy,
        why=taken.why if isinstance(taken, RemedyApplied) else taken.cause,
        changes_result=True,
        settings=change,
    )


def _rows(engine: Engine, run: RunInfo, stage: str) -> list[RungInfo]:
    return [row for row in rungs.of_run(engine, run.id) if row.stage == stage and "settings" not in row.settings]


def _taken(row: RungInfo) -> Taken:
    return Taken(row.step, row.rung, row.why, row.settings.get("seen", row.step))
