"""One launch of a stage: what it is told, and how far the run had come before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from db import runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator import manifest
from orchestrator.core.outcome import Ended, verdict
from orchestrator.core.session import Event, Session
from orchestrator.errors import CheckpointBroken
from orchestrator.plan import Plan
from orchestrator.plan import Stage as StagePlan
from orchestrator.runtime import checkpoints, devices, launcher
from orchestrator.wire import Launch

Broken = Callable[[Path, CheckpointBroken], None]


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt, and all that is needed to judge its end without asking the database.

    Attributes:
        furthest: the highest step of the stage that an attempt before it came to.
        without_progress: attempts in a row before it that came no step further.
    """

    row: AttemptInfo
    name: str
    furthest: int
    without_progress: int
    more_stages: bool

    @property
    def folder(self) -> Path:
        return Path(self.row.folder)

    def ended(self, step: int) -> Event:
        """How it ended, now that its processes are gone, having come to `step`."""
        return verdict(
            Ended(
                ranks=self.row.ranks,
                records=launcher.records(self.folder, self.row.ranks),
                launcher=launcher.ending(self.folder),
                gained=step > self.furthest,
                without_progress=self.without_progress,
                more_stages=self.more_stages,
            )
        )


def checkpoint_root(run: RunInfo, plan: Plan, stage: str) -> Path:
    base = (
        Path(run.workdir, plan.checkpoint.dir) / run.name / str(run.number)
        if plan.checkpoint.dir
        else Path(run.folder) / "checkpoints"
    )
    return base / stage


def open_stages(engine: Engine, run: RunInfo, plan: Plan) -> list[StagePlan]:
    """Stages still to do, in the plan's order. One whose final checkpoint lies there is done, whoever did it."""
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    for stage in plan.stage:
        if stage.name not in finished:
            for folder, found in manifest.newest_readable(checkpoint_root(run, plan, stage.name)):
                if found.final and found.run_id == run.id:
                    runs.finish_stage(engine, run.id, stage.name, note=f"its final checkpoint lies in {folder}")
                    finished.add(stage.name)
                break
    return [stage for stage in plan.stage if stage.name not in finished]


def prepare(
    engine: Engine, run: RunInfo, plan: Plan, session: SessionInfo, state: Session, broken: Broken
) -> tuple[Running, Launch] | None:
    """The next attempt, written into the database, and what its processes are told; nothing is started.

    None when all stages are done.

    Raises: OSError, SQLAlchemyError.
    """
    todo = open_stages(engine, run, plan)
    if not todo:
        return None
    stage = todo[0]
    root = checkpoint_root(run, plan, stage.name)
    root.mkdir(parents=True, exist_ok=True)
    checkpoints.clear_leftovers(root)
    found = checkpoints.newest_verified(root, run.id, broken)
    ranks = devices.ranks_for(stage.ranks)
    folder = Path(run.folder) / "attempts"
    first_step = found[1].step if found else 0
    row = sessions.open_attempt(
        engine,
        session.id,
        stage=stage.name,
        ranks=ranks,
        first_step=first_step,
        folder_of=lambda number: str(folder / f"{session.number}.{number}"),
    )
    launch = Launch(
        run=run.name,
        run_id=run.id,
        stage=stage.name,
        attempt=f"{session.number}.{row.number}",
        folder=row.folder,
        entry=stage.entry,
        args=dict(stage.args),
        workdir=run.workdir,
        ranks=ranks,
        socket=str(Path(run.folder) / "control.sock"),
        checkpoints=str(root),
        output=str(Path(run.folder) / "outputs"),
        plan_hash=run.plan_hash,
        seed=plan.seed,
        resume=str(found[0]) if found else None,
        wall_s=state.wall_s,
        deadline_s=state.deadline_s,
        microbatch=plan.memory.microbatch,
    )
    return running(engine, run, session, row, more_stages=len(todo) > 1), launch


def running(engine: Engine, run: RunInfo, session: SessionInfo, row: AttemptInfo, *, more_stages: bool) -> Running:
    return Running(
        row=row,
        name=f"{session.number}.{row.number}",
        furthest=sessions.furthest_step(engine, run.id, row.stage, before_attempt=row.id),
        without_progress=sessions.without_progress(engine, run.id),
        more_stages=more_stages,
    )
