"""One launch of a stage: what it is told, and how far the run had come before it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import checkpoints as rows
from db import runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator.checkpoint import registry, store
from orchestrator.checkpoint.manifest import Manifest, checkpoint_folder_name
from orchestrator.checkpoint.verify import verify_checkpoint
from orchestrator.core.attempt_outcome import (
    Ended,
    RankRecord,
    exhausted,
    failed_in,
    final_step,
    first_cause,
    is_same_error,
    memory_that_ran_out,
    verdict,
)
from orchestrator.core.codes import CheckpointState, Outcome, RankError, RankOutcome
from orchestrator.core.lifecycle import AttemptCrashed, Diagnosed, Event, Session
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from orchestrator.hardware import devices
from orchestrator.launch import extension, launcher, remedies, rungs
from orchestrator.launch.rungs import Place
from orchestrator.plan import Plan, StageSection
from orchestrator.protocol.codec import ProtocolError
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.run_files import CACHE_FOLDER, KEEPER_SOCKET
from orchestrator.protocol.snapshot_messages import SnapshotInfo
from orchestrator.services.data_cache import DataCache
from orchestrator.snapshots import keeper_client

Skipped = Callable[[Path, KgorchError], None]


@dataclass(frozen=True, slots=True)
class Running:
    """An attempt, and all that is needed to judge its end without asking the database.

    Attributes:
        furthest: the highest step of the stage that an attempt before it came to.
        without_progress: attempts in a row before it that came no step further.
        device: as it was launched on (devices.model_name).
        from_snapshot: the number of the snapshot that it went on from.
        before: the records of the attempt before it, where that one crashed.
        unwritten: as launcher.Unwritten. opened_again: stages before it that have to be done first.
        lost_best: stages before it whose best checkpoint was set aside: another attempt takes the next best.
    """

    row: AttemptInfo
    name: str
    furthest: int
    without_progress: int
    more_stages: bool
    device: str = ""
    from_snapshot: int | None = None
    before: Sequence[RankRecord] = ()
    unwritten: dict[str, dict[str, Any]] = field(default_factory=dict)
    opened_again: list[str] = field(default_factory=list)
    lost_best: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.row.folder)

    def failed_by_itself(self) -> bool:
        """Some rank has raised, not only been killed or lost its peers."""
        return any(record.outcome is RankOutcome.FAILED and not record.is_collateral for record in self._records())

    def missed_a_checkpoint(self) -> bool:
        """Some rank could not read one; of an earlier stage, for its own was read back before the launch."""
        return any(record.code is RankError.CHECKPOINT for record in self._records())

    def final_checkpoint(self, run: RunInfo) -> Path | None:
        """Where the final checkpoint lies that its ranks say they have left; None where they have left none."""
        step = final_step(self._records())
        root = checkpoint_root(run, self.row.stage)
        return None if step is None else root / checkpoint_folder_name(step, final=True)

    @property
    def place(self) -> Place:
        return Place(self.row.stage, self.device, self.row.ranks)

    def told(self, step: int) -> Ended:
        """What its processes have left, now that they are gone, having come to `step`."""
        return Ended(
            ranks=self.row.ranks,
            records=self._records(),
            launcher=launcher.ending(self.folder, self.unwritten),
            gained=step > self.furthest,
            without_progress=self.without_progress,
            more_stages=self.more_stages,
            kernel_kills=launcher.kernel_kills(self.folder, self.unwritten),
            sigkilled=launcher.was_sigkilled(self.folder, self.unwritten),
            repeats=is_same_error(self.before, self._records()),
            can_read_another=bool(self.opened_again or self.lost_best),
        )

    def _records(self) -> list[RankRecord]:
        return launcher.records(self.folder, self.row.ranks, self.unwritten)

    def hung(self, diagnosed: Diagnosed, step: int) -> Event:
        """The end of a hang as one event; it counts as a crash does."""
        return exhausted(diagnosed.cause, step > self.furthest, self.without_progress) or diagnosed


def ended(
    engine: Engine,
    run: RunInfo,
    plan: Plan,
    session_id: int,
    attempt: Running,
    step: int,
    verified: Container[str],
) -> Event:
    """How an attempt ended that had come to `step`. Where memory ended it the next rung is chosen, and written down.

    Args:
        verified: the paths of the run's verified checkpoints.
    """
    past, final = remedies.past(engine, run, attempt.row.stage), attempt.final_checkpoint(run)
    has_final = final is None or str(final) in verified
    told = replace(attempt.told(step), remedies=plan.health.remedies, past=past, has_final=has_final)
    if where := memory_that_ran_out(told):
        cause, at = first_cause(told), failed_in(told, step)
        try:
            rung = rungs.take_next(
                engine, run, plan, session_id, attempt.place, at, where=where, why=cause, attempt=attempt.name
            )
        except SQLAlchemyError as error:
            return AttemptCrashed(f"{cause}; the next rung could not be written down: {error}")
        told = replace(told, rung=rung)
    return verdict(told)


def checkpoint_root(run: RunInfo, stage: str) -> Path:
    return Path(run.checkpoints) / stage


def open_stages(engine: Engine, run: RunInfo, plan: Plan) -> list[StageSection]:
    """Stages still to do, in the plan's order. A final checkpoint makes none done: what its script does after the training
    may be left to do."""
    finished = {stage.name for stage in runs.stages(engine, run.id) if stage.finished_at}
    return [stage for stage in plan.stage if stage.name not in finished]


def open_again(engine: Engine, run: RunInfo, before: str, skipped: Skipped) -> Iterator[str]:
    """Stages before that one whose final checkpoint cannot be used any more: they are trained to their end again. Slow."""
    left = {row.stage for row in rows.of_run(engine, run.id) if row.final}
    earlier = itertools.takewhile(lambda item: item.name != before, runs.stages(engine, run.id))
    for stage in (item for item in earlier if item.name in left):
        newest = store.newest_verified(checkpoint_root(run, stage.name), run.id, skipped)
        if not newest or not newest[1].final:
            runs.reopen_stage(engine, run.id, stage.name, note="its final checkpoint cannot be used any more")
            yield stage.name


def set_aside_broken_best(engine: Engine, run: RunInfo, plan: Plan, before: str, skipped: Skipped) -> Iterator[str]:
    """Stages before that one whose best checkpoint was broken, and is out of the way now. Slow."""
    rule = registry.retention_rule(plan).best
    for stage in itertools.takewhile(lambda item: item.name != before, plan.stage if rule else ()):
        while rule and (best := registry.best_checkpoint(engine, run.id, stage.name, *rule)):
            try:
                verify_checkpoint(Path(best.key))
                break
            except CheckpointUnreadable:
                break
            except CheckpointBroken as error:
                place = store.quarantine(Path(best.key), Path(run.checkpoints))
                skipped(place, error)
                yield stage.name
                if place == Path(best.key):  # it could not be renamed, and would be found again
                    break


def more_after(engine: Engine, run: RunInfo, plan: Plan, stage: str) -> bool:
    """Whether something is left to do once `stage` is done."""
    return any(other.name != stage for other in open_stages(engine, run, plan))


@dataclass(frozen=True, slots=True)
class Found:
    """What a stage goes on from: a snapshot in the keeper's memory, else a checkpoint; with neither it begins."""

    checkpoint: tuple[Path, Manifest] | None
    snapshot: SnapshotInfo | None = None

    @property
    def step(self) -> int:
        if self.snapshot:
            return self.snapshot.step
        return self.checkpoint[1].step if self.checkpoint else 0

    @property
    def final(self) -> bool:
        """Of a stage whose training is over."""
        if self.snapshot:
            return self.snapshot.final
        return self.checkpoint is not None and self.checkpoint[1].final

    def said(self) -> dict[str, Any]:
        """For the journal."""
        on_disk = self.checkpoint[1].step if self.checkpoint else None
        source = "memory" if self.snapshot else "disk" if self.checkpoint else "the beginning"
        return {"from": source, "step": self.step, "step_on_disk": on_disk}


