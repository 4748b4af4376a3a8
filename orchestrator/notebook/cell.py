"""The cell that shows a run: read the database, draw, replace what was drawn.

One output of the cell is replaced again and again (IPython's display_id), so a notebook keeps one picture, whatever the run lasts.
With ipywidgets the picture is a widget while the session lives, which front ends redraw without moving the page.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sqlalchemy.exc import SQLAlchemyError

from kgorch.cli.lookup import find_run, open_state
from kgorch.errors import KgorchError, StateUnusable
from kgorch.notebook import picture
from kgorch.report import metrics, run_view
from kgorch.system.file_lock import is_locked

INTERVAL_S = 2.0
CURVE_EVERY = 5
"""Looks between two reads of the curve: the state of a run is one row, its curve a file."""

UNREADABLE = (SQLAlchemyError, StateUnusable)


class Look(NamedTuple):
    """What one look at a run has found.

    Attributes:
        view: as `kgorch status --json` has it.
        title, points: of the curve that is drawn; no points without a metric.
    """

    view: dict[str, Any]
    title: str
    points: metrics.Series

    @property
    def is_training(self) -> bool:
        return bool((self.view["session"] or {}).get("training_alive"))


def _is_supervised_here(look: Look) -> bool:
    """Whether a supervisor on this machine holds the run's lock, which needs no database."""
    try:
        return is_locked(Path(look.view["folder"]).parent / "lock")
    except OSError:
        return True  # its disk is away, too


class PictureOutput(Protocol):
    """Where a picture is shown."""

    def show(self, svg: str) -> None:
        """Replace the picture."""

    def close(self, svg: str, text: str) -> None:
        """Leave the last picture, and the text for who cannot see it."""


class LiveCell:
    """A view of a run that is kept up to date in one cell."""

    def __init__(self, run: str, metric: str | None, interval_s: float, output: PictureOutput) -> None:
        self._run, self._metric, self._interval_s, self._output = run, metric, interval_s, output
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._curve: tuple[str, metrics.Series] = ("", [])

    def __repr__(self) -> str:
        return ""  # the last expression of a cell is displayed below the picture

    def follow(self) -> None:
        """Until the session is over, or `stop`, or the cell is interrupted."""
        look, shown, number = self._look(0), "", 0
        is_here = _is_supervised_here(look)
        with contextlib.suppress(KeyboardInterrupt):
            while look.is_training and not self._stopping.is_set():
                if (svg := picture.svg(look.view, look.title, look.points)) != shown:
                    self._output.show(svg)
                    shown = svg
                self._stopping.wait(self._interval_s)
                number += 1
                try:
                    look = self._look(number)
                except UNREADABLE:  # another process has it locked, its server is away: the next look comes
                    if is_here and not _is_supervised_here(look):
                        break
        if not self._stopping.is_set():
            with contextlib.suppress(*UNREADABLE):
                look = self._look(0)
        self._output.close(picture.svg(look.view, look.title, look.points), picture.text(look.view))

    def follow_in_background(self) -> None:
        self._thread = threading.Thread(target=self.follow, name="kgorch-cell", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the view; the last picture stays. The training goes on."""
        self._stopping.set()
        if self._thread:
            self._thread.join()

    def _look(self, number: int) -> Look:
        _, _, engine = open_state()
        try:
            run = find_run(engine, self._run)
            view = run_view.of_run(engine, run)
            if number % CURVE_EVERY == 0:
                self._curve = picture.curve_of(metrics.of_run(engine, run), view["stage"], self._metric)
            return Look(view, *self._curve)
        finally:
            engine.dispose()


def open_cell(run: str | None, metric: str | None, interval_s: float) -> LiveCell:
    """A cell for a run that exists. Raises: KgorchError outside a notebook; NotFound."""
    try:
        from IPython import get_ipython
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        raise KgorchError("there is no notebook to draw in", next_step="kgorch status --watch    (in a terminal)")
    _, _, engine = open_state()
    try:
        found = find_run(engine, run)
    finally:
        engine.dispose()
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    return LiveCell(
        f"{found.name}/{found.number}", metric, interval_s, _WidgetOutput() if has_widgets else _HtmlOutput()
    )


def _display(shown: Any, **options: Any) -> Any:
    """A new output of the cell; returns the handle that replaces it."""
    import IPython.display

    display: Any = IPython.display.display  # without types
    return display(shown, display_id=True, **options)


class _HtmlOutput:
    """One output of the cell, which is replaced."""

    def __init__(self) -> None:
        self._handle = _display({"text/html": ""}, raw=True)

    def show(self, svg: str) -> None:
        self._handle.update({"text/html": svg}, raw=True)

    def close(self, svg: str, text: str) -> None:
        # as an image, not as HTML: front ends show the images of a notebook that they do not trust, too
        self._handle.update({"image/svg+xml": svg, "text/plain": text}, raw=True)


class _WidgetOutput:
    def __init__(self) -> None:
        import ipywidgets

        self._widget: Any = ipywidgets.HTML()
        self._handle = _display(self._widget)

    def show(self, svg: str) -> None:
        self._widget.value = svg

    def close(self, svg: str, text: str) -> None:
        self._widget.close()
        self._handle.update({"image/svg+xml": svg, "text/plain": text}, raw=True)
