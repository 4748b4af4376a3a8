"""A plan that changed between two sessions of a run: judged by how far the run's stages are (core/plan_compatibility.py)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import runs, sessions
from db.records import RunInfo
from orchestrator.admission.source_scan import Found
from orchestrator.checkpoint.folder import readable_checkpoints
from orchestrator.core import plan_compatibility
from orchestrator.core.plan_compatibility import PlanCompatibility
from orchestrator.errors import PlanError
from orchestrator.plan import Plan, parse


def judge(engine: Engine, run: RunInfo, old: Plan, new: Plan, reopened: Collection[str] = ()) -> PlanCompatibility:
    """What differs between the run's plan and a new one, and what of it the run cannot go on with.

    Args:
        reopened: stages that are done and shall be trained longer.
    """
    reached, root = sessions.reached(engine, run.id), Path(run.checkpoints)
    begun = {
        stage.name
        for stage in old.stage
        if reached.get(stage.name) or next(readable_checkpoints(root / stage.name), None)
    }
    done = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at} - set(reopened)
    return plan_compatibility.compare_plans(
        old.model_dump(mode="json"), new.model_dump(mode="json"), started=begun, finished=done
    )


def judge_found(found: Found, new: Plan) -> PlanCompatibility | None:
    """The same of a run that a source holds; None where its plan is not known, or no plan to this kgorch any more.

    Its checkpoints are copied to where the new plan says, so that is no change.
    """
    old = plan_of_found(found)
    if old is None or found.rows is None:
        return None
    begun, done = {item.manifest.stage for item in found.checkpoints}, set(found.rows.finished)
    judged = plan_compatibility.compare_plans(
        old.model_dump(mode="json"), new.model_dump(mode="json"), started=begun, finished=done
    )
    return replace(judged, permanent_refusals=())


def plan_of_found(found: Found) -> Plan | None:
    """The plan that a source keeps of a run, to compare and to show: it decides nothing here. None for none that can be read."""
    try:
        return (
            parse(found.rows.run["plan"], "the plan kept in the source", found.rows.run["overrides"])
            if found.rows
            else None
        )
    except PlanError:
        return None


def refuse(name: str, judged: PlanCompatibility, *, accept: bool) -> None:
    """Raises: PlanError for what the run cannot go on with; `accept`: a person takes what can be taken at all."""
    shown = [f"changed: {difference}" for difference in judged.differences]
    if judged.permanent_refusals:
        what = judged.permanent_refusals[0].partition(":")[0]
        raise PlanError(
            f"{what} of {name!r} has changed, and a run keeps it",
            *judged.permanent_refusals,
            *shown,
            next_step="put the old value back, or begin anew there with --fresh",
        )
    if judged.refusals and not accept:
        raise PlanError(
            f"the plan of {name!r} has changed in what its training has begun with",
            *judged.refusals,
            *shown,
            next_step="put it back, begin anew with --fresh, or go on nevertheless with --accept-changes",
        )


def facts(judged: PlanCompatibility) -> dict[str, Any]:
    """For the journal."""
    changed = [{"key": item.key, "old": item.old, "new": item.new} for item in judged.differences]
    return {"changed": changed} | ({"accepted": list(judged.refusals)} if judged.refusals else {})
