"""Plots in a terminal, for `kgorch metrics --plot` and `kgorch history --plot`."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from kgorch.cli.display import render
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo
    from kgorch.report.metrics import RunMetrics, Series

LABELS = {"step": "step", "epoch": "epoch", "hours": "hours since the run started"}
MAX_POINTS = 2000
"""Of one plot: a terminal has fewer columns, and plotext takes seconds for a long curve."""

UNSCALED = 1e-6, 1e9
"""Curves whose largest value lies outside are drawn in powers of ten: plotext writes all digits, and overflows near the ends of
what floats can be."""


def draw_of_run(engine: Engine, run: RunInfo, metric: str, axis: str) -> int:
    """Plot a metric; over hours, the steps below it. Raises: NotFound for a metric that was never reported."""
    from kgorch.report import metrics

    curve = metrics.of_run(engine, run)
    draw(metrics.select(run, curve, [metric]), axis)
    if axis == "hours":
        _plot("steps", curve.steps(), LABELS[axis])
    return 0


def draw(curve: RunMetrics, axis: str) -> None:
    """One plot a stage and metric. Raises: KgorchError without plotext, or without any values."""
    count = 0
    for stage in curve.stages:
        for name in curve.only(stage=stage).names:
            if points := curve.series(stage, name, axis):
                _plot(f"{stage}: {name}" if len(curve.stages) > 1 else name, points, LABELS[axis])
                count += 1
    if not count:
        raise KgorchError(
            "there is nothing to plot: no metric was reported yet", next_step="kgorch status", error_code="KG109"
        )


def _plot(title: str, points: Series, label: str) -> None:
    try:  # an extra of the package: most users never plot
        import plotext
    except ImportError:
        raise KgorchError(
            "--plot needs the package plotext", next_step="pip install 'kgorch[plot]'", error_code="KG902"
        ) from None
    sample = points[:: len(points) // MAX_POINTS + 1]
    largest = max((abs(y) for _, y in sample), default=0.0)
    is_scaled = largest > 0 and not UNSCALED[0] <= largest < UNSCALED[1]
    power = max(-300, math.floor(math.log10(largest))) if is_scaled else 0
    plotext.clear_figure()
    plotext.plot_size(min(plotext.terminal_width() or 100, 120), 16)
    plotext.theme("clear")
    plotext.title(render.printable(title) + (f", in 1e{power}" if power else ""))
    plotext.xlabel(label)
    plotext.plot([x for x, _ in sample], [y / 10.0**power for _, y in sample], marker="braille")
    text = plotext.build()
    render.echo(text if render.is_terminal(sys.stdout) else plotext.uncolorize(text), colours=True)
