"""Fewer points of a long series that draw the same picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Point = tuple[float, float | None]
"""x and y; y is None for a value that is not a number, which interrupts the line."""


def thin_series(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points: of each stretch of x the first, the lowest, the highest and the last.

    A mean, or every n-th point, would hide the spike that the reader looks for. A line through these four covers the same pixels
    as the line through all of them (M4: Jugel et al., VLDB 2014). A point without a value stays if its stretch has room.

    Args:
        points: ordered by x.
        most: at least 4.
    """
    if len(points) <= most:
        return list(points)
    return [point for stretch in _stretches(points, max(1, most // 4)) for point in _four(stretch)]


def _stretches(points: Sequence[Point], count: int) -> Iterator[Sequence[Point]]:
    """The points cut into stretches of equal length in x; empty ones are left out."""
    first, last = points[0][0], points[-1][0]
    length = (last - first) / count
    if not math.isfinite(length) or length <= 0:  # all at one x
        yield points
        return
    begin, number = 0, 0
    for index, (x, _) in enumerate(points):
        here = min(count - 1, int((x - first) / length))
        if here != number:
            if index > begin:
                yield points[begin:index]
            begin, number = index, here
    yield points[begin:]


def _four(points: Sequence[Point]) -> list[Point]:
    known = [index for index, point in enumerate(points) if point[1] is not None]
    chosen = {0, len(points) - 1}
    if known:
        chosen |= {
            min(known, key=lambda index: points[index][1] or 0.0),
            max(known, key=lambda index: points[index][1] or 0.0),
        }
    return [points[index] for index in sorted(chosen)]


def smoothed(points: Sequence[Point], weight: float) -> list[Point]:
    """An exponential moving average with bias correction, as TensorBoard draws it.

    Args:
        weight: of the past, 0 to 0.999; 0 changes nothing.
    """
    if weight <= 0:
        return list(points)
    mean, known = 0.0, 0
    result: list[Point] = []
    for x, y in points:
        if y is None:
            result.append((x, y))
            continue
        mean, known = weight * mean + (1 - weight) * y, known + 1
        result.append((x, mean / (1 - weight**known)))
    return result
