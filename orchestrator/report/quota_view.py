"""Pools of accelerator hours as they stand, in the fields that `quota --json` and `status --json` promise (docs/json.md)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine

from db import charges, runs
from db.records import RunInfo

View = dict[str, Any]
SHORT = ("pool", "hours", "used_s", "left_s", "resets_at")


def of_run(engine: Engine, run: RunInfo, now: datetime) -> View | None:
    """Of the pool whose hours the run spends."""
    if not run.pool:
        return None
    found = of_pool(engine, run.pool, now)
    return {name: found[name] for name in SHORT}


def everyone(engine: Engine, now: datetime | None = None) -> list[View]:
    now = now or datetime.now(UTC)
    return [of_pool(engine, name, now) | {"needs": _needs(engine, name)} for name in charges.pools(engine)]


def of_pool(engine: Engine, name: str, now: datetime) -> View:
    """`hours` is None for a pool of which only charges are known."""
    from orchestrator.core import quota as core  # a run without a quota does not pay for it
    from orchestrator.core.quota import Quota
    from orchestrator.core.quota_windows import Never, Rolling
    from orchestrator.limits import quota_pools

    told = charges.pool(engine, name)
    quota = quota_pools.quota_of(told) if told else Quota(name, 0.0, Never())
    start, end = quota.window.window_at(now)
    live = quota_pools.living(engine, name, now)
    uses = [*quota_pools.uses(engine, quota, now), *(item.unwritten for item in live)]
    window_from = None if isinstance(quota.window, Never) else start
    return {
        "pool": name,
        "hours": told.total_s / 3600 if told else None,
        "resets": told.resets if told else None,
        "used_s": round(core.used_s(quota, uses, now), 3),
        "reserve_s": quota.reserve_s if told else None,
        "left_s": round(core.left_s(quota, uses, now), 3) if told else None,
        "window_from": _stamp(window_from),
        "resets_at": None if isinstance(quota.window, Rolling) else _stamp(end),
        "sessions": [
            {"run": _name(engine, item.session.run_id), "number": item.session.number, "factor": item.rate}
            for item in live
        ],
    }


def _needs(engine: Engine, name: str) -> View:
    found = charges.needs(engine, name)
    return {"runs": found.runs, "known": found.known, "still_s": found.seconds if found.known else None}


def _name(engine: Engine, run_id: str) -> str:
    run = runs.by_id(engine, run_id)
    return run.name if run else run_id


def _stamp(at: datetime | None) -> str | None:
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None
