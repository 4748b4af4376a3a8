"""Curves drawn with letters, for `kgorch metrics --plot` and `kgorch history --plot`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from orchestrator.cli import render
from orchestrator.errors import KgorchError, NotFound, nearest

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo
    from orchestrator.report.metrics import Curve, Series

LABELS = {"step": "step", "epoch": "epoch", "hours": "hours since the run began"}
MOST_POINTS = 2000
"""Of one picture: more would not show."""


def draw_of_run(engine: Engine, run: RunInfo, metric: str, axis: str) -> int:
    """A metric; over hours, the steps below it. Raises: NotFound for a metric that was never reported."""
    from orchestrator.report import metrics

    found = metrics.of_run(engine, run)
    if metric not in found.names:
        raise NotFound(
            f"{run.name} has no metric {metric!r}{nearest(metric, found.names)}",
            f"reported were: {', '.join(found.names) or 'none'}",
        )
    draw(found.only(names=[metric]), axis)
    if axis == "hours":
        _picture("steps", found.steps(), LABELS[axis])
    return 0


def draw(found: Curve, axis: str) -> None:
    """One picture a stage and metric. Raises: KgorchError without plotext, or where there is nothing to draw."""
    several = len(found.stages) > 1
    drawn = 0
    for stage in found.stages:
        for name in found.only(stage=stage).names:
            if points := found.series(stage, name, axis):
                _picture(f"{stage}: {name}" if several else name, points, LABELS[axis])
                drawn += 1
    if not drawn:
        raise KgorchError("there is nothing to draw: no number was reported yet", next_step="kgorch status")


def _picture(title: str, points: Series, label: str) -> None:
    try:
        import plotext
    except ImportError:
        raise KgorchError("drawing needs plotext", next_step="pip install 'kgorch[plot]'") from None
    shown = points[:: len(points) // MOST_POINTS + 1]
    plotext.clear_figure()
    plotext.plot_size(min(plotext.terminal_width() or 100, 120), 16)
    plotext.theme("clear")
    plotext.title(render.printable(title))
    plotext.xlabel(label)
    plotext.plot([x for x, _ in shown], [y for _, y in shown], marker="braille")
    text = plotext.build()
    render.echo(text if render.is_terminal(sys.stdout) else plotext.uncolorize(text), colours=True)
