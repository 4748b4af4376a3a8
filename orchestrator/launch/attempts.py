"""Attempts of a session: which stage is next and from which state, the launch specification, and the judgement of its end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.checkpoint import registry, store
from kgorch.checkpoint.manifest import Manifest, checkpoint_folder_name
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.codes import CheckpointState, Outcome, RankError, RankOutcome
from kgorch.core.session.attempt_outcome import (
    AttemptEnd,
    RankRecord,
    exhausted,
    exhausted_memory,
    failed_step,
    final_step,
    first_cause,
    is_same_error,
    verdict,
)
from kgorch.core.session.events import AttemptCrashed, Diagnosed, Event
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import checkpoints as rows
from kgorch.db import runs, sessions
from kgorch.db.rows import AttemptInfo, RunInfo, SessionInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from kgorch.hardware import devices
from kgorch.launch import extension, foreign_stage, launcher, remedies, rungs
from kgorch.launch.rungs import LaunchSettings, MemoryShortage, RungScope
from kgorch.plan import Plan, StageSection
from kgorch.protocol.codec import ProtocolError
from kgorch.protocol.launch_spec import LaunchSpec, NodePlace
from kgorch.protocol.run_files import CACHE_FOLDER, KEEPER_SOCKET
from kgorch.protocol.snapshot_messages import SnapshotInfo
from kgorch.services.data_cache import DataCache
from kgorch.snapshots import keeper_client

OnSkip = Callable[[Path, KgorchError], None]
"""Called with each checkpoint that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class SessionContext:
    """The session whose attempts are launched and judged.

    Attributes:
        session: its row.
        environ: environment in which the session's GPUs are the visible ones (GpuLocks.environ).
    """

    engine: Engine
    run: RunInfo
    plan: Plan
    session: SessionInfo
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True, slots=True)
class LaunchedAttempt:
    """An attempt, with what its end is compared with: read from the database when it is launched, adopted or settled.

    Attributes:
        name: numbers of the session and of the attempt, as "3.1".
        highest_step: of the stage, reached by the attempts before it.
        without_progress: attempts in a row before it that reached no new step.
        more_stages: the stage is not the last one.
        device: model of the GPUs that it was launched on (devices.model_name).
        is_foreign: it runs a program of [stage.foreign], whose progress is a newer checkpoint, whatever step it reports.
        from_snapshot: number of the snapshot that it resumed from; None for another source, and for an adopted attempt.
        previous_records: rank records of the attempt before it, if that one crashed in the same stage.
        deferred_files: as launcher.DeferredFiles; grows while the attempt runs.
        reopened_stages: earlier stages that must be finished again before this one; filled at its end.
        stages_without_best: earlier stages whose best checkpoint was quarantined; the next attempt reads the next best.
    """

    row: AttemptInfo
    name: str
    highest_step: int
    without_progress: int
    more_stages: bool
    device: str = ""
    is_foreign: bool = False
    from_snapshot: int | None = None
    previous_records: Sequence[RankRecord] = ()
    deferred_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    reopened_stages: list[str] = field(default_factory=list)
    stages_without_best: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The attempt's folder: launch.json, logs, and the records of its processes."""
        return Path(self.row.folder)

    def progress_step(self, step: int, saved_step: int) -> int:
        """The step by which its progress is judged, of the newest one that it reported and the newest one that is on disk."""
        return saved_step if self.is_foreign else step

    def recorded_step(self) -> int:
        """The step that every rank with a record of a failure had reached, which its last heartbeat may not have told; else 0."""
        return min((record.step for record in self._records() if record.step is not None), default=0)

    @property
    def scope(self) -> RungScope:
        """Where the rungs of its memory ladder hold."""
        return RungScope(self.row.stage, self.device, self.row.ranks)

    def failed_by_itself(self) -> bool:
        """Whether a rank raised an error of its own. Otherwise its ranks were killed, or lost their peers."""
        return any(record.outcome is RankOutcome.FAILED and not record.is_collateral for record in self._records())

    def has_unreadable_checkpoint(self) -> bool:
        """Whether a rank could not read a checkpoint. It is one of an earlier stage: its own was verified before the launch."""
        return any(record.code is RankError.CHECKPOINT for record in self._records())

    def final_checkpoint(self, run: RunInfo) -> Path | None:
        """The folder of the stage's final checkpoint according to the rank records; None if they name none."""
        step = final_step(self._records())
        root = checkpoint_root(run, self.row.stage)
        return None if step is None else root / checkpoint_folder_name(step, final=True)

    def collect_end(self, step: int) -> AttemptEnd:
        """Read what its processes recorded, after they have ended. Args: step: the newest one that they reported."""
        records = self._records()
        others = sorted(self.folder.glob("node[0-9]*"))  # what the shims of other nodes left
        return AttemptEnd(
            ranks=self.row.ranks,
            records=records,
            torchrun_exit=launcher.describe_exit(self.folder, self.deferred_files),
            made_progress=step > self.highest_step,
            without_progress=self.without_progress,
            more_stages=self.more_stages,
            kernel_kills=sum(launcher.kernel_kills(folder) for folder in others)
            + launcher.kernel_kills(self.folder, self.deferred_files),
            was_sigkilled=any(launcher.was_sigkilled(folder) for folder in others)
            or launcher.was_sigkilled(self.folder, self.deferred_files),
            repeats=is_same_error(self.previous_records, records),
            can_read_another=bool(self.reopened_stages or self.stages_without_best),
        )

    def judge_hang(self, diagnosed: Diagnosed, step: int) -> Event:
        """The event that ends a hang. A hang counts as a crash: too many without progress fail the run."""
        return exhausted(diagnosed.cause, step > self.highest_step, self.without_progress) or diagnosed

    def _records(self) -> list[RankRecord]:
        return launcher.records(self.folder, self.row.ranks, self.deferred_files)


