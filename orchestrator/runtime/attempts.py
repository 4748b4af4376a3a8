"""One launch of a stage: what it is told, and how far the run had come before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from db import checkpoints as rows
from db import runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator import manifest
from orchestrator.core.outcome import Ended, verdict
from orchestrator.core.session import Event, Session
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from orchestrator.manifest import Manifest
from orchestrator.plan import Plan
from orchestrator.plan import Stage as StagePlan
from orchestrator.runtime import checkpoints, devices, launcher
from orchestrator.wire import Launch

Skipped = Callable[[Path, KgorchError], None]


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


def checkpoint_root(run: RunInfo, stage: str) -> Path:
    return Path(run.checkpoints) / stage


def open_stages(engine: Engine, run: RunInfo, plan: Plan) -> list[StagePlan]:
    """Stages still to do, in the plan's order. One whose verified final checkpoint lies there is done, whoever did it."""
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    for stage in plan.stage:
        if stage.name not in finished and (folder := _final_checkpoint(run, stage.name)):
            runs.finish_stage(engine, run.id, stage.name, note=f"its final checkpoint lies in {folder}")
            finished.add(stage.name)
    return [stage for stage in plan.stage if stage.name not in finished]


def more_after(engine: Engine, run: RunInfo, plan: Plan, stage: str) -> bool:
    """Whether something is left to do once `stage` is done."""
    return any(other.name != stage for other in open_stages(engine, run, plan))


def _final_checkpoint(run: RunInfo, stage: str) -> Path | None:
    newest = next(manifest.newest_readable(checkpoint_root(run, stage)), None)
    if newest and newest[1].final and newest[1].run_id == run.id:
        try:
            manifest.verify(newest[0])
            return newest[0]
        except (CheckpointBroken, CheckpointUnreadable):
            pass  # the launch of the stage deals with it
    return None


Found = tuple[Path, Manifest]


def newest_checkpoint(engine: Engine, run: RunInfo, stage: str, skipped: Skipped) -> Found | None:
    """The checkpoint that the stage goes on from: verified just now. None when it begins; slow, it reads all bytes.

    Raises: KgorchError when there ought to be one and none can be used: beginning anew is for a person to say.
    """
    root = checkpoint_root(run, stage)
    root.mkdir(parents=True, exist_ok=True)
    checkpoints.clear_leftovers(root)
    found = checkpoints.newest_verified(root, run.id, skipped)
    known = [row for row in rows.of_run(engine, run.id) if row.stage == stage and row.state in ("verified", "broken")]
    if found is None and known:
        raise KgorchError(
            f"no checkpoint of stage {stage!r} can be used, and the run had come to step {known[-1].step}",
            f"looked in {root}",
            next_step="put the folder back where it was, or begin anew with `kgorch start PLAN --fresh`",
        )
    return found


def prepare(
    engine: Engine,
    run: RunInfo,
    plan: Plan,
    session: SessionInfo,
    state: Session,
    stage: StagePlan,
    found: Found | None,
) -> tuple[Running, Launch]:
    """The stage's next attempt, written into the database, and what its processes are told; nothing is started.

    Raises: SQLAlchemyError.
    """
    ranks = devices.ranks_for(stage.ranks)
    folder = Path(run.folder) / "attempts"
    row = sessions.open_attempt(
        engine,
        session.id,
        stage=stage.name,
        ranks=ranks,
        first_step=found[1].step if found else 0,
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
        checkpoints=str(checkpoint_root(run, stage.name)),
        output=str(Path(run.folder) / "outputs"),
        plan_hash=run.plan_hash,
        seed=plan.seed,
        resume=str(found[0]) if found else None,
        wall_s=state.wall_s,
        deadline_s=state.deadline_s,
        microbatch=plan.memory.microbatch,
        weights=stage.weights.model_dump() if stage.weights else None,
    )
    return running(engine, run, session, row, more_stages=more_after(engine, run, plan, stage.name)), launch


def running(engine: Engine, run: RunInfo, session: SessionInfo, row: AttemptInfo, *, more_stages: bool) -> Running:
    return Running(
        row=row,
        name=f"{session.number}.{row.number}",
        furthest=sessions.furthest_step(engine, run.id, row.stage, before_attempt=row.id),
        without_progress=sessions.without_progress(engine, run.id),
        more_stages=more_stages,
    )
