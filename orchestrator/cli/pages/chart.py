"""The geometry of charts, as numbers that a template writes into an SVG: no text here becomes markup.

Coordinates are those of the SVG's view box: x to the right, y down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kgorch.core.metrics.downsample import Point, thin_series

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 34
"""Margins around the plot: numbers of the y axis, numbers of the x axis."""

MAX_POINTS = 600
"""Of one line: about one for each column of the picture."""

LOG_RATIO = 1000
"""Positive values whose greatest is so many times the least are drawn on a logarithmic axis."""

MAX_MARKS = 60
"""Vertical lines; more would be a grey area."""


LIMIT = 1e300
"""Values are drawn up to this magnitude: the difference of two larger ones may be infinite."""

Position = tuple[float, float]


class Tick(NamedTuple):
    at: float
    text: str


class Coordinates(str):
    """`x,y x,y …`: digits made here, so that a page need not bound their length as it does a text's."""


class Line(NamedTuple):
    """A curve. `polylines`: each piece between gaps; `dots`: pieces of a single point."""

    label: str
    polylines: tuple[Coordinates, ...]
    dots: tuple[Position, ...]


class Chart(NamedTuple):
    """What an SVG of WIDTH × HEIGHT shows. `marks`: x of vertical lines, with their names."""

    title: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Tick, ...]
    is_log: bool
    gaps: int


def line_chart(
    title: str,
    curves: Mapping[str, Sequence[Point]],
    *,
    x_label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    """Curves over a common x axis; None if they have no finite value.

    Args:
        curves: points by the curve's label. None makes a gap.
        marks: x of vertical lines, and their names; those outside of the curves are left out.
    """
    pieces = {label: list(_segments(thin_series(points, MAX_POINTS))) for label, points in curves.items()}
    drawn = [point for parts in pieces.values() for part in parts for point in part]
    if not drawn:
        return None
    x_scale = Scale(min(x for x, _ in drawn), max(x for x, _ in drawn), LEFT, WIDTH - RIGHT)
    low, high = min(y for _, y in drawn), max(y for _, y in drawn)
    y_scale = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log=low > 0 and high / low > LOG_RATIO)
    lines = [
        Line(
            label,
            tuple(_coordinates(part, x_scale, y_scale) for part in parts if len(part) > 1),
            tuple((round(x_scale(part[0][0]), 1), round(y_scale(part[0][1]), 1)) for part in parts if len(part) == 1),
        )
        for label, parts in pieces.items()
    ]
    inside = [Tick(round(x_scale(x), 1), name) for x, name in marks if x_scale.low < x < x_scale.high]
    gaps = sum(y is None for points in curves.values() for _, y in points)
    shown = tuple(inside[-MAX_MARKS:])
    return Chart(title, x_label, tuple(lines), x_scale.ticks(6), y_scale.ticks(5), shown, y_scale.is_log, gaps)


def _segments(points: Sequence[Point]) -> Iterator[list[Position]]:
    """The pieces between gaps, values bounded by LIMIT."""
    piece: list[Position] = []
    for x, y in points:
        if y is not None and math.isfinite(x) and math.isfinite(y):
            piece.append((max(-LIMIT, min(x, LIMIT)), max(-LIMIT, min(y, LIMIT))))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _coordinates(points: Sequence[Position], x_scale: Scale, y_scale: Scale) -> Coordinates:
    return Coordinates(" ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points))


class Scale:
    """Maps values to coordinates.

    Args:
        low, high: of the values; equal ones are moved apart.
        start, end: the coordinates of `low` and `high`.
    """

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool = False) -> None:
        self.is_log = is_log
        if not low < high:
            low, high = low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        share = (self._flat(value) - self._flat(self.low)) / (self._flat(self.high) - self._flat(self.low))
        return self._start + share * (self._end - self._start)

    def _flat(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def ticks(self, count: int) -> tuple[Tick, ...]:
        """About so many round values within the range."""
        values = _powers(self.low, self.high) if self.is_log else _round_values(self.low, self.high, count)
        return tuple(Tick(round(self(value), 1), number(value)) for value in values)


def _powers(low: float, high: float) -> list[float]:
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**exponent for exponent in exponents[:: max(len(exponents) - 1, 0) // 6 + 1]]


def _round_values(low: float, high: float, count: int) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), rough)
    first = math.ceil(low / step) if step > 0 else 0
    for index in range(2 * count + 2):
        value = (first + index) * step
        if value > high or not step > 0:
            return
        yield value


def number(value: float) -> str:
    """`12k`, `0.004`, `3e+09`: short enough for an axis."""
    if 10_000 <= abs(value) < 1e9:
        unit, name = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / unit:.4g}{name}"
    return f"{value:.4g}".replace("-0", "0", 1) if value == 0 else f"{value:.4g}"


ROW, BAR = 22, 12
"""Height of a session's row in a timeline, and of its bar (charts.html)."""

LABELS = 120
"""Width of the names of the rows."""


class Bar(NamedTuple):
    """A stretch of a row. `kind`: its class in the style sheet."""

    x: float
    width: float
    kind: str
    title: str


class Row(NamedTuple):
    """A session: its bars, and marks as x, kind and name."""

    y: float
    label: str
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]


class Timeline(NamedTuple):
    height: int
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]


class Stretch(NamedTuple):
    """Part of a session, in hours since its start; `end_h` equal to `start_h` for a mark."""

    start_h: float
    end_h: float
    kind: str
    title: str


def timeline(sessions: Sequence[tuple[str, Sequence[Stretch]]]) -> Timeline | None:
    """One row a session, each from its own start on: pauses between sessions, and a clock that was set back, take no room.

    Args:
        sessions: label and stretches of each. Hours below 0, or an end before its start, count as 0.
    """
    longest = max((part.end_h for _, parts in sessions for part in parts if math.isfinite(part.end_h)), default=0.0)
    if longest <= 0:
        return None
    scale = Scale(0.0, longest, LABELS, WIDTH - RIGHT)

    def placed(part: Stretch) -> Bar:
        start = max(0.0, min(part.start_h, longest))
        end = max(start, min(part.end_h, longest))
        return Bar(round(scale(start), 1), round(scale(end) - scale(start), 1), part.kind, part.title)

    rows = tuple(
        Row(
            index * ROW,
            label,
            tuple(placed(part) for part in parts if part.end_h > part.start_h),
            tuple(placed(part) for part in parts if part.end_h <= part.start_h),
        )
        for index, (label, parts) in enumerate(sessions)
    )
    return Timeline(len(rows) * ROW + BOTTOM, rows, _hour_ticks(scale))


def _hour_ticks(scale: Scale) -> tuple[Tick, ...]:
    """In hours, minutes or seconds, whichever suits the longest session."""
    unit_h, name = next(((h, name) for h, name in ((1.0, "h"), (1 / 60, "min")) if scale.high > 2 * h), (1 / 3600, "s"))
    values = _round_values(0.0, scale.high / unit_h, 6)
    return tuple(Tick(round(scale(value * unit_h), 1), f"{value:g} {name}") for value in values)
