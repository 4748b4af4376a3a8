"""`kgorch status --watch`: a run on the whole screen. On a small terminal the most important lines are shown."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from kgorch.cli.display import render
from kgorch.cli.display.progress import FIRST_S, Cadence, Figures, mode_of, plain_line
from kgorch.core import text as texts

INTERVAL_S = 1.0
"""Between two reads of the database."""
BAR_COLUMNS, MIN_BAR_COLUMNS = 30, 6
"""A bar with fewer columns is left out: it would show nothing."""

FULL, EMPTY = "━", "─"

PRIORITY = ("run", "phase", "failed", "progress", "session", "metrics", "end", "next", "notice", "checkpoint", "target")
"""Labels by importance. On a small terminal other lines are left out first, the lowest before the others."""

View = dict[str, Any]
Rows = list[tuple[str, str]]


class ScreenLine(NamedTuple):
    """A line of the screen: label, an optional bar, text."""

    label: str
    bar: str
    text: str


def watch(read: Callable[[], View], rows_of: Callable[[View], Rows]) -> int:
    """Show a run until its session is over or Ctrl-C; the last state stays on the terminal.

    Args:
        read: the view of the run (report/run_view.py) as of now.
        rows_of: its lines, as `kgorch status` prints them.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if mode_of("auto", sys.stdout) == "live":
            _full_screen(read, rows_of)
        else:
            _plain_lines(read)
    render.labelled(rows_of(read()))
    return 0


def _is_training(view: View) -> bool:
    return bool((view["session"] or {}).get("training_alive"))


def _full_screen(read: Callable[[], View], rows_of: Callable[[View], Rows]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with _resize_signals_held(), Live(console=console, screen=True, auto_refresh=False) as live:
        while _is_training(view := read()):
            until_s = time.monotonic() + INTERVAL_S
            while time.monotonic() < until_s:
                size = console.size
                lines = frame(view, rows_of(view), size.width, size.height)
                live.update(Text("\n").join(_styled(line) for line in lines), refresh=True)
                if not signal.sigtimedwait({signal.SIGWINCH}, max(until_s - time.monotonic(), 0.0)):
                    break


def _styled(line: ScreenLine) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{line.label:<{render.INDENT}}", style="bold")
    text.append(line.bar, style="green")
    text.append(line.text)
    return text


@contextlib.contextmanager
def _resize_signals_held() -> Iterator[None]:
    """A change of the terminal's size waits for sigtimedwait: a handler could interrupt the very code that it wakes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _plain_lines(read: Callable[[], View]) -> None:
    """For a notebook, a pipe or a log: a line a minute and an epoch, as `kgorch start` prints them."""
    cadence = Cadence(time.monotonic() - FIRST_S)
    while _is_training(view := read()):
        now = _figures(view)
        if cadence.is_due(now, time.monotonic()):
            render.echo(plain_line(now, f"{datetime.now():%H:%M:%S}"))
        time.sleep(INTERVAL_S)


def _figures(view: View) -> Figures:
    return Figures(
        stage=view["stage"],
        phase=view["phase"],
        epoch=view["epoch"],
        epochs_total=view["epochs_total"] or 0,
        step=view["step"],
        steps_total=view["steps_total"] or 0,
        step_s=view["step_s"] or 0.0,
        metrics=view["metrics"],
        left_s=view["session"]["left_s"],
    )


def frame(view: View, rows: Rows, columns: int, lines: int) -> list[ScreenLine]:
    """The lines that fit on a screen of this size, in the order of `kgorch status`.

    Args:
        rows: labels and values of `kgorch status`; its steps and its session get a bar.
    """
    every = [_with_bar(view, label, value, columns) for label, value in rows]
    by_priority = sorted(range(len(every)), key=lambda index: _priority(every[index].label, index))
    indices = sorted(by_priority[: max(lines, 1)])
    spare = lines - len(indices)
    screen: list[ScreenLine] = []
    for index in indices:
        wrapped = _wrap(every[index], columns)
        fitting = wrapped if len(wrapped) - 1 <= spare else [_cut(every[index], columns)]
        spare -= len(fitting) - 1
        screen += fitting
    return screen


def _priority(label: str, index: int) -> tuple[int, int]:
    return (PRIORITY.index(label) if label in PRIORITY else len(PRIORITY), index)


def _with_bar(view: View, label: str, value: str, columns: int) -> ScreenLine:
    size = min(BAR_COLUMNS, (columns - render.INDENT) // 3)
    if label == "step" and view["steps_total"]:
        return ScreenLine("progress", _bar(view["step"] / view["steps_total"], size), value)
    session = view["session"]
    if label == "session" and session and session["wall_at"] and session["left_s"] is not None:
        start, wall = (datetime.fromisoformat(session[name]) for name in ("started_at", "wall_at"))
        whole_s = (wall - start).total_seconds()
        share = 1 - session["left_s"] / whole_s if whole_s > 0 else 1.0
        return ScreenLine("session", _bar(share, size), _time_left(session))
    return ScreenLine(label, "", value)


def _time_left(session: View) -> str:
    """The most important part first: a small terminal cuts the rest."""
    time_left = f"wall in {render.duration(session['left_s'])}" if session["left_s"] > 0 else "at its wall"
    lead = f"last save starts {render.duration(session['save_lead_s'])} before"
    return f"{time_left} ({lead}), number {session['number']}, since {render.clock(session['started_at'])}"


def _bar(share: float, size: int) -> str:
    """`━━━━━━────── 48%  `; empty on a terminal that has no room for it."""
    if size < MIN_BAR_COLUMNS:
        return ""
    share = min(max(share, 0.0), 1.0)
    full = int(share * size)
    return f"{FULL * full}{EMPTY * (size - full)} {100 * share:3.0f}%  "


def _cut(line: ScreenLine, columns: int) -> ScreenLine:
    text = texts.in_one_line(line.text)
    return line._replace(text=texts.cut(text, columns - render.INDENT - texts.width(line.bar)))


def _wrap(line: ScreenLine, columns: int) -> list[ScreenLine]:
    room = columns - render.INDENT - texts.width(line.bar)
    if room < render.INDENT:
        return [_cut(line, columns)]
    first, *others = texts.folded(texts.in_one_line(line.text), room)
    return [line._replace(text=first), *(ScreenLine("", " " * texts.width(line.bar), other) for other in others)]
