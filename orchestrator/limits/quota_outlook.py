"""The hours that a run's pool still allows, for the forecast (core/forecast/eta.py).

Future usage by other runs is not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Engine

from kgorch.core.forecast.eta import PlannedSession
from kgorch.core.limits import quota as core
from kgorch.core.limits.quota import Quota, Usage
from kgorch.db import charges
from kgorch.db.rows import RunInfo
from kgorch.limits import quota_pools


class PoolHours:
    """The hours of a pool while a forecast lays sessions into them, one after the other.

    Args:
        used: the usage until now.
        rate: pool seconds that a second of a session costs.
    """

    def __init__(self, quota: Quota, used: Sequence[Usage], rate: float) -> None:
        self._quota, self._used, self._rate = quota, used, rate

    def lasts_s(self, planned: Sequence[PlannedSession], at: datetime) -> float | None:
        """Seconds that a session may last at `at`, after the planned ones; None for no limit."""
        return core.lasts_s(self._quota, self._usage(planned, at), at, rate=self._rate)

    def available_at(self, planned: Sequence[PlannedSession], at: datetime, needed_s: float) -> datetime | None:
        """When a session of `needed_s` seconds can start; None for never."""
        # core.available_at waits for the whole quota at most, which would be too little
        if needed_s * self._rate > self._quota.usable_s:
            return None
        return core.available_at(self._quota, self._usage(planned, at), at, needed_s=needed_s * self._rate)

    def _usage(self, planned: Sequence[PlannedSession], at: datetime) -> list[Usage]:
        """The usage until now and by the planned sessions that count at `at`.

        These follow one another, so the search ends at the first that has left the window: the forecast asks for every session.
        """
        start, _ = self._quota.window.window_at(at)
        counted = itertools.takewhile(
            lambda item: item.started_at + timedelta(seconds=item.span_s) > start, reversed(planned)
        )
        return [*self._used, *(Usage(item.started_at, item.span_s, item.span_s * self._rate) for item in counted)]


def of_run(engine: Engine, run: RunInfo, session_id: int, now: datetime) -> PoolHours | None:
    """The hours of a run; None for one without a quota.

    Args:
        session_id: its newest session, whose factor is taken for the next ones.
    """
    pool = charges.pool(engine, run.pool) if run.pool else None
    if pool is None:
        return None
    quota, last = quota_pools.quota_of(pool), charges.newest(engine, session_id)
    used = [
        *quota_pools.uses(engine, quota, now),
        *(item.unwritten for item in quota_pools.live_usage(engine, run.pool, now)),
    ]
    return PoolHours(quota, used, last.factor if last else 1.0)
