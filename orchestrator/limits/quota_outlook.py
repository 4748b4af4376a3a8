"""The hours that a run's pool still allows, as the forecast asks (core/eta.py); what other runs will spend is not counted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Engine

from db import charges
from db.records import RunInfo
from orchestrator.core import quota as core
from orchestrator.core.eta import Spent
from orchestrator.core.quota import Quota, Use
from orchestrator.limits import quota_pools


class PoolHours:
    """`rate`: pool seconds that a second of a session costs."""

    def __init__(self, quota: Quota, used: Sequence[Use], rate: float) -> None:
        self._quota, self._used, self._rate = quota, used, rate

    def lasts_s(self, spent: Sequence[Spent], at: datetime) -> float | None:
        return core.lasts_s(self._quota, self._with(spent, at), at, rate=self._rate)

    def available_at(self, spent: Sequence[Spent], at: datetime, needed_s: float) -> datetime | None:
        if needed_s * self._rate > self._quota.usable_s:
            return None
        return core.available_at(self._quota, self._with(spent, at), at, needed_s=needed_s * self._rate)

    def _with(self, spent: Sequence[Spent], at: datetime) -> list[Use]:
        """`spent` follow one another: those that have left the window before `at` are not looked at again and again."""
        start, _ = self._quota.window.window_at(at)
        counted = itertools.takewhile(
            lambda item: item.from_at + timedelta(seconds=item.span_s) > start, reversed(spent)
        )
        return [*self._used, *(Use(item.from_at, item.span_s, item.span_s * self._rate) for item in counted)]


def of_run(engine: Engine, run: RunInfo, session_id: int, now: datetime) -> PoolHours | None:
    """None for a run that spends nobody's hours. `session_id`: of its newest session, whose factor counts."""
    told = charges.pool(engine, run.pool) if run.pool else None
    if told is None:
        return None
    quota, last = quota_pools.quota_of(told), charges.newest(engine, session_id)
    used = [
        *quota_pools.uses(engine, quota, now),
        *(item.unwritten for item in quota_pools.living(engine, run.pool, now)),
    ]
    return PoolHours(quota, used, last.factor if last else 1.0)
