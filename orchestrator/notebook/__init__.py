"""A run in the cell of a notebook: bars, a curve, and a small picture that stays (docs/notebooks.md).

    from kgorch import notebook
    notebook.start("plan.toml")

Needs IPython; uses ipywidgets where it is installed. May import api, report, core, system, errors and how the command line words a
view.
"""

from __future__ import annotations

import os
from typing import Any

from kgorch import api
from kgorch.notebook.cell import INTERVAL_S, LiveCell, open_cell


def start(
    plan: str | os.PathLike[str] = "plan.toml", *, metric: str | None = None, block: bool = True, **options: Any
) -> LiveCell:
    """Start or continue the run of a plan in the background, and watch it here.

    Args:
        metric, block: as for `watch`.
        options: those of `kgorch.start`.
    Raises: KgorchError, with what `kgorch start` says.
    """
    started = api.start(plan, **options)
    return watch(f"{started.run}/{started.run_number}", metric=metric, block=block)


def watch(
    run: str | None = None, *, metric: str | None = None, interval_s: float = INTERVAL_S, block: bool = True
) -> LiveCell:
    """Show a run in this cell until its session is over. Interrupting the cell ends the view, not the training.

    Args:
        run: its name, or NAME/NUMBER; the newest run where it is left out.
        metric: whose curve is drawn; by default the one of the plan's `keep.best` or `forecast.target`, else the first reported.
        interval_s: seconds between two looks.
        block: False returns at once and goes on in a thread, so that other cells can run. In a notebook that runs unattended
            the session of the platform ends with the last cell, and with it the training: block there.
    Returns: the cell; `stop()` ends the view.
    Raises: KgorchError outside a notebook; NotFound.
    """
    cell = open_cell(run, metric, interval_s)
    if block:
        cell.follow()
    else:
        cell.follow_in_background()
    return cell


__all__ = ["LiveCell", "start", "watch"]
