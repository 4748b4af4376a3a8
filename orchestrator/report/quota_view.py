"""The current state of pools of accelerator hours, in the fields that `quota --json` and `status --json` promise (docs/json.md)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Engine

from kgorch.db import charges, fleet, runs
from kgorch.db.rows import RunInfo
from kgorch.report.json_fields import View, stamp

RUN_FIELDS = ("pool", "hours", "used_s", "left_s", "resets_at")
"""Those of a pool in the view of a run."""


def of_run(engine: Engine, run: RunInfo, now: datetime) -> View | None:
    """The pool whose hours the run uses; None if it uses none."""
    if not run.pool:
        return None
    view = of_pool(engine, run.pool, now)
    return {name: view[name] for name in RUN_FIELDS}


def all_pools(engine: Engine, now: datetime | None = None) -> list[View]:
    now = now or fleet.server_now(engine)
    return [of_pool(engine, name, now) | {"needs": _needs(engine, name)} for name in charges.pool_names(engine)]


def of_pool(engine: Engine, name: str, now: datetime) -> View:
    """`hours` is None for a pool without a row of its own, of which only charges are known."""
    from kgorch.core.limits import (
        quota as core,  # not at the top: a run without a quota does not pay for these imports
    )
    from kgorch.core.limits.quota import Quota
    from kgorch.core.limits.quota_windows import Never, Rolling
    from kgorch.limits import quota_pools

    row = charges.pool(engine, name)
    quota = quota_pools.quota_of(row) if row else Quota(name, 0.0, Never())
    start, end = quota.window.window_at(now)
    # A living session has used more than its last charge says.
    live = quota_pools.live_usage(engine, name, now)
    uses = [*quota_pools.uses(engine, quota, now), *(item.unwritten for item in live)]
    window_from = None if isinstance(quota.window, Never) else start
    return {
        "pool": name,
        "hours": row.total_s / 3600 if row else None,
        "resets": row.resets if row else None,
        "used_s": round(core.used_s(quota, uses, now), 3),
        "reserve_s": quota.reserve_s if row else None,
        "left_s": round(core.left_s(quota, uses, now), 3) if row else None,
        "window_from": stamp(window_from),
        "resets_at": None if isinstance(quota.window, Rolling) else stamp(end),
        "sessions": [
            {"run": _name(engine, item.session.run_id), "number": item.session.number, "factor": item.rate}
            for item in live
        ],
    }


def _needs(engine: Engine, name: str) -> View:
    needs = charges.remaining_need(engine, name)
    return {"runs": needs.runs, "known": needs.known, "still_s": needs.seconds if needs.known else None}


def _name(engine: Engine, run_id: str) -> str:
    run = runs.by_id(engine, run_id)
    return run.name if run else run_id
