"""Compare a changed plan with the plan of a run, by how far its stages are; refuse what the run cannot go on with.

The rules are in core/plan_compatibility.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.admission.source_run import SourceRun
from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.foreign_contents import read_contents
from kgorch.core import plan_compatibility
from kgorch.core.checkpoint.foreign_checkpoint import matches
from kgorch.core.plan_compatibility import PlanCompatibility
from kgorch.db import runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, PlanError
from kgorch.plan import Plan, parse


def compare_with_run(
    engine: Engine, run: RunInfo, old: Plan, new: Plan, reopened: Collection[str] = ()
) -> PlanCompatibility:
    """Differences between the run's plan and a new one, and those with which the run cannot go on.

    Args:
        reopened: stages that are finished and are to be trained longer.
    """
    steps, root = sessions.max_steps(engine, run.id), Path(run.checkpoints)
    saved = {stage.name: next(readable_checkpoints(root / stage.name), None) for stage in old.stage}
    # A run that was imported without its database has checkpoints and no attempts.
    begun = {name for name in saved if steps.get(name) or saved[name]}
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at} - set(reopened)
    compatibility = plan_compatibility.compare_plans(
        old.model_dump(mode="json"), new.model_dump(mode="json"), started=begun, finished=finished
    )
    folders = {name: newest[0] for name, newest in saved.items() if newest and name not in finished}
    misplaced = tuple(_misplaced_checkpoints(new, folders))
    return replace(compatibility, permanent_refusals=(*compatibility.permanent_refusals, *misplaced))


def _misplaced_checkpoints(new: Plan, folders: Mapping[str, Path]) -> Iterator[str]:
    """Why newest checkpoints of foreign programs cannot be handed back.

    Not every change of the pattern is one: a wider one names the checkpoint's place, and where none was ever found it was wrong.

    Args:
        folders: of the newest checkpoint, by stage.
    """
    for stage in new.stage:
        pattern = stage.foreign and stage.foreign.checkpoint
        if pattern and stage.name in folders:
            with contextlib.suppress(
                CheckpointBroken, CheckpointUnreadable
            ):  # the launch tells it, or takes an older one
                place = read_contents(folders[stage.name], None)[1].path
                if not matches(place, pattern):
                    what = f"stage.{stage.name}.foreign.checkpoint"
                    yield f"{what}: its newest checkpoint is to lie at {place}, which {pattern!r} does not name"


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


def why_of_another_folder(run: RunInfo, workdir: Path) -> str:
    """That a plan lies in another folder than the run was begun in, which was not moved: it may be another project's. Else ""."""
    try:
        is_there = not Path(run.workdir).samefile(workdir)
    except OSError:
        return ""
    return f"it was begun in {run.workdir}, which is still there, and this plan lies in {workdir}" if is_there else ""


def refuse_of_another_folder(run: RunInfo, workdir: Path, *, accept: bool) -> None:
    """Raise PlanError where a finished run of the plan's name is another folder's: "is finished" would be no answer.

    Args:
        accept: see `refuse`.
    """
    if not accept and (why := why_of_another_folder(run, workdir)):
        raise PlanError(
            f"the run {run.name!r} is finished, and another folder's",
            why,
            next_step="give this plan another name, begin a new run with --fresh, or, if it is this one, --accept-changes",
        )


def facts(compatibility: PlanCompatibility) -> dict[str, Any]:
    """Facts of the event PLAN_CHANGED."""
    changes = [{"key": item.key, "old": item.old, "new": item.new} for item in compatibility.differences]
    return {"changed": changes} | ({"accepted": list(compatibility.refusals)} if compatibility.refusals else {})
