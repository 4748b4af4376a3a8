"""`kgorch history --plot`: a metric, and the steps, over time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from orchestrator.errors import KgorchError, NotFound, nearest

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo


def draw(engine: Engine, run: RunInfo, metric: str) -> int:
    """Two pictures, one above the other. Raises: NotFound for a metric that was never reported; KgorchError without plotext."""
    from orchestrator.report import course

    found = course.of_run(engine, run)
    if metric not in found.metrics:
        known = sorted(found.metrics)
        raise NotFound(
            f"{run.name} has no metric {metric!r}{nearest(metric, known)}",
            f"reported were: {', '.join(known) or 'none'}",
        )
    try:
        import plotext
    except ImportError:
        raise KgorchError("drawing needs plotext", next_step="pip install 'kgorch[plot]'") from None
    for title, points in ((metric, found.metrics[metric]), ("steps", found.steps)):
        plotext.clear_figure()
        plotext.plot_size(min(plotext.terminal_width() or 100, 120), 16)
        plotext.theme("clear")
        plotext.title(title)
        plotext.xlabel("hours since the run began")
        plotext.plot([at_h for at_h, _ in points], [value for _, value in points], marker="braille")
        text = plotext.build()
        click.echo(text if sys.stdout.isatty() else plotext.uncolorize(text))
    return 0