def newest_state(engine: Engine, run: RunInfo, stage: str, skipped: Skipped) -> Found:
    """The newest that the stage can go on from; slow, it reads all bytes of a checkpoint.

    Raises: KgorchError when there ought to be one and none can be used: beginning anew is for a person to say.
    """
    rungs.set_aside(engine, run, stage, checkpoint_root(run, stage))
    held = keeper_client.newest(Path(run.folder))
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
    found = store.newest_verified(root, run.id, skipped)
    known = [
        row
        for row in rows.of_run(engine, run.id, CheckpointState.VERIFIED, CheckpointState.BROKEN)
        if row.stage == stage
    ]
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
    stage: StageSection,
    found: Found,
    data: DataCache,
) -> tuple[Running, LaunchSpec]:
    """The stage's next attempt, written into the database, and what its processes are told; nothing is started.

    Raises: SQLAlchemyError.
    """
    ranks, device = devices.rank_count(stage.ranks), devices.model_name()
    memory = rungs.begin(engine, run, plan, session.id, Place(stage.name, device, ranks), found.step)
    folder = Path(run.folder) / "attempts"
    row = sessions.open_attempt(
        engine,
        session.id,
        stage=stage.name,
        ranks=ranks,
        first_step=found.step,
        folder_of=lambda number: str(folder / f"{session.number}.{number}"),
    )
    registry.mark_best(engine, run.id, plan)  # of a plan that may have changed
    launch = LaunchSpec(
        run=run.name,
        run_id=run.id,
        stage=stage.name,
        attempt=f"{session.number}.{row.number}",
        folder=row.folder,
        entry=stage.entry,
        args=data.args(
            stage.args | dict(memory.settings.arguments) | remedies.arguments(memory.schedule), workdir=run.workdir
        ),
        data=data.caches,
        workdir=run.workdir,
        ranks=ranks,
        socket=str(Path(run.folder) / "control.sock"),
        checkpoints=str(checkpoint_root(run, stage.name)),
        output=str(Path(run.folder) / "outputs"),
        cached=str(Path(run.folder) / CACHE_FOLDER),
        plan_hash=run.plan_hash,
        seed=plan.seed,
        resume=str(found.checkpoint[0]) if found.checkpoint and not found.snapshot else None,
        snapshot=found.snapshot.number if found.snapshot else None,
        snapshot_s=plan.checkpoint.snapshot_s,
        memory_bytes=plan.checkpoint.memory,
        keeper=str(Path(run.folder) / KEEPER_SOCKET),
        wall_s=state.wall_s,
        deadline_s=state.deadline_s,
        settings=memory.settings.as_dict(),
        schedule=memory.schedule,
        changes=rungs.changes(engine, run, stage.name),
        ladder=list(plan.memory.ladder),
        device=device,
        health=remedies.told(engine, run, plan, stage.name),
        collective_timeout_s=plan.health.collective_timeout_s,
        deterministic=plan.deterministic,
        weights=stage.weights.model_dump() if stage.weights else None,
        best=registry.best_for_ranks(engine, run.id, plan, stage.name),
        quick=stage.quick_test_of is not None,
        extends=found.final and extension.goes_on_from(engine, run, stage.name, found.step),
    )
    attempt = running(engine, run, session, row, more_stages=more_after(engine, run, plan, stage.name))
    return replace(attempt, from_snapshot=launch.snapshot, device=device), launch


def running(engine: Engine, run: RunInfo, session: SessionInfo, row: AttemptInfo, *, more_stages: bool) -> Running:
    anew = rungs.begun_anew_at(engine, run.id, row.stage)
    return Running(
        row=row,
        name=f"{session.number}.{row.number}",
        furthest=sessions.furthest_step(
            engine, run.id, row.stage, before_attempt=row.id, since=anew.at if anew else None
        ),
        without_progress=sessions.without_progress(engine, run.id),
        more_stages=more_stages,
        device=device_of(Path(row.folder)),
        before=_records_before(engine, run, row),
    )


def _records_before(engine: Engine, run: RunInfo, row: AttemptInfo) -> list[RankRecord]:
    """Of the attempt before this one, where it crashed in the same stage."""
    before = sessions.attempt_before(engine, run.id, row.id)
    if before is None or before.outcome != Outcome.CRASHED or before.stage != row.stage:
        return []
    return launcher.records(Path(before.folder), before.ranks)


def device_of(folder: Path) -> str:
    """What the attempt was launched on."""
    try:
        return LaunchSpec.read(folder / "launch.json").device
    except (OSError, ValueError, TypeError, ProtocolError):
        return devices.model_name()
