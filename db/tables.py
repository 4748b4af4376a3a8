"""The ORM models, one class a table.

Column names say the unit: `…_at` is an instant in UTC, `…_s` a duration in seconds, `…_boottime_s` a reading of CLOCK_BOOTTIME.
A reading is valid only during the boot whose `boot_id` stands in the same row.

Partial indexes have their condition for SQLite alone. The migrations, which create them, have it for PostgreSQL, too; here its name
would import SQLAlchemy's dialect of it in every command, which takes 40 ms.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from kgorch.core.codes import (
    REMOTE_OPEN,
    CheckpointState,
    EventKind,
    Outcome,
    Phase,
    Reason,
    RemoteState,
    RemoteWait,
    ResumeState,
    RunState,
)
from kgorch.db.postgres import JsonText


class Utc(TypeDecorator[datetime]):
    """An aware datetime, stored as naive UTC because SQLite has no time zones."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class StatePath(TypeDecorator[str]):
    """An absolute path. Below the state folder it is stored relative to it, so that the folder can be moved or copied.

    The state folder is the engine's (db/engine.py). Without one, paths are returned as stored.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        home = state_folder(dialect)
        return value if value is None or not home else value.removeprefix(f"{home}/")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        home = state_folder(dialect)
        return value if not value or not home or value.startswith("/") else f"{home}/{value}"


class Code(TypeDecorator[str]):
    """A member of an enum of core/codes.py, stored as its value.

    An unknown value is returned as the stored text: reading never fails, and db/integrity_check.py reports it.
    """

    impl = String
    cache_ok = True

    def __init__(self, codes: type[StrEnum], length: int) -> None:
        super().__init__(length)
        self.codes = codes

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        try:
            return value if value is None else self.codes(value)
        except ValueError:
            return value


def state_folder(dialect: Dialect) -> str:
    """The state folder of the engine with this dialect, without a trailing slash; empty where the engine has none."""
    return str(getattr(dialect, "kgorch_home", ""))


DOCUMENT = JSON().with_variant(JsonText(), "postgresql")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: Utc,
        dict[str, Any]: DOCUMENT,
        dict[str, float]: DOCUMENT,
        list[str]: DOCUMENT,
        list[Any]: DOCUMENT,
    }


class Run(Base):
    """One training from first to last step. `number` counts the runs of a name: `--fresh` starts the next one."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("name", "number"), Index("ix_runs_state_created_at", "state", "created_at"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    number: Mapped[int]
    folder: Mapped[str] = mapped_column(StatePath)
    workdir: Mapped[str] = mapped_column(Text)
    checkpoints: Mapped[str] = mapped_column(StatePath)  # folder, with one subfolder a stage; never changes
    plan: Mapped[str] = mapped_column(Text)  # TOML, as it was when the run started or was changed last
    overrides: Mapped[list[str]]
    plan_hash: Mapped[str] = mapped_column(String(64))
    state: Mapped[RunState] = mapped_column(Code(RunState, 16), default=RunState.ACTIVE)
    why: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(index=True)
    finished_at: Mapped[datetime | None]
    pool: Mapped[str] = mapped_column(String(64), default="")  # the quota that it uses or waits for; empty for none
    machine: Mapped[str] = mapped_column(String(64), default="")  # of a fleet, which has its newest files; else empty


class Stage(Base):
    __tablename__ = "stages"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    position: Mapped[int]
    name: Mapped[str] = mapped_column(String(128))
    finished_at: Mapped[datetime | None]
    note: Mapped[str] = mapped_column(
        Text, default=""
    )  # why it is finished, where no attempt of this database finished it


