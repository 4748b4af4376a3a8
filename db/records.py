"""Rows as plain values: what the verbs of this package return, and what supervisor and command line read.

Named tuples, because a frozen dataclass takes ten times as long to define, and `status` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from orchestrator.core.codes import CheckpointState, EventKind, Outcome, Phase, Reason, ResumeState, RunState


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


class StageInfo(NamedTuple):
    name: str
    position: int
    finished_at: datetime | None
    note: str


class SessionInfo(NamedTuple):
    id: int
    run_id: str
    number: int
    place: str
    phase: Phase
    why: str
    boot_id: str
    boot_wall_s: float | None
    wall_at: datetime | None
    lead_s: float
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
    beat_at: datetime | None
    exactness: Mapping[str, Any] = {}
    wall_kind: Reason = Reason.NONE
    fixed_wall_s: float | None = None
    fixed_wall_kind: Reason = Reason.NONE
    pool: str = ""
    reason: Reason = Reason.NONE


class AttemptInfo(NamedTuple):
    id: int
    session_id: int
    number: int
    stage: str
    folder: str
    ranks: int
    first_step: int
    last_step: int
    gained: bool | None
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
    took_s: float
    blocking_s: float
    created_at: datetime
    verified_at: datetime | None
    session_id: int | None = None
    metrics: Mapping[str, float] = {}
    source: str = ""
    measured: Mapping[str, int] = {}
    best: str = ""


class ResumeInfo(NamedTuple):
    id: int
    run_id: str
    place: str
    due_at: datetime | None
    why: str
    state: ResumeState
    tries: int = 0
    priority: int = 0
    claimed_pid: int | None = None
    claimed_ticks: int | None = None
    claimed_boot: str = ""
    lease_until_at: datetime | None = None
    last_error: str = ""
    ranks: int | None = None
    share: bool = False
    turn_at: datetime | None = None
    claimed_by: str = ""
    reason: Reason = Reason.NONE


class PoolInfo(NamedTuple):
    name: str
    total_s: float
    resets: str
    reserve_s: float
    told_at: datetime


class ChargeInfo(NamedTuple):
    session_id: int | None
    pool: str
    accelerator: str
    factor: float
    from_at: datetime
    used_s: float
    why: str


class EventInfo(NamedTuple):
    at: datetime
    kind: EventKind
    phase: str
    facts: Mapping[str, Any]
    session_id: int | None


class RungInfo(NamedTuple):
    id: int
    run_id: str
    session_id: int | None
    plan_hash: str
    stage: str
    device: str
    world: int
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
