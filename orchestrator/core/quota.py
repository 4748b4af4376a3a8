"""How much accelerator time is left of what a window allows, how long a session may go on with it, and when one may begin again.

The hours belong to a *pool*: all runs that spend the same ones. A session costs its *factor* in pool seconds a second (two GPUs
of which each counts: 2). Sessions that live at the same time spend at their joint rate. When a calendar window ends within a
session, the new window's hours are there; of a rolling window, hours come back as old use leaves it. What this module
promises is one thing: whoever ends when it says has at no instant used more than was allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from orchestrator.core.quota_windows import Rolling, Window

USEFUL_S, USEFUL_SHARE = 600.0, 0.02
"""What must have come back before a session is worth its start-up: ten minutes, or 2% of small quotas."""

HORIZON_S = 35 * 86400.0
"""A wall farther away than this is none: it is computed anew while the session lasts."""

_ROUNDING_S = 1e-3


@dataclass(frozen=True, slots=True)
class Quota:
    """`total_s` pool seconds a window, of which `reserve_s` stay unused."""

    pool: str
    total_s: float
    window: Window
    reserve_s: float = 0.0

    @property
    def usable_s(self) -> float:
        return max(0.0, self.total_s - self.reserve_s)

    @property
    def useful_s(self) -> float:
        return min(USEFUL_S, USEFUL_SHARE * self.total_s)


class Use(NamedTuple):
    """`cost_s` pool seconds, used evenly over `span_s` seconds from `from_at` on.

    A correction has no span, and may be negative: then so much of what was used before it was not.
    """

    from_at: datetime
    span_s: float
    cost_s: float

    @property
    def until_at(self) -> datetime:
        return self.from_at + timedelta(seconds=self.span_s)


def used_s(quota: Quota, uses: Iterable[Use], now: datetime) -> float:
    """Pool seconds that count at `now`, never negative."""
    start, _ = quota.window.window_at(now)
    return max(0.0, sum(_cost_since(use, start) for use in _as_they_leave(quota, uses)))


def left_s(quota: Quota, uses: Iterable[Use], now: datetime) -> float:
    """Pool seconds; the reserve is not among them."""
    return max(0.0, quota.usable_s - used_s(quota, uses, now))


def lasts_s(quota: Quota, uses: Sequence[Use], now: datetime, *, rate: float) -> float | None:
    """For how many seconds from `now` on `rate` pool seconds a second can be spent; None for as long as one looks.

    Args:
        rate: of the session and all others of the pool that live.
    """
    if used_s(quota, uses, now) > quota.usable_s:  # by a correction, or a plan that allows less than before
        return 0.0
    if isinstance(quota.window, Rolling):
        return next((at_s for at_s, _, over_s in _course(quota, uses, now, rate) if over_s is not None), None)
    at, left = now, left_s(quota, uses, now)
    while (at - now).total_seconds() < HORIZON_S:
        _, end = quota.window.window_at(at)
        if end is None or left < rate * (end - at).total_seconds():
            return (at - now).total_seconds() + left / rate
        at, left = end, quota.usable_s
    return None


def available_at(quota: Quota, uses: Sequence[Use], now: datetime, *, needed_s: float) -> datetime | None:
    """When `needed_s` pool seconds (or all that are ever there) can be spent; None when no hours come back.

    It counts on nobody else spending meanwhile: who comes then looks again.
    """
    needed_s = min(needed_s, quota.usable_s)
    if left_s(quota, uses, now) + _ROUNDING_S >= needed_s:
        return now
    if not isinstance(quota.window, Rolling):
        return quota.window.window_at(now)[1]
    goal_s, before_s, before = quota.usable_s - needed_s, 0.0, used_s(quota, uses, now)
    for at_s, used, _ in _course(quota, uses, now, 0.0):
        if used <= goal_s:
            falling = (before - used) / (at_s - before_s) if at_s > before_s else 0.0
            back_s = before_s + (before - goal_s) / falling if falling else at_s
            return now + timedelta(seconds=min(at_s, back_s) + _ROUNDING_S)
        before_s, before = at_s, used
    return now + timedelta(seconds=quota.window.length_s)


def _course(
    quota: Quota, uses: Iterable[Use], now: datetime, rate: float
) -> Iterator[tuple[float, float, float | None]]:
    """What counts of a rolling window from `now` on, if so much is spent: the instants (in seconds from now) at which its
    slope changes, what counts there, and, at the one where no more is allowed, that."""
    assert isinstance(quota.window, Rolling)
    length_s = quota.window.length_s
    used, slope, changes = used_s(quota, uses, now), rate, []
    for use in _as_they_leave(quota, uses):
        leaves_s = (use.from_at - now).total_seconds() + length_s
        if use.span_s <= 0:
            changes.append((leaves_s, 0.0, -use.cost_s))
        else:
            pace = use.cost_s / use.span_s
            changes += [(leaves_s, -pace, 0.0), (leaves_s + use.span_s, pace, 0.0)]
    at_s = 0.0
    for change_s, pace, jump in [*sorted(changes), (length_s, 0.0, 0.0)]:
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
        slope += pace


def _cost_since(use: Use, start: datetime) -> float:
    if use.span_s <= 0:
        return use.cost_s if use.from_at >= start else 0.0
    counted_s = (use.until_at - max(use.from_at, start)).total_seconds()
    return use.cost_s * min(max(counted_s, 0.0) / use.span_s, 1.0)


def _as_they_leave(quota: Quota, uses: Iterable[Use]) -> list[Use]:
    """Of a rolling window, a negative correction takes away the oldest use that counted at its instant.

    Left standing as a sum, it would go on giving hours back after the use that it was for has left the window. The oldest,
    because what remains then stays longest.
    """
    if not isinstance(quota.window, Rolling):
        return list(uses)
    kept: list[Use] = []
    for use in sorted(uses):
        if use.cost_s >= 0:
            kept.append(use)
            continue
        start, owed_s, rest = quota.window.window_at(use.from_at)[0], -use.cost_s, []
        for old in kept:
            taken_s = min(owed_s, _cost_since(old, start))
            owed_s -= taken_s
            rest += _without(old, start, taken_s) if taken_s > 0 else [old]
        kept = rest
    return kept


def _without(use: Use, start: datetime, taken_s: float) -> list[Use]:
    """What is left of a use when its first `taken_s` pool seconds since `start` are taken out."""
    if use.span_s <= 0:
        return [Use(use.from_at, 0.0, use.cost_s - taken_s)]
    pace = use.cost_s / use.span_s
    early_s = max(0.0, (start - use.from_at).total_seconds())
    late_s = max(0.0, use.span_s - early_s - taken_s / pace)
    late_at = use.until_at - timedelta(seconds=late_s)
    parts = [Use(use.from_at, early_s, early_s * pace), Use(late_at, late_s, late_s * pace)]
    return [part for part in parts if part.span_s > 0]
