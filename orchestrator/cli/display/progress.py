"""The progress of a session in the foreground, in one of three modes.

`live` is a few lines of a terminal that are rewritten in place, one on a small terminal.
A notebook stores every byte that was ever written, and a log file or
a pipe has no place to rewrite: there `plain` prints a line a minute and one for each epoch, limited so that a session of 9 hours
adds less than 100 kB to a notebook; a line that is rewritten would add 45 MB (DECISIONS.md). `none` prints messages only.

A thread of its own writes, so that a terminal that is held with Ctrl-S, or a pipe that nobody reads, does not block the
supervisor.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from kgorch.cli.display import bars, render, telemetry_rows
from kgorch.cli.display.live_block import LiveBlock
from kgorch.core import text as texts
from kgorch.core.codes import Phase
from kgorch.core.metrics import metric_curve

if TYPE_CHECKING:
    from kgorch.db.rows import SessionInfo

MODES = ("auto", "live", "plain", "none")

NOTEBOOKS = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
"""Environment variables of what a notebook's kernel starts. There `!command` runs on a pty, so isatty is true."""

INTERVAL_S = 1.0
"""Between two updates of the live line."""

MIN_BLOCK_LINES, MIN_BLOCK_COLUMNS = 12, 60
"""A smaller terminal shows one line only: more would push the messages out of sight."""

MAX_GPUS = 2
"""That have a line of their own."""

FIRST_S = 10.0
"""From the start to the first plain line."""
MINUTE_S = 60.0
"""Between plain lines in the first HOUR_S."""
LATER_S = 120.0
"""Between plain lines after that."""
HOUR_S = 3600.0
MAX_EPOCH_LINES = 100
"""Epochs that have a plain line of their own."""

PLAIN_COLUMNS = 120
"""300 lines in 9 hours and MAX_EPOCH_LINES of epochs are 89 kB if every line is so long. A notebook that is run from its first to
its last cell (nbclient, Kaggle's "Save & Run All") stores each line as an output of its own, which takes another 100 bytes."""

JOIN_TIMEOUT_S = 5.0
"""The end of a session waits so long for a terminal that accepts no output."""

progress_option = click.option(
    "--progress",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="live: one line, rewritten in place; plain: a line a minute and an epoch; none: messages only; auto: live on a"
    " terminal, plain in notebooks and logs.",
)


def mode_of(option: str, stream: Any, environ: Mapping[str, str] = os.environ) -> str:
    """`live`, `plain` or `none`; `auto` is decided by the stream and the environment."""
    if option != "auto":
        return option
    in_notebook = any(environ.get(name) for name in NOTEBOOKS) or "inline" in environ.get("MPLBACKEND", "")
    is_dumb = environ.get("TERM", "dumb") in ("", "dumb")
    return "live" if render.is_terminal(stream) and not is_dumb and not in_notebook else "plain"


class Figures(NamedTuple):
    """The progress of a session. `left_s`: to its wall; None without one. `session_s`: its whole length; None without a wall."""

    stage: str
    phase: str
    epoch: int
    epochs_total: int
    step: int
    steps_total: int
    step_s: float
    metrics: Mapping[str, float | None]
    left_s: float | None
    session_s: float | None = None


def figures_of(row: SessionInfo, boottime_s: float) -> Figures:
    left_s = None if row.wall_boottime_s is None else row.wall_boottime_s - boottime_s
    session_s = None if row.wall_at is None else (row.wall_at - row.started_at).total_seconds()
    return Figures(
        stage=row.stage,
        phase=row.phase,
        epoch=row.epoch,
        epochs_total=row.epochs_total,
        step=row.step,
        steps_total=row.steps_total,
        step_s=row.step_s,
        metrics=row.metrics,
        left_s=left_s,
        session_s=session_s,
    )


def live_line(now: Figures, columns: int) -> str:
    """`train  22%  epoch 8/40  step 718/3200  loss 0.0031  train ends in 1m 47s  wall in 8h 12m`"""
    activity = _activity(now)
    percent = f"{100 * now.step // now.steps_total}%" if now.steps_total else ""
    return _joined([activity, percent, *_counts(now)], now.metrics, [_end(now), _wall(now)], columns)


