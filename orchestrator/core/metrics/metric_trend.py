"""When a metric reaches its target, extrapolated from its values so far, or why that cannot be told.

The trend is a line through the newest points by the Theil–Sen estimator, the median of the slopes of all pairs of points: one
bad evaluation would move a least-squares line by weeks. Order statistics of these slopes (Kendall's variance) give the range that
holds the true slope in four cases of five; the uncertainty of the line's height adds to it. There is an answer only where the
whole range of slopes leads towards the target. Otherwise the trend is not distinguishable from a flat one.

A saturating curve (a − b·exp(−x/τ), over all points) replaces the line only where it fits clearly better. Its range comes from
all τ that fit about as well as the best one. Where one of them never reaches the target, there is no latest step.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from kgorch.core.codes import TrendVerdict

NORMAL = 1.28
"""The 90% quantile of the normal distribution. Between it and its opposite lie four cases of five."""

RECENT, FEWEST = 40, 5
"""Points of the line at most, the newest; with fewer than `FEWEST` there is no trend."""

MOST = 200
"""Points of the curve at most, the newest: the fit is quadratic in the line's points and linear in these."""

AIC_ADVANTAGE = 6.0
"""By how much the curve's AIC must be lower than the line's. The curve has one parameter more, so it always fits noise better."""

LARGEST = 1e100
"""Larger values are ignored like NaN: the square of one overflows."""

_TARGET = re.compile(r"\s*(\S+?)\s*(>=|<=|≥|≤)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class MetricTarget(NamedTuple):
    """A value that a metric shall reach.

    Attributes:
        up: from below.
    """

    metric: str
    up: bool
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {'≥' if self.up else '≤'} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        return value >= self.value if self.up else value <= self.value


class TrendPoint(NamedTuple):
    """A metric after `step` optimizer steps."""

    step: int
    value: float


class Outlook(NamedTuple):
    """The answer for one target.

    Attributes:
        at_step: of the first point that reached it; None otherwise.
        fewest: steps from the newest point to the target at the steepest likely trend; None unless foreseeable.
        steps: the same at the usual trend.
        most: the same at the flattest likely trend; None also where that never reaches it.
        best: of all points; None without one.
    """

    verdict: TrendVerdict
    at_step: int | None = None
    fewest: int | None = None
    steps: int | None = None
    most: int | None = None
    best: float | None = None


def parse_target(text: str) -> MetricTarget:
    """Parse `dice >= 0.72` or `loss <= 0.1`. Raises: ValueError."""
    match = _TARGET.fullmatch(text)
    if not match:
        raise ValueError('expected a metric and its value, "dice >= 0.72" or "loss <= 0.1"')
    return MetricTarget(match[1], match[2] in (">=", "≥"), float(match[3]))


def outlook(points: Sequence[TrendPoint], target: MetricTarget) -> Outlook:
    """When the metric reaches its target.

    Args:
        points: in the order of steps; values that are not finite are ignored.
    """
    finite = [point for point in points if abs(point.value) <= LARGEST][-MOST:]
    best = _best(finite, target)
    if first := next((point for point in finite if target.is_reached(point.value)), None):
        return Outlook(TrendVerdict.REACHED, at_step=first.step, best=best)
    if len(finite) < FEWEST or finite[0].step == finite[-1].step:
        return Outlook(TrendVerdict.TOO_FEW_POINTS, best=best)
    # From here on the newest point is at step 0 and the target is above, so that there is one case instead of four.
    sign = 1.0 if target.up else -1.0
    rising = [TrendPoint(point.step - finite[-1].step, sign * point.value) for point in finite]
    goal = sign * target.value
    return (_by_curve(rising, goal) or _by_line(rising[-RECENT:], goal))._replace(best=best)


def _best(points: Sequence[TrendPoint], target: MetricTarget) -> float | None:
    return (max if target.up else min)((point.value for point in points), default=None)


def _by_line(points: Sequence[TrendPoint], goal: float) -> Outlook:
    """The answer of the Theil–Sen line. The newest point is at step 0."""
    slopes = sorted((b.value - a.value) / (b.step - a.step) for a, b in combinations(points, 2) if b.step > a.step)
    count = len(points)
    # Kendall's variance: so many ranks to either side of the median slope lie in the range.
    slack = NORMAL * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lowest = slopes[max(0, math.floor((len(slopes) - slack) / 2))]
    highest = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + slack) / 2))]
    usual = statistics.median(slopes)
    if highest < 0:
        return Outlook(TrendVerdict.AWAY)
    if lowest <= 0 or usual <= 0:
        return Outlook(TrendVerdict.FLAT)
    soon, middle, late = (_crossing(points, slope, goal) for slope in (highest, usual, lowest))
    residues = [abs(point.value - goal + usual * (middle - point.step)) for point in points]
    # 1.4826 times the median of residues estimates a standard deviation; divided by the slope it is one of steps.
    height = NORMAL * NORMAL * 1.4826 * statistics.median(residues) / math.sqrt(count) / usual
    fewest, most = middle - math.hypot(middle - soon, height), middle + math.hypot(late - middle, height)
    if not math.isfinite(middle) or not math.isfinite(most):  # so slow that the number of steps overflows
        return Outlook(TrendVerdict.FLAT)
    return Outlook(TrendVerdict.FORESEEABLE, None, *(max(0, math.ceil(steps)) for steps in (fewest, middle, most)))


