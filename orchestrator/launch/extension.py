"""Extension of a finished run: `kgorch start PLAN --extend`, with a plan that has more to do.

The first stage that the plan changes is reopened, and all stages after it: their scripts run again, so a prediction is made again
from the new weights. A reopened stage resumes from its final checkpoint, so one whose epochs are unchanged trains nothing. The
journal keeps the step of that checkpoint (`extended`): a session that ends before its first save, or a machine that imports the
run, must resume there, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Engine

from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.core.codes import CheckpointState, EventKind, RunState
from kgorch.db import checkpoints, runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import PlanError
from kgorch.plan import Plan, StageSection

EVENT = EventKind.STAGE_EXTENDED
RECENT = 1000
"""Newest events of that kind that are searched."""


def stages_to_do(name: str, old: Plan, new: Plan) -> list[str]:
    """The stages that a longer plan reopens or adds.

    Raises: PlanError when there are none.
    """
    todo = [stage.name for stage in itertools.dropwhile(lambda stage: _is_unchanged(stage, old), new.stage)]
    if not todo:
        raise PlanError(
            f"there is nothing to extend: the stages of {name!r} are as they were when it finished",
            next_step="give a stage more to do in the plan (its epochs, perhaps), or add a stage to it",
        )
    return todo


def reopen(engine: Engine, run: RunInfo, todo: Sequence[str]) -> RunInfo:
    """Make a finished run active again, with these stages to do."""
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    again = [name for name in todo if name in finished]
    for name in again:  # all before the first is reopened: a refusal must leave the run as it was
        _refuse_older(run, name)
    for name in again:
        step = _final_step(engine, run, name)
        sessions.add_event(engine, run.id, EVENT, {"stage": name, "step": step})
        runs.reopen_stage(engine, run.id, name, note=f"extended from step {step}")
    runs.set_state(engine, run.id, RunState.ACTIVE)
    return run._replace(state=RunState.ACTIVE, why="", finished_at=None)


def goes_on_from(engine: Engine, run: RunInfo, stage: str, step: int) -> bool:
    """Whether an extension begins at the stage's final checkpoint of that step; False where one has ended there."""
    events = sessions.events_of_kind(engine, run.id, EVENT, limit=RECENT)
    steps = [event.facts.get("step") for event in events if event.facts.get("stage") == stage]
    return bool(steps) and isinstance(steps[-1], int) and step <= steps[-1]


def _is_unchanged(stage: StageSection, old: Plan) -> bool:
    before = next((other for other in old.stage if other.name == stage.name), None)
    return before is not None and before.model_dump() == stage.model_dump()


def _refuse_older(run: RunInfo, stage: str) -> None:
    """Raises: PlanError for a final checkpoint of an earlier kgorch, which does not say at which epoch its loop ended."""
    root = Path(run.checkpoints) / stage
    newest = next((manifest for _, manifest in readable_checkpoints(root) if manifest.final), None)
    at = newest.position if newest else None
    if at and at.step and at.loop and not (at.epoch or at.batch):
        raise PlanError(
            f"stage {stage!r} of {run.name!r} was finished by an earlier kgorch and cannot be extended",
            next_step="begin a new run with --fresh and its weights: [[stage]] weights = FILE of kgorch checkpoints export",
        )


def _final_step(engine: Engine, run: RunInfo, stage: str) -> int:
    """Step of the stage's newest final checkpoint; 0 for a stage that tracks nothing, whose script runs as a whole.

    By the rows, too: the files may be on another machine of a fleet.
    """
    manifests = readable_checkpoints(Path(run.checkpoints) / stage)
    rows = checkpoints.of_run(engine, run.id, CheckpointState.VERIFIED)
    steps = [manifest.step for _, manifest in manifests if manifest.final]
    return max(steps + [row.step for row in rows if row.stage == stage and row.final], default=0)
