"""What of a pool of hours is used: by what is written down, and by the sessions that run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Engine

from db import charges, sessions
from db.charges import Own
from db.records import PoolInfo, SessionInfo
from orchestrator.core import quota as core
from orchestrator.core import quota_windows
from orchestrator.core.quota import Quota, Use
from orchestrator.core.quota_windows import PIECE_S, Never, Rolling
from orchestrator.system import process_identity
from orchestrator.system.file_lock import is_locked

HEARD_S = 120.0
"""A session on another machine that was charged within this time lives, for all we know."""


@dataclass(frozen=True, slots=True)
class Living:
    """A session of the pool that runs: what of it is not written down yet, and its pool seconds a second."""

    session: SessionInfo
    unwritten: Use
    rate: float


def quota_of(pool: PoolInfo) -> Quota:
    """What a pool allowed when it was told of last."""
    return Quota(pool.name, pool.total_s, quota_windows.parse(pool.resets), pool.reserve_s)


def uses(engine: Engine, quota: Quota, now: datetime, *, but: Own | None = None) -> list[Use]:
    """What the charges say, as far as it matters now: of a calendar window its sum."""
    window = quota.window
    if not isinstance(window, Rolling):
        start, _ = window.window_at(now)
        return [Use(start, 0.0, charges.used_s(engine, quota.pool, start, but=but))]
    # a correction counts for one length, and may take away use of one length before it
    since = now - timedelta(seconds=2 * window.length_s + PIECE_S)
    found = charges.since(engine, quota.pool, since, but=but)
    return [Use(from_at, 0.0 if is_correction else span_s, cost) for from_at, span_s, cost, is_correction in found]


def living(engine: Engine, pool: str, now: datetime, *, but: int | None = None) -> list[Living]:
    """The sessions of a pool that run, supervised or not."""
    found = []
    for row in charges.unfinished(engine, pool):
        last = charges.newest(engine, row.id) if row.id != but else None
        if last is None:
            continue
        until_at = last.from_at + timedelta(seconds=last.used_s)
        ago_s = max(0.0, (now - until_at).total_seconds())
        if _is_running(engine, row, ago_s):
            found.append(Living(row, Use(until_at, ago_s, ago_s * last.factor), last.factor))
    return found


def _is_running(engine: Engine, row: SessionInfo, charged_ago_s: float) -> bool:
    if row.boot_id != process_identity.boot_id():
        return charged_ago_s < HEARD_S
    if process_identity.is_alive(row.supervisor_pid, row.supervisor_started_ticks, row.boot_id):
        return True
    attempt = sessions.last_attempt(engine, row.id)
    return attempt is not None and attempt.outcome is None and is_locked(Path(attempt.folder, "lock"))


def correct(engine: Engine, name: str, told_s: float) -> dict[str, float]:
    """Write down that `told_s` pool seconds of this window were used, and have the runs that wait for hours looked at.

    Returns: `computed_s`, what the charges had said; `resumed`, how many runs there were that waited.
    """
    now, told = datetime.now(UTC), charges.pool(engine, name)
    quota = quota_of(told) if told else Quota(name, 0.0, Never())
    found = [*uses(engine, quota, now), *(item.unwritten for item in living(engine, name, now))]
    computed_s = core.used_s(quota, found, now)
    why = f"a person says {told_s:g} s were used of this window; computed: {computed_s:.0f} s"
    charges.correct(engine, name, now, told_s - computed_s, why)
    return {"computed_s": round(computed_s, 3), "resumed": charges.wake(engine, name)}
