"""How much accelerator time a quota has left, how long a session may run on it, and when the next one may start.

The quota belongs to a *pool*: all runs that spend from it. A session costs its *factor* in pool seconds a second (2 for two GPUs
that both count). Sessions that live at the same time spend at their joint rate. When a calendar window ends within a session, the
new window's hours are available; a rolling window gives hours back as old usage leaves it. The guarantee of this module: a session
that ends when `lasts_s` says has at no instant used more than was allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from kgorch.core.limits.quota_windows import Rolling, Window

USEFUL_S, USEFUL_SHARE = 600.0, 0.02
"""What must be available again before a session is worth its start-up: ten minutes, or 2% of small quotas. A rolling window gives
seconds back at a time, and would else start sessions that only start up."""

HORIZON_S = 35 * 86400.0
"""How far the quota is looked ahead, seconds. A limit beyond it is none: it is computed again while the session runs."""

_ROUNDING_S = 1e-3
"""Tolerance of comparisons: a float sum of charges may miss its target by less."""


@dataclass(frozen=True, slots=True)
class Quota:
    """The accelerator time of a pool.

    Attributes:
        total_s: pool seconds a window.
        reserve_s: of these, seconds that stay unused.
    """

    pool: str
    total_s: float
    window: Window
    reserve_s: float = 0.0

    @property
    def usable_s(self) -> float:
        """Pool seconds of a window that sessions may use."""
        return max(0.0, self.total_s - self.reserve_s)

    @property
    def useful_s(self) -> float:
        """Pool seconds that must be available before a session is worth its start-up."""
        return min(USEFUL_S, USEFUL_SHARE * self.total_s)


class Usage(NamedTuple):
    """Pool seconds that were used at an even rate.

    Attributes:
        started_at: when it began.
        span_s: how long it lasted, seconds; 0.0 for a correction.
        cost_s: pool seconds; negative for a correction that takes earlier usage back.
    """

    started_at: datetime
    span_s: float
    cost_s: float

    @property
    def until_at(self) -> datetime:
        return self.started_at + timedelta(seconds=self.span_s)


def used_s(quota: Quota, uses: Iterable[Usage], now: datetime) -> float:
    """Pool seconds that count in the window at `now`, never negative."""
    start, _ = quota.window.window_at(now)
    return max(0.0, sum(_cost_since(use, start) for use in _corrected(quota, uses)))


def left_s(quota: Quota, uses: Iterable[Usage], now: datetime) -> float:
    """Pool seconds that may still be used, without the reserve."""
    return max(0.0, quota.usable_s - used_s(quota, uses, now))


def lasts_s(quota: Quota, uses: Sequence[Usage], now: datetime, *, rate: float) -> float | None:
    """For how many seconds from `now` on `rate` pool seconds a second can be spent; None for the whole horizon.

    Args:
        rate: pool seconds a second of this session and all others of the pool that live.
    """
    if used_s(quota, uses, now) > quota.usable_s:  # after a correction, or with a plan that allows less than before
        return 0.0
    if isinstance(quota.window, Rolling):
        return next((at_s for at_s, _, over_s in _rolling_usage(quota, uses, now, rate) if over_s is not None), None)
    at, remaining_s = now, left_s(quota, uses, now)
    while (at - now).total_seconds() < HORIZON_S:
        _, end = quota.window.window_at(at)
        if end is None or remaining_s < rate * (end - at).total_seconds():
            return (at - now).total_seconds() + remaining_s / rate
        at, remaining_s = end, quota.usable_s
    return None


def available_at(quota: Quota, uses: Sequence[Usage], now: datetime, *, needed_s: float) -> datetime | None:
    """When `needed_s` pool seconds, or the whole quota where that is less, can be spent; None when the quota never renews.

    Usage by others until then is not anticipated: the caller asks again at that time.
    """
    needed_s = min(needed_s, quota.usable_s)
    if left_s(quota, uses, now) + _ROUNDING_S >= needed_s:
        return now
    if not isinstance(quota.window, Rolling):
        return quota.window.window_at(now)[1]
    goal_s, before_s, before = quota.usable_s - needed_s, 0.0, used_s(quota, uses, now)
    for at_s, used, _ in _rolling_usage(quota, uses, now, 0.0):
        if used <= goal_s:
            # Between two points usage falls in a line, or at once where a correction leaves the window.
            slope = (before - used) / (at_s - before_s) if at_s > before_s else 0.0
            back_s = before_s + (before - goal_s) / slope if slope else at_s
            return now + timedelta(seconds=min(at_s, back_s) + _ROUNDING_S)
        before_s, before = at_s, used
    return now + timedelta(seconds=quota.window.length_s + _ROUNDING_S)


def _rolling_usage(
    quota: Quota, uses: Iterable[Usage], now: datetime, rate: float
) -> Iterator[tuple[float, float, float | None]]:
    """The usage of a rolling window from `now` on as a polyline, if `rate` pool seconds a second are spent.

    Yields:
        Seconds from now, pool seconds used then, and None; at the point where the quota is exhausted, the last one, its seconds
        from now in place of None.
    """
    assert isinstance(quota.window, Rolling)
    length_s = quota.window.length_s
    used, slope, changes = used_s(quota, uses, now), rate, []
    for use in _corrected(quota, uses):
        leaves_s = (use.started_at - now).total_seconds() + length_s
        if use.span_s <= 0:
            changes.append((leaves_s, 0.0, -use.cost_s))
        else:
            own_rate = use.cost_s / use.span_s
            changes += [(leaves_s, -own_rate, 0.0), (leaves_s + use.span_s, own_rate, 0.0)]
    at_s = 0.0
    for change_s, own_rate, jump in [*sorted(changes), (length_s, 0.0, 0.0)]:
        if change_s >= 0:
            reaches = used + slope * (change_s - at_s)
            if slope > 0 and reaches > quota.usable_s:
                over_s = at_s + max(0.0, quota.usable_s - used) / slope
                yield over_s, quota.usable_s, over_s
                return
            at_s, used = change_s, reaches
            yield at_s, used, None
            used += jump
            if jump:
                yield at_s, used, None
        slope += own_rate


def _cost_since(use: Usage, start: datetime) -> float:
    """The part of the cost that was used from `start` on."""
    if use.span_s <= 0:
        return use.cost_s if use.started_at >= start else 0.0
    counted_s = (use.until_at - max(use.started_at, start)).total_seconds()
    return use.cost_s * min(max(counted_s, 0.0) / use.span_s, 1.0)


def _corrected(quota: Quota, uses: Iterable[Usage]) -> list[Usage]:
    """The usage with negative corrections taken out of it, for a rolling window.

    Each takes away the oldest usage that counted at its instant. Left as a sum of its own, it would go on giving hours back after
    the usage that it corrects has left the window. The oldest, because what remains then counts longest.
    """
    if not isinstance(quota.window, Rolling):
        return list(uses)
    result: list[Usage] = []
    for use in sorted(uses):
        if use.cost_s >= 0:
            result.append(use)
            continue
        start, credit_s, rest = quota.window.window_at(use.started_at)[0], -use.cost_s, []
        for earlier in result:
            removed_s = min(credit_s, _cost_since(earlier, start))
            credit_s -= removed_s
            rest += _without(earlier, start, removed_s) if removed_s > 0 else [earlier]
        result = rest
    return result


def _without(use: Usage, start: datetime, removed_s: float) -> list[Usage]:
    """The usage without its first `removed_s` pool seconds since `start`."""
    if use.span_s <= 0:
        return [Usage(use.started_at, 0.0, use.cost_s - removed_s)]
    rate = use.cost_s / use.span_s
    early_s = max(0.0, (start - use.started_at).total_seconds())
    late_s = max(0.0, use.span_s - early_s - removed_s / rate)
    late_at = use.until_at - timedelta(seconds=late_s)
    parts = [Usage(use.started_at, early_s, early_s * rate), Usage(late_at, late_s, late_s * rate)]
    return [part for part in parts if part.span_s > 0]
