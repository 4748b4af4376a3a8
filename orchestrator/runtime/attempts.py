"""One launch of a stage: what it is told, and how far the run had come before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from orchestrator.runtime import checkpoints, devices, launcher, snapshots
from orchestrator.wire import KEEPER_SOCKET, Held, Launch

Skipped = Callable[[Path, KgorchError], None]


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt, and all that is needed to judge its end without asking the database.

    Attributes:
        furthest: the highest step of the stage that an attempt before it came to.
        without_progress: attempts in a row before it that came no step further.
        from_snapshot: the number of the snapshot that it went on from.
    """

    row: AttemptInfo
    name: str
    furthest: int
    without_progress: int
    more_stages: bool
    from_snapshot: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.row.folder)

    def failed_by_itself(self) -> bool:
        """Some rank has raised, not only been killed or lost its peers."""
        records = launcher.records(self.folder, self.row.ranks)
        return any(record.outcome == "failed" and not record.is_collateral for record in records)

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


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage goes on from: a snapshot in the keeper's memory, else a checkpoint; with neither it begins."""

    checkpoint: tuple[Path, Manifest] | None
    snapshot: Held | None = None

    @property
    def step(self) -> int:
        if self.snapshot:
            return self.snapshot.step
        return self.checkpoint[1].step if self.checkpoint else 0

    def said(self) -> dict[str, Any]:
        """For the journal."""
        on_disk = self.checkpoint[1].step if self.checkpoint else None
        source = "memory" if self.snapshot else "disk" if self.checkpoint else "the beginning"
        return {"from": source, "step": self.step, "step_on_disk": on_disk}


def newest_state(engine: Engine, run: RunInfo, stage: str, skipped: Skipped) -> Found:
    """The newest that the stage can go on from; slow, it reads all bytes of a checkpoint.

    Raises: KgorchError when there ought to be one and none can be used: beginning anew is for a person to say.
    """
    held = snapshots.newest(Path(run.folder))
    if held and (held.run_id, held.stage) != (run.id, stage):
        held = None
    try:
        checkpoint = newest_checkpoint(engine, run, stage, skipped)
    except KgorchError as error:
        if held is None:
            raise
        skipped(checkpoint_root(run, stage), error)
        checkpoint = None
    if held and checkpoint and checkpoint[1].step >= held.step:
        held = None
    return Found(checkpoint, held)


def newest_checkpoint(engine: Engine, run: RunInfo, stage: str, skipped: Skipped) -> tuple[Path, Manifest] | None:
    """The checkpoint that the stage goes on from: verified just now. None when it begins.

    Raises: KgorchError when there ought to be one and none can be used: beginning anew is for a person to say.
    """
    root = checkpoint_root(run, stage)
    root.mkdir(parents=True, exist_ok=True)
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
    found: Found,
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
        first_step=found.step,
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
        resume=str(found.checkpoint[0]) if found.checkpoint and not found.snapshot else None,
        snapshot=found.snapshot.number if found.snapshot else None,
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        keeper=str(Path(run.folder) / KEEPER_SOCKET),
        wall_s=state.wall_s,
        deadline_s=state.deadline_s,
        microbatch=plan.memory.microbatch,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
    )
    attempt = running(engine, run, session, row, more_stages=more_after(engine, run, plan, stage.name))
    return replace(attempt, from_snapshot=launch.snapshot), launch


def running(engine: Engine, run: RunInfo, session: SessionInfo, row: AttemptInfo, *, more_stages: bool) -> Running:
    return Running(
        row=row,
        name=f"{session.number}.{row.number}",
        furthest=sessions.furthest_step(engine, run.id, row.stage, before_attempt=row.id),
        without_progress=sessions.without_progress(engine, run.id),
        more_stages=more_stages,
    )
