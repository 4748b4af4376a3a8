"""The models. Columns carry their units; `…_at` is an instant in UTC, `…_s` a duration, `boot…_s` a CLOCK_BOOTTIME reading."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, MetaData, String, Text, UniqueConstraint, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from orchestrator.core.codes import CheckpointState, EventKind, Outcome, Phase, Reason, ResumeState, RunState


class Utc(TypeDecorator[datetime]):
    """An aware datetime in and out, kept as UTC: SQLite has no zones."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Place(TypeDecorator[str]):
    """A path in and out, kept relative to the state folder where it lies below it: so that folder may be moved or copied.

    The state folder is the engine's (db/engine.py); without one, paths come out as they are kept.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        home = home_of(dialect)
        return value if value is None or not home else value.removeprefix(f"{home}/")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        home = home_of(dialect)
        return value if not value or not home or value.startswith("/") else f"{home}/{value}"


class Code(TypeDecorator[str]):
    """A code in and out (core/codes.py). A word that is none comes out as it is kept: db/soundness.py tells of it."""

    impl = String
    cache_ok = True

    def __init__(self, of: type[StrEnum], length: int) -> None:
        super().__init__(length)
        self.codes = of

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        try:
            return value if value is None else self.codes(value)
        except ValueError:
            return value


def home_of(dialect: Dialect) -> str:
    """The state folder that an engine with this dialect is for, as a text without a slash at its end; else nothing."""
    return str(getattr(dialect, "kgorch_home", ""))


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
        dict[str, Any]: JSON,
        dict[str, float]: JSON,
        list[str]: JSON,
    }


class Run(Base):
    """One training from first to last step; `number` counts the runs of a name (`--fresh` begins the next)."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("name", "number"), Index("ix_runs_state_created_at", "state", "created_at"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    number: Mapped[int]
    folder: Mapped[str] = mapped_column(Place)
    workdir: Mapped[str] = mapped_column(Text)
    checkpoints: Mapped[str] = mapped_column(Place)  # folder of its checkpoints, one below it a stage; never changes
    plan: Mapped[str] = mapped_column(Text)
    overrides: Mapped[list[str]]
    plan_hash: Mapped[str] = mapped_column(String(64))
    state: Mapped[RunState] = mapped_column(Code(RunState, 16), default=RunState.ACTIVE)
    why: Mapped[str] = mapped_column(Text, default="")
    created_at: Mapped[datetime] = mapped_column(index=True)
    finished_at: Mapped[datetime | None]
    pool: Mapped[str] = mapped_column(String(64), default="")  # whose hours it spends, or waits for; empty for nobody's


