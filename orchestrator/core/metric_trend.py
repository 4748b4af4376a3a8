"""When a metric reaches its target, by how it has gone until now; and the honest answer where that cannot be told.

The trend is a line through the newest points, fitted so that single bad evaluations do not bend it: Theil and Sen's, the median
of the slopes of all pairs of points. Order statistics of these slopes (Kendall's variance) give those between which the true
one lies in four cases of five; how high the line lies adds to the range. Where both slopes are for the better there is an answer
with a range; where one is and the other not, the trend cannot be told from a flat one, and nothing is foretold.

A curve that levels off (a − b·exp(−x/τ), over all points) takes the line's place only where it fits clearly better. Its range comes
from all τ that fit about as well as the best: where one of them never reaches the target, there is no latest step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

NORMAL = 1.28
"""The 90% quantile: between it and its opposite lie four cases of five."""

RECENT, FEWEST = 40, 5
"""Points that the line goes through at most; below the fewest nothing is said."""

MOST = 200
"""Points that are looked at, the newest."""

CLEARLY = 6.0
"""By how much the curve's AIC must be lower than the line's."""

LARGEST = 1e100
"""A value beyond it tells of no trend, as one that is no number does, and its square is none any more."""

_TARGET = re.compile(r"\s*(\S+?)\s*(>=|<=|≥|≤)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class Target(NamedTuple):
    """`up`: it is to be reached from below."""

    metric: str
    up: bool
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.up else '≤'} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        return value >= self.value if self.up else value <= self.value


class Point(NamedTuple):
    step: int
    value: float


class Outlook(NamedTuple):
    """`verdict`: reached, foreseeable, flat, away (it moves away), levels off (before the target), or too few points.

    Attributes:
        at_step: of the first point that reached it.
        steps: from the newest point on, in the middle; `fewest` and `most` in four cases of five; `most` None: perhaps never.
        best: of all points.
    """

    verdict: str
    at_step: int | None = None
    fewest: int | None = None
    steps: int | None = None
    most: int | None = None
    best: float | None = None


def parse_target(text: str) -> Target:
    """`dice >= 0.72`, `loss <= 0.1`. Raises: ValueError."""
    match = _TARGET.fullmatch(text)
    if not match:
        raise ValueError('expected a metric and its value, "dice >= 0.72" or "loss <= 0.1"')
    return Target(match[1], match[2] in (">=", "≥"), float(match[3]))


def outlook(points: Sequence[Point], target: Target) -> Outlook:
    """`points`: in the order of steps; one that is no number is left out."""
    known = [point for point in points if abs(point.value) <= LARGEST][-MOST:]
    if reached := next((point for point in known if target.is_reached(point.value)), None):
        return Outlook("reached", at_step=reached.step, best=_best(known, target))
    if len(known) < FEWEST or known[0].step == known[-1].step:
        return Outlook("too few points", best=_best(known, target))
    sign = 1.0 if target.up else -1.0
    risen = [Point(point.step - known[-1].step, sign * point.value) for point in known]
    goal = sign * target.value
    found = _curve(risen, goal) or _line(risen[-RECENT:], goal)
    return found._replace(best=_best(known, target))


def _best(points: Sequence[Point], target: Target) -> float | None:
    return (max if target.up else min)((point.value for point in points), default=None)


def _line(points: Sequence[Point], goal: float) -> Outlook:
    """Steps are counted from the newest point, which is at 0."""
    slopes = sorted((b.value - a.value) / (b.step - a.step) for a, b in combinations(points, 2) if b.step > a.step)
    count = len(points)
    slack = NORMAL * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lowest = slopes[max(0, math.floor((len(slopes) - slack) / 2))]
    highest = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + slack) / 2))]
    usual = statistics.median(slopes)
    if highest < 0:
        return Outlook("away")
    if lowest <= 0 or usual <= 0:
        return Outlook("flat")
    soon, middle, late = (_crossing(points, slope, goal) for slope in (highest, usual, lowest))
    residues = [abs(point.value - goal + usual * (middle - point.step)) for point in points]
    height = NORMAL * NORMAL * 1.4826 * statistics.median(residues) / math.sqrt(count) / usual
    fewest, most = middle - math.hypot(middle - soon, height), middle + math.hypot(late - middle, height)
    if not math.isfinite(middle) or not math.isfinite(most):  # so slow that no number says when
        return Outlook("flat")
    return Outlook("foreseeable", None, *(max(0, math.ceil(steps)) for steps in (fewest, middle, most)))


def _crossing(points: Sequence[Point], slope: float, goal: float) -> float:
    """Where the line of that slope through the middle of the points comes to the goal."""
    return (goal - statistics.median(point.value - slope * point.step for point in points)) / slope


class _Fit(NamedTuple):
    error: float
    limit: float
    height: float
    length: float


def _curve(points: Sequence[Point], goal: float) -> Outlook | None:
    """None where a line does as well."""
    count, span = len(points), float(points[-1].step - points[0].step)
    if count < 2 * FEWEST:
        return None
    line_error, _, _ = _squares([(float(point.step), point.value) for point in points])
    lengths = [span * 10 ** (power / 48) for power in range(-48, 49)]
    fits = [fit for length in lengths if (fit := _fit(points, length))]
    best = min(fits, default=None)
    if best is None or best.error <= 0 or count * math.log(line_error / best.error) - 2 < CLEARLY:
        return None
    likely = [fit for fit in fits if fit.error <= best.error * (1 + 2 * NORMAL**2 / (count - 3))]
    if best.limit <= goal:
        return Outlook("levels off")
    reaching = [_steps(fit, goal) for fit in likely if fit.limit > goal]
    most = max(reaching) if len(reaching) == len(likely) else None
    return Outlook("foreseeable", None, min(reaching), _steps(best, goal), most)


def _fit(points: Sequence[Point], length: float) -> _Fit | None:
    """limit − height·exp(−step/length); None when it does not rise."""
    error, limit, height = _squares([(math.exp(-point.step / length), point.value) for point in points])
    return _Fit(error, limit, -height, length) if height < 0 else None


def _steps(fit: _Fit, goal: float) -> int:
    return max(0, math.ceil(fit.length * math.log(fit.height / (fit.limit - goal))))


def _squares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The least sum of squares of y = base + slope·x, with base and slope."""
    x, y = statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)
    across = math.fsum((a - x) ** 2 for a, _ in pairs)
    slope = math.fsum((a - x) * (b - y) for a, b in pairs) / across if across else 0.0
    base = y - slope * x
    return math.fsum((b - base - slope * a) ** 2 for a, b in pairs), base, slope
