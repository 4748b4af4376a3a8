"""Fewer points of a curve for a picture: what a reader would see stays, whatever the number of points.

Each interval of the x axis keeps its first, lowest, highest and last value, so that a single peak among ten million points is
still drawn. A mean would hide it, and every n-th point may miss it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[float, float]

LIMIT = 1e300
"""Values are drawn up to this magnitude: the difference of two larger ones may be infinite."""


def decimate(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points, in their order. Points whose value is not finite stay as they are: they are gaps.

    Args:
        most: at least 4.
    """
    if len(points) <= most:
        return list(points)
    count = max(most // 4, 1)
    kept: list[Point] = []
    for number in range(count):
        part = points[number * len(points) // count : (number + 1) * len(points) // count]
        kept += _extremes(part)
    return kept


def _extremes(part: Sequence[Point]) -> list[Point]:
    """First, lowest, highest and last, in their order; a gap in place of an interval without any finite value."""
    indices = [index for index, (_, value) in enumerate(part) if math.isfinite(value)]
    if not indices:
        return list(part[:1])
    lowest = min(indices, key=lambda index: part[index][1])
    highest = max(indices, key=lambda index: part[index][1])
    return [part[index] for index in sorted({indices[0], lowest, highest, indices[-1]})]


def segments(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The pieces between gaps, values bounded by LIMIT."""
    piece: list[Point] = []
    for x, value in points:
        if math.isfinite(value) and math.isfinite(x):
            piece.append((max(-LIMIT, min(x, LIMIT)), max(-LIMIT, min(value, LIMIT))))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece
