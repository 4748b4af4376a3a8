"""How much of a pool of accelerator hours is used: by the charges, and by the sessions that run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from kgorch.core.limits import quota as core
from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota import Quota, Usage
from kgorch.core.limits.quota_windows import PIECE_S, Never, Rolling
from kgorch.db import charges, fleet, sessions
from kgorch.db.charges import OwnCharges
from kgorch.db.rows import ChargeInfo, PoolInfo, SessionInfo
from kgorch.system import process_identity
from kgorch.system.file_lock import is_locked

SILENT_S = 10.0
"""A session of another machine of the fleet that was not charged for so long cannot reach the database, or is dead. It may train up
to its wall all the same, so all of that time counts as used."""

RECENT_CHARGE_S = 120.0
"""A session of another machine whose processes cannot be looked at is taken to run if it was charged this recently. Sessions are
charged every few seconds (quota_ledger.LOOK_S)."""


@dataclass(frozen=True, slots=True)
class LiveUsage:
    """What a session that runs uses of its pool.

    Attributes:
        unwritten: the usage since its newest charge.
        rate: pool seconds a second.
    """

    session: SessionInfo
    unwritten: Usage
    rate: float


def quota_of(pool: PoolInfo) -> Quota:
    """The quota of a pool, as the plan that used it last has set it."""
    return Quota(pool.name, pool.total_s, quota_windows.parse(pool.resets), pool.reserve_s)


def uses(engine: Engine, quota: Quota, now: datetime, *, but: OwnCharges | None = None) -> list[Usage]:
    """The usage by the charges, as far as it counts now.

    Args:
        but: charges to leave out.
    Returns: of a calendar window one sum, which the database computes; of a rolling one each charge, as they leave it one by one.
    """
    window = quota.window
    if not isinstance(window, Rolling):
        start, _ = window.window_at(now)
        return [Usage(start, 0.0, charges.used_s(engine, quota.pool, start, but=but))]
    # a correction counts for one window's length, and may take back usage of one length before it
    since = now - timedelta(seconds=2 * window.length_s + PIECE_S)
    rows = charges.list_since(engine, quota.pool, since, but=but)
    return [
        Usage(started_at, 0.0 if is_correction else span_s, cost) for started_at, span_s, cost, is_correction in rows
    ]


def live_usage(engine: Engine, pool: str, now: datetime, *, but: int | None = None) -> list[LiveUsage]:
    """The usage of the sessions that run, with a supervisor or without. Args: but: id of a session to leave out."""
    usage = []
    for row in charges.live_sessions(engine, pool):
        last = charges.newest(engine, row.id) if row.id != but else None
        if last is None:
            continue
        until_at = last.started_at + timedelta(seconds=last.used_s)
        ago_s = max(0.0, (now - until_at).total_seconds())
        if fleet.is_elsewhere(engine, row.machine):
            usage.append(_elsewhere(row, last, until_at, ago_s))
        elif _is_running(engine, row, ago_s):
            usage.append(LiveUsage(row, Usage(until_at, ago_s, ago_s * last.factor), last.factor))
    return usage


def _elsewhere(row: SessionInfo, last: ChargeInfo, until_at: datetime, ago_s: float) -> LiveUsage:
    """The usage of a session of another machine: at its rate while it is charged, else all that it may use up to its wall.

    Its own wall was computed when the database could be reached last, from the joint rate of the sessions that lived then. So what
    it may use is its share, and the others keep theirs.
    """
    if ago_s < SILENT_S or row.wall_at is None:
        return LiveUsage(row, Usage(until_at, ago_s, ago_s * last.factor), last.factor)
    reserved_s = max(ago_s, (row.wall_at - until_at).total_seconds())
    return LiveUsage(row, Usage(until_at, ago_s, reserved_s * last.factor), 0.0)


def _is_running(engine: Engine, row: SessionInfo, charged_ago_s: float) -> bool:
    # of another machine, or of this one before its last boot: there are no processes to look at
    if row.boot_id != process_identity.boot_id():
        return charged_ago_s < RECENT_CHARGE_S
    if process_identity.is_alive(row.supervisor_pid, row.supervisor_started_ticks, row.boot_id):
        return True
    # without a supervisor training goes on until its deadline, and its shim holds a lock
    attempt = sessions.last_attempt(engine, row.id)
    return attempt is not None and attempt.outcome is None and is_locked(Path(attempt.folder, "lock"))


def correct(engine: Engine, name: str, used_s: float, *, source: str = "a person") -> dict[str, float]:
    """Correct a pool's usage by what the user knows, and make the runs due that wait for its hours.

    Args:
        used_s: pool seconds that were used of this window.
        source: who says so.
    Returns: `computed_s`, the usage before the correction; `resumed`, the number of these runs.
    """
    now, pool = fleet.server_now(engine), charges.pool(engine, name)
    quota = quota_of(pool) if pool else Quota(name, 0.0, Never())
    usage = [*uses(engine, quota, now), *(item.unwritten for item in live_usage(engine, name, now))]
    computed_s = core.used_s(quota, usage, now)
    why = f"{source} says {used_s:g} s were used of this window; computed: {computed_s:.0f} s"
    charges.correct(engine, name, now, used_s - computed_s, why)
    return {"computed_s": round(computed_s, 3), "resumed": charges.wake_waiting_runs(engine, name)}