class SessionRow(Base):
    """One stretch of a run on one machine, between two time limits.

    It also holds the supervisor's identity and the live progress, which `kgorch status` reads without a daemon.
    """

    __tablename__ = "sessions"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    number: Mapped[int]
    site: Mapped[str] = mapped_column(String(32), default="local")
    phase: Mapped[Phase] = mapped_column(Code(Phase, 16), index=True)
    reason: Mapped[Reason] = mapped_column(Code(Reason, 16), default=Reason.NONE)  # why it ends or ended
    why: Mapped[str] = mapped_column(Text, default="")  # the same as a sentence, shown to people and never compared
    boot_id: Mapped[str] = mapped_column(String(64))
    wall_boottime_s: Mapped[float | None]  # the nearest time limit
    wall_kind: Mapped[Reason] = mapped_column(Code(Reason, 64), default=Reason.NONE)  # which limit that is
    fixed_wall_boottime_s: Mapped[float | None]  # the nearest of the limits that cannot move
    fixed_wall_kind: Mapped[Reason] = mapped_column(Code(Reason, 64), default=Reason.NONE)
    pool: Mapped[str] = mapped_column(String(64), default="")  # the quota that it uses; empty for none
    wall_at: Mapped[datetime | None]  # wall_boottime_s on the wall clock, for people
    save_lead_s: Mapped[float] = mapped_column(default=0.0)  # the last save is requested so long before the limit
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    supervisor_pid: Mapped[int | None]
    supervisor_started_ticks: Mapped[int | None] = mapped_column(BigInteger)
    stage: Mapped[str] = mapped_column(String(128), default="")
    first_step: Mapped[int] = mapped_column(default=0)  # optimizer steps done when it started; `step`: now
    epoch: Mapped[int] = mapped_column(default=0)
    epochs_total: Mapped[int] = mapped_column(default=0)
    step: Mapped[int] = mapped_column(default=0)
    steps_total: Mapped[int] = mapped_column(default=0)
    samples: Mapped[int] = mapped_column(BigInteger, default=0)
    step_s: Mapped[float] = mapped_column(default=0.0)  # of the last step
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    heartbeat_at: Mapped[datetime | None]
    exactness: Mapped[dict[str, Any]] = mapped_column(default=dict)  # unused: events of the kind `exactness` hold it
    machine: Mapped[str] = mapped_column(String(64), default="")  # of a fleet, on which it runs or ran; else empty
    lease_expires_at: Mapped[datetime | None]  # of a fleet: by the server's clock, renewed while its supervisor lives


class Attempt(Base):
    """One launch of torchrun within a session."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("session_id", "number"),
        Index("ix_attempts_session_id_stage", "session_id", "stage", "last_step"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    number: Mapped[int]
    stage: Mapped[str] = mapped_column(String(128))
    folder: Mapped[str] = mapped_column(StatePath)
    ranks: Mapped[int]
    first_step: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int] = mapped_column(default=0)
    made_progress: Mapped[bool | None]  # it reached a step that no attempt before it had reached; NULL while it runs
    outcome: Mapped[Outcome | None] = mapped_column(Code(Outcome, 32))
    cause: Mapped[str] = mapped_column(Text, default="")
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (Index("ix_checkpoints_run_id_state", "run_id", "state", "stage", "step"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"), index=True)
    stage: Mapped[str] = mapped_column(String(128))
    step: Mapped[int]
    final: Mapped[bool]
    path: Mapped[str] = mapped_column(StatePath, unique=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[CheckpointState] = mapped_column(Code(CheckpointState, 16))
    why: Mapped[str] = mapped_column(Text, default="")
    save_duration_s: Mapped[float] = mapped_column(default=0.0)  # from the copy in memory to verified; 0 where unknown
    blocking_s: Mapped[float] = mapped_column(default=0.0)  # of it, how long training stood still
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    # Metric → the step on whose weights it was measured. Manifests have the same field by this name.
    measured: Mapped[dict[str, float]] = mapped_column(default=dict)
    best: Mapped[str] = mapped_column(
        String(200), default=""
    )  # the plan's keep.best, while this is the best of its stage
    pinned: Mapped[bool] = mapped_column(default=False)  # a user keeps it, whatever the plan keeps
    created_at: Mapped[datetime]
    verified_at: Mapped[datetime | None]
    source: Mapped[str] = mapped_column(
        Text, default=""
    )  # folder that it was copied from; empty where it was saved here


class Pool(Base):
    """What a quota allows (core/limits/quota.py), by the plan or platform of the session that was opened last."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    total_s: Mapped[float]
    resets: Mapped[str] = mapped_column(Text)
    reserve_s: Mapped[float] = mapped_column(default=0.0)
    updated_at: Mapped[datetime]


