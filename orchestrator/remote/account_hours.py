"""The hours of an account at a place: what a session of it costs, and the ledger of `kgorch quota`, which they correct."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Engine

from kgorch.core.remote import session_plan
from kgorch.core.remote.place_values import PlaceQuota
from kgorch.db import charges, remote
from kgorch.db.rows import PoolInfo, RemoteSessionInfo
from kgorch.limits import quota_pools
from kgorch.platforms.detect import BY_NAME


def factor(history: Sequence[RemoteSessionInfo], accelerator: str) -> float:
    """Hours of the account for an hour of a session: as measured last in this run, else as reported."""
    measured = [row.factor for row in history if row.factor]
    return measured[-1] if measured else session_plan.FACTORS.get(accelerator, 1.0)


def record(engine: Engine, place: str, quota: PlaceQuota, history: Sequence[RemoteSessionInfo]) -> None:
    """Take what the place says of the account's hours: into the ledger's pool of its name, and as the cost of the last session."""
    used_s = quota.used_s + quota.reserved_s
    platform = BY_NAME.get(place)
    resets = (platform.quota_resets if platform else None) or "never"
    charges.save_pool(engine, PoolInfo(place, quota.allowed_s, resets, 0.0, datetime.now(UTC)))
    quota_pools.correct(engine, place, used_s, source=f"the place {place}")
    # the newest row is the session that is being planned
    former = history[-2] if len(history) > 1 else None
    if former is None or former.quota_used_s is None or former.factor or not former.record:
        return
    began_at, ended_at = (datetime.fromisoformat(former.record[name]) for name in ("began_at", "ended_at"))
    if remote.other_sessions_since(engine, place, former.run_id, former.created_at):
        return  # they used the same hours
    lasted_s = (ended_at - began_at).total_seconds()
    if measured := session_plan.measured_factor(former.quota_used_s, quota.used_s, lasted_s):
        remote.save(engine, former.id, {"factor": measured})