class Stage(Base):
    __tablename__ = "stages"
    __table_args__ = (UniqueConstraint("run_id", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    position: Mapped[int]
    name: Mapped[str] = mapped_column(String(128))
    finished_at: Mapped[datetime | None]
    note: Mapped[str] = mapped_column(Text, default="")  # how it came to be done, where no attempt of ours did it


class Session(Base):
    """One stretch of a run on one machine. The supervisor's identity and the live figures stand here, for `status`."""

    __tablename__ = "sessions"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    number: Mapped[int]
    place: Mapped[str] = mapped_column(String(32), default="local")
    phase: Mapped[Phase] = mapped_column(Code(Phase, 16), index=True)
    reason: Mapped[Reason] = mapped_column(Code(Reason, 16), default=Reason.NONE)  # what ends or has ended it
    why: Mapped[str] = mapped_column(Text, default="")  # the same for people
    boot_id: Mapped[str] = mapped_column(String(64))
    boot_wall_s: Mapped[float | None]
    wall_kind: Mapped[Reason] = mapped_column(Code(Reason, 64), default=Reason.NONE)  # which of the walls that is
    fixed_wall_s: Mapped[float | None]  # CLOCK_BOOTTIME; the nearest of those that nothing moves any more
    fixed_wall_kind: Mapped[Reason] = mapped_column(Code(Reason, 64), default=Reason.NONE)
    pool: Mapped[str] = mapped_column(String(64), default="")  # whose hours it spends; empty for nobody's
    wall_at: Mapped[datetime | None]
    lead_s: Mapped[float] = mapped_column(default=0.0)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    supervisor_pid: Mapped[int | None]
    supervisor_started_ticks: Mapped[int | None] = mapped_column(BigInteger)
    stage: Mapped[str] = mapped_column(String(128), default="")
    first_step: Mapped[int] = mapped_column(default=0)
    epoch: Mapped[int] = mapped_column(default=0)
    epochs_total: Mapped[int] = mapped_column(default=0)
    step: Mapped[int] = mapped_column(default=0)
    steps_total: Mapped[int] = mapped_column(default=0)
    samples: Mapped[int] = mapped_column(BigInteger, default=0)
    step_s: Mapped[float] = mapped_column(default=0.0)
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    beat_at: Mapped[datetime | None]
    exactness: Mapped[dict[str, Any]] = mapped_column(default=dict)  # what its bits hang on


class Attempt(Base):
    """One launch of torchrun within a session."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("session_id", "number"),
        Index("ix_attempts_reached", "session_id", "stage", "last_step"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    number: Mapped[int]
    stage: Mapped[str] = mapped_column(String(128))
    folder: Mapped[str] = mapped_column(Place)
    ranks: Mapped[int]
    first_step: Mapped[int] = mapped_column(default=0)
    last_step: Mapped[int] = mapped_column(default=0)
    gained: Mapped[bool | None]
    outcome: Mapped[Outcome | None] = mapped_column(Code(Outcome, 32))
    cause: Mapped[str] = mapped_column(Text, default="")
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (Index("ix_checkpoints_standing", "run_id", "state", "stage", "step"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"), index=True)
    stage: Mapped[str] = mapped_column(String(128))
    step: Mapped[int]
    final: Mapped[bool]
    path: Mapped[str] = mapped_column(Place, unique=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[CheckpointState] = mapped_column(Code(CheckpointState, 16))
    why: Mapped[str] = mapped_column(Text, default="")
    took_s: Mapped[float] = mapped_column(default=0.0)
    blocking_s: Mapped[float] = mapped_column(default=0.0)
    metrics: Mapped[dict[str, float]] = mapped_column(default=dict)
    measured: Mapped[dict[str, float]] = mapped_column(
        default=dict
    )  # the step on whose weights each metric was measured
    best: Mapped[str] = mapped_column(
        String(200), default=""
    )  # the plan's keep.best, while it is the best of its stage by it
    created_at: Mapped[datetime]
    verified_at: Mapped[datetime | None]
    source: Mapped[str] = mapped_column(Text, default="")  # where it was copied from; empty when it was saved here


class Pool(Base):
    """What a quota allows, as the plan or the platform of the session that was opened last said it (core/quota.py)."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    total_s: Mapped[float]
    resets: Mapped[str] = mapped_column(Text)
    reserve_s: Mapped[float] = mapped_column(default=0.0)
    told_at: Mapped[datetime]


class Charge(Base):
    """Accelerator time that a session has used, written as it is used; or, without a session, a person's correction.

    A pool's use is the sum of `used_s * factor`. `from_at` is when that use began: it counts for the window it lies in.
    """

    __tablename__ = "charges"
    __table_args__ = (Index("ix_charges_pool_from_at", "pool", "from_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"), index=True)
    pool: Mapped[str] = mapped_column(String(64), default="")
    accelerator: Mapped[str] = mapped_column(String(64))
    factor: Mapped[float] = mapped_column(default=1.0)
    from_at: Mapped[datetime] = mapped_column(index=True)
    used_s: Mapped[float] = mapped_column(default=0.0)
    why: Mapped[str] = mapped_column(Text, default="")


class Resume(Base):
    """The queue: a run that goes on when `due_at` has come; without `due_at`, when a person asks.

    A run waits in one place at most. Who has claimed a row is a process (pid, start, boot) with a lease.
    """

    __tablename__ = "resumes"
    __table_args__ = (
        Index("ix_resumes_run_id_state", "run_id", "state"),
        Index(
            "uq_resumes_waiting",
            "run_id",
            unique=True,
            sqlite_where=text("state IN ('due', 'claimed')"),
            postgresql_where=text("state IN ('due', 'claimed')"),
        ),
        Index("ix_resumes_state_due_at", "state", "due_at"),
        Index("ix_resumes_share_state_due_at", "share", "state", "due_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), index=True)
    place: Mapped[str] = mapped_column(String(32), default="local")
    due_at: Mapped[datetime | None] = mapped_column(index=True)
    reason: Mapped[Reason] = mapped_column(Code(Reason, 16), default=Reason.NONE)  # for which it waits
    why: Mapped[str] = mapped_column(Text, default="")  # the same for people
    tries: Mapped[int] = mapped_column(default=0)
    state: Mapped[ResumeState] = mapped_column(Code(ResumeState, 16), default=ResumeState.DUE, index=True)
    priority: Mapped[int] = mapped_column(default=0)
    claimed_by: Mapped[str] = mapped_column(String(128), default="")
    claimed_at: Mapped[datetime | None]
    claimed_pid: Mapped[int | None]
    claimed_ticks: Mapped[int | None] = mapped_column(BigInteger)
    claimed_boot: Mapped[str] = mapped_column(String(64), default="")
    lease_until_at: Mapped[datetime | None]
    last_error: Mapped[str] = mapped_column(Text, default="")
    ranks: Mapped[int | None]  # GPUs that it claims; NULL for all that are visible
    share: Mapped[bool] = mapped_column(default=False)  # others that share may use them, too
    turn_at: Mapped[datetime | None]  # when the run had its last session
    created_at: Mapped[datetime]


class Sample(Base):
    """Telemetry: what was measured at an instant, or over `span_s` seconds from it. What was not measured is absent."""

    __tablename__ = "samples"
    __table_args__ = (Index("ix_samples_session_span_at", "session_id", "span_s", "at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[int] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    span_s: Mapped[int] = mapped_column(default=0)
    values: Mapped[dict[str, Any]]


class Curve(Base):
    """A piece of what rank 0 of an attempt recorded of its metrics: JSON lines (core/metric_curve.py), the oldest piece first."""

    __tablename__ = "curves"
    __table_args__ = (UniqueConstraint("attempt_id", "number"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id", ondelete="CASCADE"))
    number: Mapped[int]
    lines: Mapped[str] = mapped_column(Text)


class RungRow(Base):
    """A change of what memory hangs on (core/memory_ladder.py): from `step` on, on this device and number of ranks.

    The newest of a plan, stage, device and world is what worked there last.
    """

    __tablename__ = "rungs"
    __table_args__ = (
        Index("ix_rungs_run_id_id", "run_id", "id"),
        Index("ix_rungs_plan", "plan_hash", "stage", "device", "world"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="SET NULL"))
    plan_hash: Mapped[str] = mapped_column(String(64))
    stage: Mapped[str] = mapped_column(String(128))
    device: Mapped[str] = mapped_column(String(128))
    world: Mapped[int]
    at: Mapped[datetime]
    step: Mapped[int]
    rung: Mapped[str] = mapped_column(Text)
    why: Mapped[str] = mapped_column(Text, default="")
    up: Mapped[bool] = mapped_column(default=False)
    changes_result: Mapped[bool] = mapped_column(default=False)
    settings: Mapped[dict[str, Any]]


class EventRow(Base):
    """The journal: what happened, the phase it led to, and the facts. Written in one transaction with the phase."""

    __tablename__ = "events"
    __table_args__ = (
        Index("ix_events_run_id_id", "run_id", "id"),
        Index("ix_events_run_id_kind", "run_id", "kind", "id"),  # the last of a kind, among any number of others
        Index("ix_events_session_id_kind", "session_id", "kind", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    session_id: Mapped[int | None] = mapped_column(ForeignKey("sessions.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    kind: Mapped[EventKind] = mapped_column(Code(EventKind, 48))
    phase: Mapped[str] = mapped_column(String(16), default="")  # empty, or the Phase that it led to
    facts: Mapped[dict[str, Any]] = mapped_column(default=dict)