def _crossing(points: Sequence[TrendPoint], slope: float, goal: float) -> float:
    """The step at which the line of this slope through the median of the points reaches the goal."""
    return (goal - statistics.median(point.value - slope * point.step for point in points)) / slope


class _SaturationFit(NamedTuple):
    """limit − height·exp(−step/length), with its sum of squared errors. Fits sort by their error."""

    error: float
    limit: float
    height: float
    length: float


def _by_curve(points: Sequence[TrendPoint], goal: float) -> Outlook | None:
    """The answer of the saturating curve; None where a line fits as well."""
    count, span = len(points), float(points[-1].step - points[0].step)
    if count < 2 * FEWEST:
        return None
    line_error, _, _ = _squares([(float(point.step), point.value) for point in points])
    # A grid over two decades of τ, 48 values a decade: for each one the fit is linear and needs no start value.
    lengths = [span * 10 ** (power / 48) for power in range(-48, 49)]
    fits = [fit for length in lengths if (fit := _fit(points, length))]
    best = min(fits, default=None)
    if best is None or min(best.error, line_error) <= 0:
        return None  # without any noise nothing tells which of the two fits better
    if count * math.log(line_error / best.error) - 2 < AIC_ADVANTAGE:
        return None
    # A likelihood-ratio region: curves whose error is not significantly larger than the best one's.
    likely = [fit for fit in fits if fit.error <= best.error * (1 + 2 * NORMAL**2 / (count - 3))]
    if best.limit <= goal:
        return Outlook(TrendVerdict.LEVELS_OFF)
    reaching = [_steps(fit, goal) for fit in likely if fit.limit > goal]
    most = max(reaching) if len(reaching) == len(likely) else None
    return Outlook(TrendVerdict.FORESEEABLE, None, min(reaching), _steps(best, goal), most)


def _fit(points: Sequence[TrendPoint], length: float) -> _SaturationFit | None:
    """The best curve of this length; None when it does not rise."""
    error, limit, height = _squares([(math.exp(-point.step / length), point.value) for point in points])
    return _SaturationFit(error, limit, -height, length) if height < 0 else None


def _steps(fit: _SaturationFit, goal: float) -> int:
    return max(0, math.ceil(fit.length * math.log(fit.height / (fit.limit - goal))))


def _squares(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares of y = base + slope·x: the sum of squared errors, base, slope."""
    x, y = statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)
    across = math.fsum((a - x) ** 2 for a, _ in pairs)
    slope = math.fsum((a - x) * (b - y) for a, b in pairs) / across if across else 0.0
    base = y - slope * x
    return math.fsum((b - base - slope * a) ** 2 for a, b in pairs), base, slope
