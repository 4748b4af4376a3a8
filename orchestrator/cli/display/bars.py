"""Bars and sparklines as characters: whole lines of text, which tests compare."""

from __future__ import annotations

from collections.abc import Sequence

from kgorch.core.health.bottlenecks import sparkline

FULL, EMPTY = "━", "─"

MIN_COLUMNS = 6
"""A bar with fewer columns is left out: it would show nothing."""


def bar(share: float, columns: int) -> str:
    """`━━━━━━────── 48%  `; empty on a terminal that has no room for it. `columns`: of the bar without its percentage."""
    if columns < MIN_COLUMNS:
        return ""
    share = min(max(share, 0.0), 1.0)
    full = int(share * columns)
    return f"{FULL * full}{EMPTY * (columns - full)} {100 * share:3.0f}%  "


def trend(values: Sequence[float], columns: int) -> str:
    """How a metric went, lowest to highest value; empty without two values, or without room."""
    if columns < MIN_COLUMNS or len(values) < 2:
        return ""
    # Half of each value, so that the difference of the largest floats is finite.
    low, high = min(values) / 2, max(values) / 2
    if not high > low:
        return sparkline([0.5] * min(len(values), columns), top=1.0, width=columns)
    return sparkline([value / 2 - low for value in values], top=high - low, width=columns)
