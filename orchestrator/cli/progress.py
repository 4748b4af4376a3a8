"""What a session in the foreground says while it runs: how far it is, and what has happened to it.

`live` is one line of a terminal, rewritten in place. A notebook keeps every byte that was ever written, and a log file or a pipe
has no place to rewrite: there `plain` gives a line a minute and one for each epoch, bounded so that a session of 9 hours adds less
than 100 kB to a notebook. `none` tells only what happens.

A thread of its own writes: a terminal that is held with Ctrl-S, or a pipe that nobody reads, does not hold up the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from orchestrator.cli import render
from orchestrator.core import text as texts
from orchestrator.core.codes import Phase

if TYPE_CHECKING:
    from db.records import SessionInfo

MODES = ("auto", "live", "plain", "none")

NOTEBOOKS = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")
"""Variables of whatever a notebook's kernel starts. `!command` runs on a pty there, so that isatty says nothing."""

LOOK_S = 1.0
"""How often the live line is written anew at the most."""

FIRST_S, MINUTE_S, LATER_S, EPOCHS = 10.0, 60.0, 120.0, 100
"""A plain line comes this soon after the beginning, then every minute, and after HOUR_S every two; the first so many epochs have
one of their own."""

HOUR_S = 3600.0
PLAIN_COLUMNS = 120
"""300 lines in 9 hours and EPOCHS of epochs: 89 kB, were every line so long. A notebook that is run from its first to its last cell
(nbclient, Kaggle's "Save & Run All") keeps each line as an output of its own, which takes another 100 bytes."""

END_S = 5.0
"""How long the end of a session waits for a terminal that takes nothing."""

progress_option = click.option(
    "--progress",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="One line rewritten in place (live), a line a minute and an epoch (plain), or none; auto: live on a terminal,"
    " plain in notebooks and logs.",
)


def mode_of(told: str, stream: Any, environ: Mapping[str, str] = os.environ) -> str:
    """`live`, `plain` or `none`, where a person leaves it to us."""
    if told != "auto":
        return told
    in_notebook = any(environ.get(name) for name in NOTEBOOKS) or "inline" in environ.get("MPLBACKEND", "")
    is_dumb = environ.get("TERM", "dumb") in ("", "dumb")
    return "live" if render.is_terminal(stream) and not is_dumb and not in_notebook else "plain"


class Figures(NamedTuple):
    """How far a session is. `left_s`: to its wall; None without one."""

    stage: str
    phase: str
    epoch: int
    epochs_total: int
    step: int
    steps_total: int
    step_s: float
    metrics: Mapping[str, float | None]
    left_s: float | None


def figures_of(row: SessionInfo, boottime_s: float) -> Figures:
    left_s = None if row.boot_wall_s is None else row.boot_wall_s - boottime_s
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
    )


def live_line(now: Figures, columns: int) -> str:
    """`train  22%  epoch 8/40  step 718/3200  loss 0.0031  train ends in 1m 47s  wall in 8h 12m`"""
    doing = now.stage if now.phase in (Phase.TRAINING, Phase.SAVING) else f"{now.stage} {now.phase}".strip()
    percent = f"{100 * now.step // now.steps_total}%" if now.steps_total else ""
    to_go_s = (now.steps_total - now.step) * now.step_s if now.steps_total else 0.0
    ends = f"{now.stage} ends in {render.duration(to_go_s)}" if to_go_s > 0 else ""
    return _joined([doing, percent, *_counts(now)], now.metrics, [ends, _wall(now)], columns)


def plain_line(now: Figures, clock: str) -> str:
    """`00:12:31  epoch 8/40  step 718/3200  loss 0.0031  accuracy 0.954  wall in 8h 12m`"""
    doing = "" if now.phase in (Phase.TRAINING, Phase.SAVING) else f"{now.stage} {now.phase}".strip()
    return _joined([clock, doing, *_counts(now)], now.metrics, [_wall(now)], PLAIN_COLUMNS)


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
    """Metrics give way first, the last of them before the first: where the end is near matters more."""
    first, last = [part for part in head if part], [part for part in tail if part]
    shown: list[str] = []
    for name, value in metrics.items():
        more = [*shown, render.metric(name, value)]
        if texts.width("  ".join([*first, *more, *last])) > columns:
            break
        shown = more
    return texts.cut(texts.in_one_line("  ".join([*first, *shown, *last])), columns)


class Cadence:
    """When a plain line is due: soon after the beginning, a minute after the one before, and at an epoch's end, which after
    EPOCHS of them is no reason any more. So the lines of a session grow with its length alone."""

    def __init__(self, now_s: float) -> None:
        self._began_s, self._next_s = now_s, now_s + FIRST_S
        self._epoch: tuple[str, int] | None = None
        self._epochs = 0

    def is_due(self, now: Figures, now_s: float) -> bool:
        epoch, before = (now.stage, now.epoch), self._epoch
        self._epoch = epoch
        has_ended = before is not None and epoch != before and now.epoch > 0 and self._epochs < EPOCHS
        self._epochs += has_ended
        if not has_ended and now_s < self._next_s:
            return False
        self._next_s = now_s + (MINUTE_S if now_s < self._began_s + HOUR_S else LATER_S)
        return True


class LiveLine:
    """One row of a terminal. It ends a column before the edge, for some terminals wrap a row that is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, ""

    def columns(self) -> int:
        return max(render.terminal_width(self._stream) - 1, 20)

    def show(self, line: str) -> None:
        if line != self._shown:
            self._write(f"\r\x1b[2K{line}")
            self._shown = line

    def above(self, text: str) -> None:
        """Lines that stay, and the row below them again."""
        self._write(f"\r\x1b[2K{text}\n{self._shown}")

    def clear(self) -> None:
        if self._shown:
            self._write("\r\x1b[2K")
            self._shown = ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class _Above:
    """In the place of sys.stderr while a live line stands on it: what others write comes above that line, in whole lines."""

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream, self._say, self._begun = stream, say, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._say(line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Printer:
    """Writes what a session says on stderr, in order, from a thread of its own.

    Args:
        look: the figures of now; None while nothing is known. Called from the thread.
    """

    def __init__(self, mode: str, look: Callable[[], Figures | None]) -> None:
        self._mode, self._look = mode, look
        self._queue: queue.SimpleQueue[str | Callable[[], str] | None] = queue.SimpleQueue()
        self._cadence = Cadence(time.monotonic())
        self._stream = sys.stderr
        self._live = LiveLine(self._stream) if mode == "live" and self._stream is not None else None
        self._drawn_s = 0.0
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Printer:
        if self._live:
            sys.stderr = _Above(self._stream, self.say)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join(END_S)
        if self._live:
            sys.stderr = self._stream

    def say(self, text: str | Callable[[], str]) -> None:
        """A line that stays; a function is called in the thread, where it may take its time, and may come to nothing."""
        self._queue.put(text)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or the disk full; the training is not
            while True:
                try:
                    said = self._queue.get(timeout=LOOK_S)
                except queue.Empty:
                    self._draw()
                    continue
                if said is None:
                    break
                if text := said if isinstance(said, str) else said():
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
        now_s, now = time.monotonic(), self._look()
        if now is None or self._mode == "none":
            return
        if self._live and now_s >= self._drawn_s + LOOK_S:
            self._live.show(live_line(now, self._live.columns()))
            self._drawn_s = now_s
        elif not self._live and self._cadence.is_due(now, now_s):
            render.echo(plain_line(now, f"{datetime.now():%H:%M:%S}"), err=True)