def judge_end(context: SessionContext, attempt: LaunchedAttempt, step: int, verified: Container[str]) -> Event:
    """Judge the end of an attempt. If memory ran out, this chooses the next rung of the ladder and writes it down.

    Args:
        step: the newest one that the attempt reported.
        verified: paths of the run's verified checkpoints.
    """
    engine, run, plan = context.engine, context.run, context.plan
    final = attempt.final_checkpoint(run)
    end = replace(
        attempt.collect_end(step),
        remedies=plan.health.remedies,
        past=remedies.past(engine, run, attempt.row.stage),
        has_final=final is None or str(final) in verified,
    )
    if memory := exhausted_memory(end):
        cause = first_cause(end)
        shortage = MemoryShortage(
            context.session.id, attempt.name, attempt.scope, failed_step(end, step), memory, cause
        )
        try:
            end = replace(end, rung=rungs.take_next(engine, run, plan, shortage))
        except SQLAlchemyError as error:
            # A rung that is not in the database would not hold for the next attempt, so this counts as a crash.
            return AttemptCrashed(f"{cause}; the next rung could not be written down: {error}")
    return verdict(end)


# Stages and the state to resume from


def checkpoint_root(run: RunInfo, stage: str) -> Path:
    """The folder of a stage's checkpoints."""
    return Path(run.checkpoints) / stage


def open_stages(engine: Engine, run: RunInfo, plan: Plan) -> list[StageSection]:
    """The stages that are not finished, in the plan's order.

    A stage with a final checkpoint can be open: its script may still have work to do after the training.
    """
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    return [stage for stage in plan.stage if stage.name not in finished]


def reopen_stages(engine: Engine, run: RunInfo, stage: str, on_skip: OnSkip) -> Iterator[str]:
    """Reopen the stages before `stage` whose final checkpoint is unusable. Yields their names.

    A reopened stage is trained to its end again, from its newest usable checkpoint. Slow: it verifies every byte.
    """
    with_final = {row.stage for row in rows.of_run(engine, run.id) if row.final}
    earlier = itertools.takewhile(lambda item: item.name != stage, runs.stages(engine, run.id))
    for name in (item.name for item in earlier if item.name in with_final):
        newest = store.newest_verified(checkpoint_root(run, name), run.id, on_skip)
        if not newest or not newest[1].final:
            runs.reopen_stage(engine, run.id, name, note="its final checkpoint cannot be used any more")
            yield name