class Charge(Base):
    """Accelerator time that a session has used, updated while it runs. Without a session: a user's correction.

    The usage of a pool is the sum of `used_s * factor`. A charge counts for the quota window that holds `started_at`.
    `factor` is the plan's `quota.factor`: pool seconds that a session second costs.
    """

    __tablename__ = "charges"
    __table_args__ = (Index("ix_charges_pool_started_at", "pool", "started_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"), index=True)
    pool: Mapped[str] = mapped_column(String(64), default="")
    accelerator: Mapped[str] = mapped_column(String(64))
    factor: Mapped[float] = mapped_column(default=1.0)
    started_at: Mapped[datetime] = mapped_column(index=True)
    used_s: Mapped[float] = mapped_column(default=0.0)
    why: Mapped[str] = mapped_column(Text, default="")


class Resume(Base):
    """The queue: a run that resumes at `due_at`; without `due_at`, when a user asks for it.

    A run has at most one row that waits, which the partial unique index enforces. The claimant of a row is a process
    (pid, start time in clock ticks, boot) with a lease: a pid alone may be reused.
    """

    __tablename__ = "resumes"
    __table_args__ = (
        Index("ix_resumes_run_id_state", "run_id", "state"),
        Index(
            "uq_resumes_waiting",
            "run_id",
            unique=True,
            sqlite_where=text("state IN ('due', 'claimed')"),
        ),
        Index("ix_resumes_state_due_at", "state", "due_at"),
        Index("ix_resumes_share_state_due_at", "share", "state", "due_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    site: Mapped[str] = mapped_column(String(32), default="local")
    due_at: Mapped[datetime | None] = mapped_column(index=True)
    reason: Mapped[Reason] = mapped_column(Code(Reason, 16), default=Reason.NONE)  # why it waits
    why: Mapped[str] = mapped_column(Text, default="")  # the same as a sentence, shown to people and never compared
    failed_starts: Mapped[int] = mapped_column(default=0)  # in a row, without a session or with one without progress
    state: Mapped[ResumeState] = mapped_column(Code(ResumeState, 16), default=ResumeState.DUE, index=True)
    priority: Mapped[int] = mapped_column(default=0)
    claimed_by: Mapped[str] = mapped_column(String(128), default="")
    claimed_at: Mapped[datetime | None]
    claimant_pid: Mapped[int | None]
    claimant_started_ticks: Mapped[int | None] = mapped_column(BigInteger)
    claimant_boot_id: Mapped[str] = mapped_column(String(64), default="")
    claimant_machine: Mapped[str] = mapped_column(String(64), default="")  # of a fleet; else empty
    lease_expires_at: Mapped[datetime | None]
    last_error: Mapped[str] = mapped_column(Text, default="")
    ranks: Mapped[int | None]  # GPUs that it needs; NULL for all that are visible
    share: Mapped[bool] = mapped_column(default=False)  # other runs that share may use them, too
    mirrored: Mapped[bool] = mapped_column(default=False)  # its plan has a checkpoint.mirror
    last_session_at: Mapped[datetime | None]  # when the run's last session started
    created_at: Mapped[datetime]


class Sample(Base):
    """Telemetry measured at an instant, or over `span_s` seconds from it. What could not be measured is absent."""

    __tablename__ = "samples"
    __table_args__ = (Index("ix_samples_session_span_at", "session_id", "span_s", "at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    span_s: Mapped[int] = mapped_column(default=0)
    values: Mapped[dict[str, Any]]


class Curve(Base):
    """A part of the metrics that rank 0 of an attempt recorded, as JSON lines (core/metrics/metric_curve.py); `number` counts
    from 0."""

    __tablename__ = "curves"
    __table_args__ = (UniqueConstraint("attempt_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))
    number: Mapped[int]
    lines: Mapped[str] = mapped_column(Text)


class RungRow(Base):
    """A change of the memory settings (core/memory/memory_ladder.py) or of the training (core/health/training_health.py), from
    `step` on.

    The newest row of a plan, stage, device and world size holds the settings that worked there last.
    """

    __tablename__ = "rungs"
    __table_args__ = (
        Index("ix_rungs_run_id_id", "run_id", "id"),
        Index("ix_rungs_plan", "plan_hash", "stage", "device", "world_size"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"))
    plan_hash: Mapped[str] = mapped_column(String(64))
    stage: Mapped[str] = mapped_column(String(128))
    device: Mapped[str] = mapped_column(String(128))  # model of the GPU, or `cpu`; empty for a change of the training
    world_size: Mapped[int]
    at: Mapped[datetime]
    step: Mapped[int]  # of the stage, before which it applies
    rung: Mapped[str] = mapped_column(Text)  # its name, as in the plan
    why: Mapped[str] = mapped_column(Text, default="")
    up: Mapped[bool] = mapped_column(default=False)  # one rung up the ladder again: the last change was undone
    changes_result: Mapped[bool] = mapped_column(default=False)  # the loss is not what it would have been
    settings: Mapped[dict[str, Any]]  # all settings after it, or an entry of the schedule (training_health.py)


class EventRow(Base):
    """The journal: what happened, the phase that it led to, and its facts. Written in one transaction with the phase."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_run_id_id", "run_id", "id"),
        Index("ix_events_run_id_kind", "run_id", "kind", "id"),  # finds the last event of a kind among any number
        Index("ix_events_session_id_kind", "session_id", "kind", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    kind: Mapped[EventKind] = mapped_column(Code(EventKind, 48))
    phase: Mapped[str] = mapped_column(String(16), default="")  # empty, or the Phase that it led to
    facts: Mapped[dict[str, Any]] = mapped_column(default=dict)


_IS_OPEN = text(f"state IN ({', '.join(repr(str(state)) for state in REMOTE_OPEN)})")


class RemoteSessionRow(Base):
    """A session of a run at another place (core/remote/session_states.py). It holds no secret.

    A run has at most one that is not over, which the partial unique index enforces.
    """

    __tablename__ = "remote_sessions"
    __table_args__ = (
        UniqueConstraint("run_id", "number"),
        Index("uq_remote_sessions_open", "run_id", unique=True, sqlite_where=_IS_OPEN),
        Index("ix_remote_sessions_state_due_at", "state", "due_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    number: Mapped[int]
    place: Mapped[str] = mapped_column(String(32))
    account: Mapped[str] = mapped_column(String(128), default="")  # name of the account, as the place says it
    name: Mapped[str] = mapped_column(String(50), unique=True)  # of the session at the place
    nonce: Mapped[str] = mapped_column(String(64))
    state: Mapped[RemoteState] = mapped_column(Code(RemoteState, 16))
    wait: Mapped[RemoteWait] = mapped_column(Code(RemoteWait, 16), default=RemoteWait.NONE)
    why: Mapped[str] = mapped_column(Text, default="")  # shown to people and never compared; may be foreign text
    due_at: Mapped[datetime]
    created_at: Mapped[datetime]
    source: Mapped[int] = mapped_column(default=0)  # number of the session whose output it goes on from; 0 for none
    expected_position: Mapped[int] = mapped_column(default=-1)  # of the stage in the plan, in that output
    expected_step: Mapped[int] = mapped_column(default=-1)
    session_s: Mapped[int] = mapped_column(default=0)
    timeout_s: Mapped[int] = mapped_column(default=0)
    bundle: Mapped[str] = mapped_column(Text, default="")  # reference of the stored bundle
    reference: Mapped[str] = mapped_column(Text, default="")
    url: Mapped[str] = mapped_column(Text, default="")
    version: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    refusals: Mapped[int] = mapped_column(default=0)
    absences: Mapped[int] = mapped_column(default=0)
    absent_since: Mapped[datetime | None]
    pushed_at: Mapped[datetime | None]
    running_at: Mapped[datetime | None]
    status: Mapped[str] = mapped_column(String(16), default="")  # the last known one (RemoteStatus); empty for none
    status_at: Mapped[datetime | None]
    is_last: Mapped[bool] = mapped_column(default=False)  # a user has stopped the run: no session follows
    queue_told: Mapped[int] = mapped_column(default=0)
    outcome: Mapped[str] = mapped_column(String(16), default="")  # by its record (RecordOutcome); empty without one
    stage: Mapped[str] = mapped_column(String(128), default="")
    reached_position: Mapped[int] = mapped_column(default=-1)
    reached_step: Mapped[int] = mapped_column(default=-1)
    fruitless: Mapped[int] = mapped_column(default=0)
    unprepared: Mapped[int] = mapped_column(default=0)
    first_cause: Mapped[str] = mapped_column(Text, default="")
    record: Mapped[dict[str, Any]] = mapped_column(default=dict)
    quota_used_s: Mapped[float | None]  # used of the account's hours before it was pushed
    factor: Mapped[float | None]  # hours of the account for an hour of it, as measured after it
    deleted_at: Mapped[datetime | None]  # when it was removed at the place, with its output


class RemoteBundle(Base):
    """A bundle that is stored at a place, named by its contents."""

    __tablename__ = "remote_bundles"
    __table_args__ = (UniqueConstraint("place", "account", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    place: Mapped[str] = mapped_column(String(32))
    account: Mapped[str] = mapped_column(String(128), default="")
    name: Mapped[str] = mapped_column(String(64))
    reference: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    stored_at: Mapped[datetime]
    ready_at: Mapped[datetime | None]


class Machine(Base):
    """A machine of a fleet, as its daemon or one of its supervisors registered it last. Empty in SQLite."""

    __tablename__ = "machines"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    host: Mapped[str] = mapped_column(String(255), default="")
    boot_id: Mapped[str] = mapped_column(String(64))
    home: Mapped[str] = mapped_column(Text)  # its state folder, absolute
    state_id: Mapped[str] = mapped_column(String(64))  # of the state folder; machines that share one have the same
    version: Mapped[str] = mapped_column(String(64), default="")
    gpus: Mapped[list[Any]] = mapped_column(default=list)  # models
    daemon_pid: Mapped[int | None]
    seen_at: Mapped[datetime]  # by the server's clock


class SlurmJobRow(Base):
    """A Slurm job in which sessions of a run are trained (core/slurm/job_state.py). A requeued job is the same row.

    A run has at most one that is not over, which the partial unique index enforces. While there is one, no daemon starts the run.
    """

    __tablename__ = "slurm_jobs"
    __table_args__ = (
        Index(
            "uq_slurm_jobs_open",
            "run_id",
            unique=True,
            sqlite_where=text("ended_at IS NULL"),
        ),
        Index("ix_slurm_jobs_run_id_id", "run_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    job: Mapped[str] = mapped_column(String(20), default="")  # Slurm's number; empty while it is submitted
    name: Mapped[str] = mapped_column(String(128))  # by which it is found where its number was not recorded
    follows: Mapped[str] = mapped_column(String(20), default="")  # number of the job before; empty for the first one
    requeue: Mapped[bool] = mapped_column(default=True)  # sessions follow one another
    state: Mapped[str] = mapped_column(String(24))  # core/slurm/job_state.py, as Slurm showed it at `seen_at`
    reason: Mapped[str] = mapped_column(String(64), default="")  # why it waits or ended, in Slurm's word
    restarts: Mapped[int] = mapped_column(default=0)
    node: Mapped[str] = mapped_column(String(255), default="")
    starts_at: Mapped[datetime | None]
    submitted_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    stop_at: Mapped[datetime | None]  # when a user asked it to stop
    ended_at: Mapped[datetime | None]  # NULL while it waits, runs, or is to run again
    why: Mapped[str] = mapped_column(Text, default="")  # why nothing follows it, for people
