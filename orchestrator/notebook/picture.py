"""A run as one small SVG: its state in words, a bar each for stage and session, and the curve of a metric.

SVG alone, because it is markup in a live cell and an image in a stored notebook, and needs no library. Everything that is text was
written by a training or a stranger's database: it is escaped, cut, and without what XML does not allow.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from kgorch.cli.display import render, status_rows
from kgorch.core import text as texts
from kgorch.report.metrics import RunMetrics, Series

View = dict[str, Any]

WIDTH, MARGIN, LINE = 640, 12, 20
BAR_HEIGHT, CURVE_HEIGHT = 10, 120
MAX_POINTS = 160
"""Of the curve: some 7 kB, and more than a picture of this width can show."""
MAX_LETTERS = 92
"""Of a line of text."""

INK, FAINT, RUN_COLOUR, SESSION_COLOUR = "#1f2328", "#d0d7de", "#1a7f5a", "#0969da"

LABELS = ("phase", "failed", "metrics", "end", "next", "notice", "checkpoint")
"""Lines of `kgorch status` that are shown below the bars, at most MAX_LINES of them."""
MAX_LINES = 6


def svg(view: View, title: str, points: Series) -> str:
    """The picture.

    Args:
        view: as `kgorch status --json` has it.
        title, points: of the curve; none is drawn without points.
    """
    parts, y = [], MARGIN + 14
    parts.append(
        _text(MARGIN, y, f"{view['run']} · {view['stage'] or 'not begun'} · {render.words(view['phase'])}", bold=True)
    )
    for share, colour, label in _bars(view):
        y += LINE
        parts.append(_text(MARGIN, y, label))
        y += 8
        parts += _bar(y, share, colour)
        y += BAR_HEIGHT
    for label, value in _lines(view):
        y += LINE
        parts.append(_text(MARGIN, y, f"{label}  {value}"))
    if len(points) > 1:
        y += LINE
        parts += _curve(y, title, points)
        y += CURVE_HEIGHT
    height = y + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13"><title>{_escaped(text(view))}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    )
    return head + "".join(parts) + "</svg>"


def text(view: View) -> str:
    """The state in one line, for who cannot see the picture."""
    total = f" of {view['steps_total']}" if view["steps_total"] else ""
    line = f"{view['run']}: {render.words(view['phase'])}, {view['stage']} step {view['step']}{total}"
    return texts.in_one_line(line + (f", {render.metrics(view['metrics'])}" if view["metrics"] else ""))


def curve_of(curve: RunMetrics, stage: str, metric: str | None) -> tuple[str, Series]:
    """Title and points of the curve to draw: of the stage if it has one, else of the last that does.

    Args:
        metric: asked for; None for the plan's `keep.best` or `forecast.target`, else the first that was reported.
    """
    wanted = [metric] if metric else [*curve.modes, *curve.names]
    for of in [*([stage] if stage in curve.stages else []), *reversed(list(curve.stages))]:
        for name in wanted:
            if points := curve.series(of, name, "step"):
                return f"{name} ({of})", thinned(points, MAX_POINTS)
    return "", []


def thinned(points: Series, most: int) -> Series:
    """At most so many points, in order: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return points
    size = -(-len(points) // (most // 2))
    result: Series = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        ends = {min(range(len(part)), key=lambda at: part[at][1]), max(range(len(part)), key=lambda at: part[at][1])}
        result += [part[at] for at in sorted(ends)]
    return result


def _bars(view: View) -> Iterator[tuple[float, str, str]]:
    """Share from 0 to 1, colour and words of each bar."""
    words = dict(status_rows.rows(view))
    if view["steps_total"]:
        yield view["step"] / view["steps_total"], RUN_COLOUR, f"step {words.get('step', view['step'])}"
    session = view["session"]
    if session and session["wall_at"] and session["left_s"] is not None:
        began, wall = (datetime.fromisoformat(session[name]) for name in ("started_at", "wall_at"))
        whole_s = (wall - began).total_seconds()
        share = 1 - session["left_s"] / whole_s if whole_s > 0 else 1.0
        left = render.duration(session["left_s"])
        yield share, SESSION_COLOUR, f"session {session['number']}, {left} to its time limit"


def _lines(view: View) -> list[tuple[str, str]]:
    rows = [(label, value) for label, value in status_rows.rows(view) if label in LABELS and value]
    return sorted(rows, key=lambda row: LABELS.index(row[0]))[:MAX_LINES]


def _text(x: int, y: int, line: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{INK}"{weight}>{_escaped(line)}</text>'


def _bar(y: int, share: float, colour: str) -> list[str]:
    whole = WIDTH - 2 * MARGIN
    done = round(whole * min(max(share, 0.0), 1.0), 1)
    return [
        f'<rect x="{MARGIN}" y="{y}" width="{width}" height="{BAR_HEIGHT}" rx="3" fill="{fill}"/>'
        for width, fill in ((whole, FAINT), (done, colour))
    ]


def _curve(y: int, title: str, points: Series) -> list[str]:
    (low_x, high_x), (low_y, high_y) = _bounds([x for x, _ in points]), _bounds([value for _, value in points])
    whole = WIDTH - 2 * MARGIN
    dots = " ".join(
        f"{MARGIN + whole * _share(x, low_x, high_x):.1f},{y + CURVE_HEIGHT * (1 - _share(value, low_y, high_y)):.1f}"
        for x, value in points
    )
    last = f"{title}  last {points[-1][1]:.4g}, between {low_y:.4g} and {high_y:.4g}"
    return [
        f'<path d="M{MARGIN} {y}V{y + CURVE_HEIGHT}H{WIDTH - MARGIN}" fill="none" stroke="{FAINT}"/>',
        f'<polyline points="{dots}" fill="none" stroke="{RUN_COLOUR}" stroke-width="1.5"/>',
        _text(MARGIN + 6, y + 12, last),
    ]


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two. By halves: the difference of two finite numbers may be infinite."""
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest, with room between them where all are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _escaped(line: str) -> str:
    """One line of bounded length as text of XML. No character is left that XML does not allow or that turns the line around."""
    return html.escape(texts.cut(texts.in_one_line(line), MAX_LETTERS))