def quarantine_broken_best(engine: Engine, run: RunInfo, plan: Plan, stage: str, on_skip: OnSkip) -> Iterator[str]:
    """Quarantine broken best checkpoints of the stages before `stage`. Yields the stage's name for each. Slow.

    The next best one is then used: a stage that reads the best weights of another would otherwise fail for good.
    """
    rule = registry.retention_rule(plan).best
    for earlier in itertools.takewhile(lambda item: item.name != stage, plan.stage if rule else ()):
        while rule and (best := registry.best_checkpoint(engine, run.id, earlier.name, *rule)):
            try:
                verify_checkpoint(Path(best.key))
                break
            except CheckpointUnreadable:
                break  # it may be whole: the disk failed, or a newer kgorch wrote it
            except CheckpointBroken as error:
                folder = store.quarantine(Path(best.key), Path(run.checkpoints))
                on_skip(folder, error)
                yield earlier.name
                if folder == Path(best.key):  # the rename failed: it would be the best again, for ever
                    break


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The state that a stage resumes from: a snapshot in the keeper's memory, else a checkpoint, else its beginning."""

    checkpoint: tuple[Path, Manifest] | None
    snapshot: SnapshotInfo | None = None

    @property
    def step(self) -> int:
        """The last optimizer step of the state; 0 for the beginning."""
        if self.snapshot:
            return self.snapshot.step
        return self.checkpoint[1].step if self.checkpoint else 0

    @property
    def is_final(self) -> bool:
        """Whether the stage's training was complete."""
        if self.snapshot:
            return self.snapshot.final
        return self.checkpoint is not None and self.checkpoint[1].final

    def facts(self) -> dict[str, Any]:
        """Its facts for the journal."""
        on_disk = self.checkpoint[1].step if self.checkpoint else None
        source = "memory" if self.snapshot else "disk" if self.checkpoint else "the beginning"
        return {"from": source, "step": self.step, "step_on_disk": on_disk}


def find_restore_point(engine: Engine, run: RunInfo, stage: str, on_skip: OnSkip) -> RestorePoint:
    """Find the newest usable state of a stage. Slow: it reads every byte of a checkpoint.

    Raises: KgorchError if checkpoints are recorded and none is usable: only the user may decide to start from the beginning.
    """
    rungs.move_superseded(engine, run, stage, checkpoint_root(run, stage))
    snapshot = keeper_client.newest(Path(run.folder))
    if snapshot and (snapshot.run_id, snapshot.stage) != (run.id, stage):
        snapshot = None  # the keeper may still hold one of an earlier stage
    try:
        checkpoint = _newest_checkpoint(engine, run, stage, on_skip)
    except KgorchError as error:
        if snapshot is None:
            raise
        # The stage can resume from the snapshot, so the user has nothing to decide.
        on_skip(checkpoint_root(run, stage), error)
        checkpoint = None
    # A snapshot of the same step saves no training, and its bytes were not verified as those of the checkpoint were.
    if snapshot and checkpoint and checkpoint[1].step >= snapshot.step:
        snapshot = None
    return RestorePoint(checkpoint, snapshot)


def _newest_checkpoint(engine: Engine, run: RunInfo, stage: str, on_skip: OnSkip) -> tuple[Path, Manifest] | None:
    """The stage's newest checkpoint, verified by this call; None if none was ever recorded. Raises: as find_restore_point."""
    root = checkpoint_root(run, stage)
    root.mkdir(parents=True, exist_ok=True)
    newest = store.newest_verified(root, run.id, on_skip)
    recorded = [
        row
        for row in rows.of_run(engine, run.id, CheckpointState.VERIFIED, CheckpointState.BROKEN)
        if row.stage == stage
    ]
    if newest is None and recorded:
        raise KgorchError(
            f"no checkpoint of stage {stage!r} can be used, and the run had reached step {recorded[-1].step}",
            f"looked in {root}",
            next_step="put the folder back where it was, or begin a new run with `kgorch start PLAN --fresh`",
        )
    return newest


# Launch


def prepare(
    context: SessionContext,
    stage: StageSection,
    restore_point: RestorePoint,
    state: LifecycleState,
    data: DataCache,
    place: NodePlace | None = None,
) -> tuple[LaunchedAttempt, LaunchSpec]:
    """Write the stage's next attempt into the database, and build its launch specification. Starts no process.

    Args:
        state: of the session's lifecycle, for the wall and the deadline.
        data: knows which data sets have a local copy.
        place: of this node among several; None for one.
    Raises: SQLAlchemyError.
    """
    engine, run, plan, session = context.engine, context.run, context.plan, context.session
    # of a foreign program kgorch sees one process, its agent, however many the program starts
    ranks = 1 if stage.foreign else devices.rank_count(stage.ranks, context.environ)
    ranks = sum(place.ranks) if place else ranks
    device = devices.model_name(context.environ)
    scope = RungScope(stage.name, device, ranks)
    memory = rungs.begin(engine, run, plan, session.id, scope, restore_point.step)
    folder = Path(run.folder) / "attempts"
    row = sessions.open_attempt(
        engine,
        session.id,
        stage=stage.name,
        ranks=ranks,
        first_step=restore_point.step,
        # a function: the attempt's number is assigned in the transaction that adds the row
        folder_of=lambda number: str(folder / f"{session.number}.{number}"),
    )
    registry.mark_best(engine, run.id, plan)  # the plan's rule may have changed since the last attempt
    attempt = _attempt(context, row, device)
    if restore_point.snapshot:
        attempt = replace(attempt, from_snapshot=restore_point.snapshot.number)
    checkpoint, launch = restore_point.checkpoint, next_launch(engine, run, plan, scope, memory)
    launch = replace(
        launch,
        attempt=attempt.name,
        folder=attempt.row.folder,
        args=data.args(launch.args, workdir=run.workdir),
        foreign=foreign_stage.launch_values(engine, run, stage, devices.rank_count(stage.ranks, context.environ)),
        data=data.caches,
        nodes=asdict(place) if place else None,
        wall_s=state.wall_s,
        deadline_s=state.deadline_s,
        resume=str(checkpoint[0]) if checkpoint and not restore_point.snapshot else None,
        snapshot=attempt.from_snapshot,
        extends=restore_point.is_final and extension.goes_on_from(engine, run, stage.name, restore_point.step),
    )
    return attempt, launch