class Trends:
    """The metrics of a session as they were displayed: enough for a sparkline, without reading any file."""

    MAX_NAMES, MAX_VALUES = 2, 240

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self._step = -1

    def add(self, now: Figures) -> None:
        """Note the metrics of a new step. Beyond MAX_VALUES every second value is dropped."""
        if now.step == self._step:
            return
        self._step = now.step
        for name, value in now.metrics.items():
            if value is None or not math.isfinite(value) or not self._is_shown(name):
                continue
            values = self.values.setdefault(name, [])
            values.append(value)
            if len(values) > self.MAX_VALUES:
                del values[::2]

    def _is_shown(self, name: str) -> bool:
        """The first metric, and the next of which one can see whether it goes well: not a learning rate."""
        if name in self.values or not self.values:
            return True
        return len(self.values) < self.MAX_NAMES and metric_curve.has_known_direction(name)


def live_block(now: Figures, trends: Trends, telemetry: Mapping[str, float], columns: int, lines: int) -> list[str]:
    """What `kgorch start` rewrites in place: bars of stage and session, trends, a line for each GPU, and the line with all figures.

    On a terminal that is low or narrow only that last line is shown, which then has the most important figures first.
    """
    line = live_line(now, columns)
    if lines < MIN_BLOCK_LINES or columns < MIN_BLOCK_COLUMNS:
        return [line]
    size = min(30, columns // 4)
    rows = []
    if now.steps_total:
        counts = "  ".join(part for part in (*_counts(now), _end(now)) if part)
        rows.append((now.stage or "progress", bars.bar(now.step / now.steps_total, size) + counts))
    if now.left_s is not None and now.session_s:
        rows.append(("session", bars.bar(1 - now.left_s / now.session_s, size) + _wall(now)))
    for name, values in trends.values.items():
        if shown := bars.trend(values, size):
            rows.append((name, f"{shown:<{size}}       {values[-1]:.4g}"))
    rows += [(label, text) for label, text in telemetry_rows.rows(telemetry) if label.startswith("gpu")][:MAX_GPUS]
    if not rows:
        return [line]
    labelled = [_padded(texts.cut(texts.in_one_line(label), render.INDENT - 1)) + text for label, text in rows]
    # Bars have the counts already; metrics, and what happens now, are left for the last line.
    last = _joined([_activity(now)], now.metrics, [], columns)
    return [texts.cut(texts.in_one_line(row), columns) for row in labelled] + [last]


def _padded(label: str) -> str:
    return label + " " * (render.INDENT - texts.width(label))


def _activity(now: Figures) -> str:
    return now.stage if now.phase in (Phase.TRAINING, Phase.SAVING) else f"{now.stage} {now.phase}".strip()


def _end(now: Figures) -> str:
    rest_s = (now.steps_total - now.step) * now.step_s if now.steps_total else 0.0
    return f"{now.stage} ends in {render.duration(rest_s)}" if rest_s > 0 else ""


def plain_line(now: Figures, clock: str) -> str:
    """`00:12:31  epoch 8/40  step 718/3200  loss 0.0031  accuracy 0.954  wall in 8h 12m`"""
    activity = "" if now.phase in (Phase.TRAINING, Phase.SAVING) else f"{now.stage} {now.phase}".strip()
    return _joined([clock, activity, *_counts(now)], now.metrics, [_wall(now)], PLAIN_COLUMNS)


def _counts(now: Figures) -> list[str]:
    epochs = f"epoch {now.epoch}/{now.epochs_total}" if now.epochs_total else ""
    steps = (
        f"step {now.step}" + (f"/{now.steps_total}" if now.steps_total else "") if now.step or now.steps_total else ""
    )
    return [epochs, steps]


def _wall(now: Figures) -> str:
    if now.left_s is None:
        return ""
    return f"wall in {render.duration(now.left_s)}" if now.left_s > 0 else "at the wall"


def _joined(head: list[str], metrics: Mapping[str, float | None], tail: list[str], columns: int) -> str:
    """One line of at most so many columns. Metrics are left out first, the last before the first: the time left matters more."""
    first, last = [part for part in head if part], [part for part in tail if part]
    fitting: list[str] = []
    for name, value in metrics.items():
        more = [*fitting, render.metric(name, value)]
        if texts.width("  ".join([*first, *more, *last])) > columns:
            break
        fitting = more
    return texts.cut(texts.in_one_line("  ".join([*first, *fitting, *last])), columns)


class Cadence:
    """Decides when a plain line is due: FIRST_S after the start, a minute after the line before, and at the end of an epoch.

    Only the first MAX_EPOCH_LINES epochs count, so that the number of lines grows with the length of the session alone.
    """

    def __init__(self, now_s: float) -> None:
        self._start_s, self._next_s = now_s, now_s + FIRST_S
        self._epoch: tuple[str, int] | None = None
        self._epochs = 0

    def is_due(self, now: Figures, now_s: float) -> bool:
        epoch, before = (now.stage, now.epoch), self._epoch
        self._epoch = epoch
        has_ended = before is not None and epoch != before and now.epoch > 0 and self._epochs < MAX_EPOCH_LINES
        self._epochs += has_ended
        if not has_ended and now_s < self._next_s:
            return False
        self._next_s = now_s + (MINUTE_S if now_s < self._start_s + HOUR_S else LATER_S)
        return True


class StderrAbove:
    """Replaces sys.stderr while a live line is on it: what others write appears above that line, in whole lines."""

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream, self._say, self._partial = stream, say, ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Printer:
    """Prints messages and the progress on stderr, in order, from a thread of its own.

    Args:
        figures: returns the current figures; None before the first. Called in the thread.
        telemetry: returns the newest telemetry (docs/json.md), for the GPU's line of a live display; called in the thread.
    """

    def __init__(
        self,
        mode: str,
        figures: Callable[[], Figures | None],
        telemetry: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._mode, self._figures, self._telemetry = mode, figures, telemetry
        self._queue: queue.SimpleQueue[str | Callable[[], str] | None] = queue.SimpleQueue()
        self._cadence = Cadence(time.monotonic())
        self._stream = sys.stderr
        self._live = LiveBlock(self._stream) if mode == "live" and self._stream is not None else None
        self._trends = Trends()
        self._drawn_s = 0.0
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Printer:
        if self._live:
            sys.stderr = StderrAbove(self._stream, self.say)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._live:
            sys.stderr = self._stream

    def say(self, text: str | Callable[[], str]) -> None:
        """Print a line that stays. A function is called in the thread, where it may block; it may return an empty text."""
        self._queue.put(text)

    def _run(self) -> None:
        # the terminal was closed, or the disk of the log is full: training must continue without messages
        with contextlib.suppress(OSError, ValueError):
            while True:
                try:
                    message = self._queue.get(timeout=INTERVAL_S)
                except queue.Empty:
                    self._draw()
                    continue
                if message is None:
                    break
                if text := message if isinstance(message, str) else message():
                    self._print(text)
                self._draw()
            if self._live:
                self._live.clear()

    def _print(self, text: str) -> None:
        if self._live:
            self._live.above(texts.printable(text))
        else:
            render.echo(text, err=True)

    def _draw(self) -> None:
        now_s, now = time.monotonic(), self._figures()
        if now is None or self._mode == "none":
            return
        if self._live and now_s >= self._drawn_s + INTERVAL_S:
            self._trends.add(now)
            columns, lines = self._live.size()
            telemetry = self._telemetry() if lines >= MIN_BLOCK_LINES else {}
            self._live.show(live_block(now, self._trends, telemetry, columns, lines))
            self._drawn_s = now_s
        elif not self._live and self._cadence.is_due(now, now_s):
            render.echo(plain_line(now, f"{datetime.now():%H:%M:%S}"), err=True)
