"""Rows as immutable values: what the functions of this package return. The fields are the columns of db/tables.py.

They do not hang on an ORM session, so they may be kept and passed between threads. Named tuples, because defining a frozen
dataclass takes ten times as long, and `kgorch status` should answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from kgorch.core.codes import (
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


class RunInfo(NamedTuple):
    id: str
    name: str
    number: int
    folder: str
    workdir: str
    checkpoints: str
    plan: str
    overrides: list[str]
    plan_hash: str
    state: RunState
    why: str
    created_at: datetime
    finished_at: datetime | None
    pool: str = ""
    machine: str = ""


class StageInfo(NamedTuple):
    name: str
    position: int
    finished_at: datetime | None
    note: str


class SessionInfo(NamedTuple):
    id: int
    run_id: str
    number: int
    site: str
    phase: Phase
    why: str
    boot_id: str
    wall_boottime_s: float | None
    wall_at: datetime | None
    save_lead_s: float
    started_at: datetime
    ended_at: datetime | None
    supervisor_pid: int | None
    supervisor_started_ticks: int | None
    stage: str
    first_step: int
    epoch: int
    epochs_total: int
    step: int
    steps_total: int
    samples: int
    step_s: float
    metrics: Mapping[str, float]
    heartbeat_at: datetime | None
    exactness: Mapping[str, Any] = {}
    wall_kind: Reason = Reason.NONE
    fixed_wall_boottime_s: float | None = None
    fixed_wall_kind: Reason = Reason.NONE
    pool: str = ""
    reason: Reason = Reason.NONE
    machine: str = ""
    lease_expires_at: datetime | None = None


class AttemptInfo(NamedTuple):
    id: int
    session_id: int
    number: int
    stage: str
    folder: str
    ranks: int
    first_step: int
    last_step: int
    made_progress: bool | None
    outcome: Outcome | None
    cause: str
    started_at: datetime
    ended_at: datetime | None


class CheckpointInfo(NamedTuple):
    stage: str
    step: int
    final: bool
    path: str
    bytes: int
    state: CheckpointState
    why: str
    save_duration_s: float
    blocking_s: float
    created_at: datetime
    verified_at: datetime | None
    session_id: int | None = None
    metrics: Mapping[str, float] = {}
    source: str = ""
    measured: Mapping[str, int] = {}
    best: str = ""
    pinned: bool = False


class ResumeInfo(NamedTuple):
    id: int
    run_id: str
    site: str
    due_at: datetime | None
    why: str
    state: ResumeState
    failed_starts: int = 0
    priority: int = 0
    claimant_pid: int | None = None
    claimant_started_ticks: int | None = None
    claimant_boot_id: str = ""
    lease_expires_at: datetime | None = None
    last_error: str = ""
    ranks: int | None = None
    share: bool = False
    last_session_at: datetime | None = None
    claimed_by: str = ""
    reason: Reason = Reason.NONE
    claimant_machine: str = ""
    mirrored: bool = False


class PoolInfo(NamedTuple):
    name: str
    total_s: float
    resets: str
    reserve_s: float
    updated_at: datetime


class ChargeInfo(NamedTuple):
    session_id: int | None
    pool: str
    accelerator: str
    factor: float
    started_at: datetime
    used_s: float
    why: str


class EventInfo(NamedTuple):
    at: datetime
    kind: EventKind
    phase: str
    facts: Mapping[str, Any]
    session_id: int | None
    id: int = 0


class RungInfo(NamedTuple):
    id: int
    run_id: str
    session_id: int | None
    plan_hash: str
    stage: str
    device: str
    world_size: int
    at: datetime
    step: int
    rung: str
    why: str
    up: bool
    changes_result: bool
    settings: Mapping[str, Any]


class SampleInfo(NamedTuple):
    at: datetime
    span_s: int
    values: Mapping[str, float]


class RemoteSessionInfo(NamedTuple):
    id: int
    run_id: str
    number: int
    place: str
    account: str
    name: str
    nonce: str
    state: RemoteState
    wait: RemoteWait
    why: str
    due_at: datetime
    created_at: datetime
    source: int
    expected_position: int
    expected_step: int
    session_s: int
    timeout_s: int
    bundle: str
    reference: str
    url: str
    version: int
    tries: int
    refusals: int
    absences: int
    absent_since: datetime | None
    pushed_at: datetime | None
    running_at: datetime | None
    status: str
    status_at: datetime | None
    is_last: bool
    queue_told: int
    outcome: str
    stage: str
    reached_position: int
    reached_step: int
    fruitless: int
    unprepared: int
    first_cause: str
    record: Mapping[str, Any]
    quota_used_s: float | None
    factor: float | None
    deleted_at: datetime | None


class RemoteBundleInfo(NamedTuple):
    place: str
    account: str
    name: str
    reference: str
    bytes: int
    stored_at: datetime
    ready_at: datetime | None


class SlurmJobInfo(NamedTuple):
    id: int
    run_id: str
    job: str
    name: str
    follows: str
    requeue: bool
    state: str
    reason: str
    restarts: int
    node: str
    starts_at: datetime | None
    submitted_at: datetime
    seen_at: datetime
    stop_at: datetime | None
    ended_at: datetime | None
    why: str