def next_launch(engine: Engine, run: RunInfo, plan: Plan, scope: RungScope, memory: LaunchSettings) -> LaunchSpec:
    """The launch specification of a stage's next attempt, by run and plan: without its number and folder, from which state it
    goes on, and what changes while the session runs."""
    stage, folder = next(item for item in plan.stage if item.name == scope.stage), Path(run.folder)
    return LaunchSpec(
        run=run.name,
        run_id=run.id,
        stage=stage.name,
        attempt="",
        folder="",
        entry=stage.entry,
        args=stage.args | dict(memory.settings.arguments) | remedies.arguments(memory.schedule),
        argv=stage.argv,
        flags=stage.flags,
        launcher=stage.launcher,
        integration=stage.integration,
        workdir=run.workdir,
        ranks=scope.world_size,
        socket=str(folder / "control.sock"),
        checkpoints=str(checkpoint_root(run, stage.name)),
        output=str(folder / "outputs"),
        cached=str(folder / CACHE_FOLDER),
        plan_hash=run.plan_hash,
        seed=plan.seed,
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        keeper=str(folder / KEEPER_SOCKET),
        settings=memory.settings.as_dict(),
        schedule=memory.schedule,
        changes=rungs.changes(engine, run, stage.name),
        ladder=list(plan.memory.ladder),
        device=scope.device,
        health=remedies.launch_health(engine, run, plan, stage.name),
        collective_timeout_s=plan.health.collective_timeout_s,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
        best=registry.best_for_ranks(engine, run.id, plan, stage.name),
        quick=stage.quick_test_of is not None,
    )


def load_attempt(context: SessionContext, row: AttemptInfo) -> LaunchedAttempt:
    """An attempt that another supervisor launched, to adopt it or to judge its end."""
    return _attempt(context, row, device_of(Path(row.folder), context.environ))


def _attempt(context: SessionContext, row: AttemptInfo, device: str) -> LaunchedAttempt:
    engine, run = context.engine, context.run
    restart = rungs.last_restart(engine, run.id, row.stage)
    since = restart.at if restart else None  # steps from before the stage began anew are no progress of this beginning
    is_foreign = any(stage.foreign is not None for stage in context.plan.stage if stage.name == row.stage)
    highest_step = sessions.max_step(engine, run.id, row.stage, before_attempt=row.id, since=since)
    return LaunchedAttempt(
        row=row,
        name=f"{context.session.number}.{row.number}",
        highest_step=row.first_step if is_foreign else highest_step,
        without_progress=sessions.attempts_without_progress(engine, run.id),
        more_stages=any(stage.name != row.stage for stage in open_stages(engine, run, context.plan)),
        device=device,
        is_foreign=is_foreign,
        previous_records=_previous_records(engine, run, row),
    )


def _previous_records(engine: Engine, run: RunInfo, row: AttemptInfo) -> list[RankRecord]:
    """The rank records of the attempt before this one, if it crashed in the same stage."""
    previous = sessions.previous_attempt(engine, run.id, row.id)
    # In another stage an error at the same line and step is another error. Without a crash there is none to repeat.
    if previous is None or previous.outcome != Outcome.CRASHED or previous.stage != row.stage:
        return []
    return launcher.records(Path(previous.folder), previous.ranks)


def device_of(folder: Path, environ: Mapping[str, str] = os.environ) -> str:
    """The device that an attempt was launched on, by its launch.json; without a readable one, the device of this machine."""
    try:
        return LaunchSpec.read(folder / "launch.json").device
    except (OSError, ValueError, TypeError, ProtocolError):
        return devices.model_name(environ)
