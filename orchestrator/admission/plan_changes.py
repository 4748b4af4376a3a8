"""Compare a changed plan with the plan of a run, by how far its stages are; refuse what the run cannot go on with.

The rules are in core/plan_compatibility.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.admission.source_run import SourceRun
from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.core import plan_compatibility
from kgorch.core.plan_compatibility import PlanCompatibility
from kgorch.db import runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import PlanError
from kgorch.plan import Plan, parse


def compare_with_run(
    engine: Engine, run: RunInfo, old: Plan, new: Plan, reopened: Collection[str] = ()
) -> PlanCompatibility:
    """Differences between the run's plan and a new one, and those with which the run cannot go on.

    Args:
        reopened: stages that are finished and are to be trained longer.
    """
    steps, root = sessions.max_steps(engine, run.id), Path(run.checkpoints)
    # A run that was imported without its database has checkpoints and no attempts.
    begun = {
        stage.name
        for stage in old.stage
        if steps.get(stage.name) or next(readable_checkpoints(root / stage.name), None)
    }
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at} - set(reopened)
    return plan_compatibility.compare_plans(
        old.model_dump(mode="json"), new.model_dump(mode="json"), started=begun, finished=finished
    )


def compare_with_source(source: SourceRun, new: Plan) -> PlanCompatibility | None:
    """The same for a run that a source holds; None if its plan is unknown or not valid for this version of kgorch.

    Nothing is refused permanently: the checkpoints are copied to where the new plan says.
    """
    old = plan_in_source(source)
    if old is None or source.rows is None:
        return None
    begun = {item.manifest.stage for item in source.checkpoints}
    compatibility = plan_compatibility.compare_plans(
        old.model_dump(mode="json"), new.model_dump(mode="json"), started=begun, finished=set(source.rows.finished)
    )
    return replace(compatibility, permanent_refusals=())


def plan_in_source(source: SourceRun) -> Plan | None:
    """The run's plan in a source's database, to compare and to show; nothing is executed by it. None if there is no valid one."""
    if source.rows is None:
        return None
    try:
        return parse(source.rows.run["plan"], "the plan in the source", source.rows.run["overrides"])
    except PlanError:
        return None


def refuse(name: str, compatibility: PlanCompatibility, *, accept: bool) -> None:
    """Raise PlanError for a plan that the run cannot go on with.

    Args:
        accept: the user accepts the changes that are refused without consent (--accept-changes).
    """
    differences = [f"changed: {difference}" for difference in compatibility.differences]
    if compatibility.permanent_refusals:
        what = compatibility.permanent_refusals[0].partition(":")[0]
        raise PlanError(
            f"{what} of {name!r} has changed, and is fixed when a run begins",
            *compatibility.permanent_refusals,
            *differences,
            next_step="put the old value back, or begin a new run there with --fresh",
        )
    if compatibility.refusals and not accept:
        raise PlanError(
            f"the plan of {name!r} has changed in a way that its training cannot resume with",
            *compatibility.refusals,
            *differences,
            next_step="put it back, begin a new run with --fresh, or continue nevertheless with --accept-changes",
        )


def is_another_folder(old: str, new: Path) -> bool:
    """Whether a plan lies in another folder than the run was begun in, which was not moved: it may be another project's."""
    try:
        return not Path(old).samefile(new)
    except OSError:
        return False


def facts(compatibility: PlanCompatibility) -> dict[str, Any]:
    """Facts of the event PLAN_CHANGED."""
    changes = [{"key": item.key, "old": item.old, "new": item.new} for item in compatibility.differences]
    return {"changed": changes} | ({"accepted": list(compatibility.refusals)} if compatibility.refusals else {})
