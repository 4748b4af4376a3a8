"""`kgorch status --watch`: a run on the whole of a terminal, and on one that is too small what matters most of it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from types import FrameType
from typing import Any, NamedTuple

from orchestrator.cli import render
from orchestrator.cli.progress import FIRST_S, Cadence, Figures, mode_of, plain_line
from orchestrator.core import text as texts

LOOK_S = 1.0
BAR, LEAST = 30, 6
"""Columns of a bar, and with how many it still tells something."""

FULL, EMPTY = "━", "─"

FIRST = ("run", "phase", "failed", "progress", "session", "metrics", "end", "next", "notice", "checkpoint", "target")
"""What stays in a small terminal, in this order; the rest goes first, from below."""

View = dict[str, Any]
Rows = list[tuple[str, str]]


class Line(NamedTuple):
    label: str
    bar: str
    text: str


def watch(look: Callable[[], View], rows_of: Callable[[View], Rows]) -> int:
    """Until the session is over, or a person has seen enough; where it stands stays on the screen below."""
    with contextlib.suppress(KeyboardInterrupt):
        if mode_of("auto", sys.stdout) == "live":
            _on_the_whole_screen(look, rows_of)
        else:
            _in_lines(look)
    render.labelled(rows_of(look()))
    return 0


def _lives(found: View) -> bool:
    return bool((found["session"] or {}).get("training_alive"))


def _on_the_whole_screen(look: Callable[[], View], rows_of: Callable[[View], Rows]) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with _resized() as resized, Live(console=console, screen=True, auto_refresh=False) as live:
        while _lives(found := look()):
            until_s = time.monotonic() + LOOK_S
            while time.monotonic() < until_s:
                size = console.size
                lines = frame(found, rows_of(found), size.width, size.height)
                live.update(Text("\n").join(_styled(line) for line in lines), refresh=True)
                resized.clear()
                if not resized.wait(max(until_s - time.monotonic(), 0.0)):
                    break


def _styled(line: Line) -> Any:
    from rich.text import Text

    made = Text(no_wrap=True, overflow="crop")
    made.append(f"{line.label:<{render.INDENT}}", style="bold")
    made.append(line.bar, style="green")
    made.append(line.text)
    return made


@contextlib.contextmanager
def _resized() -> Iterator[threading.Event]:
    """Is set when the terminal gets another size."""
    event = threading.Event()

    def resize(number: int, frame: FrameType | None) -> None:
        event.set()

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield event
    finally:
        signal.signal(signal.SIGWINCH, before)


def _in_lines(look: Callable[[], View]) -> None:
    """For a notebook, a pipe or a log: a line a minute and an epoch, as `start` gives."""
    cadence = Cadence(time.monotonic() - FIRST_S)
    while _lives(found := look()):
        now = _figures(found)
        if cadence.is_due(now, time.monotonic()):
            render.echo(plain_line(now, f"{datetime.now():%H:%M:%S}"))
        time.sleep(LOOK_S)


def _figures(found: View) -> Figures:
    return Figures(
        stage=found["stage"],
        phase=found["phase"],
        epoch=found["epoch"],
        epochs_total=found["epochs_total"] or 0,
        step=found["step"],
        steps_total=found["steps_total"] or 0,
        step_s=found["step_s"] or 0.0,
        metrics=found["metrics"],
        left_s=found["session"]["left_s"],
    )


def frame(found: View, rows: Rows, columns: int, lines: int) -> list[Line]:
    """What fits, in the order of `status`: no line is wider than the terminal, and there are no more than it has.

    Args:
        rows: of `status`, label and value; two bars take the place of its steps and its session.
    """
    every = [_barred(found, label, value, columns) for label, value in rows]
    chosen = sorted(sorted(range(len(every)), key=lambda index: _weight(every[index].label, index))[: max(lines, 1)])
    room = lines - len(chosen)
    shown: list[Line] = []
    for index in chosen:
        folded = _folded(every[index], columns)
        kept = folded if len(folded) - 1 <= room else [_cut(every[index], columns)]
        room -= len(kept) - 1
        shown += kept
    return shown


def _weight(label: str, index: int) -> tuple[int, int]:
    return (FIRST.index(label) if label in FIRST else len(FIRST), index)


def _barred(found: View, label: str, value: str, columns: int) -> Line:
    size = min(BAR, (columns - render.INDENT) // 3)
    if label == "step" and found["steps_total"]:
        return Line("progress", _bar(found["step"] / found["steps_total"], size), value)
    session = found["session"]
    if label == "session" and session and session["wall_at"] and session["left_s"] is not None:
        began, ends = (datetime.fromisoformat(session[name]) for name in ("started_at", "wall_at"))
        whole_s = (ends - began).total_seconds()
        share = 1 - session["left_s"] / whole_s if whole_s > 0 else 1.0
        return Line("session", _bar(share, size), _until_the_wall(session))
    return Line(label, "", value)


def _until_the_wall(session: View) -> str:
    """What matters first: a small terminal cuts the rest."""
    left = f"wall in {render.duration(session['left_s'])}" if session["left_s"] > 0 else "at its wall"
    lead = f"last save asked for {render.duration(session['lead_s'])} before"
    return f"{left} ({lead}), number {session['number']}, since {render.clock(session['started_at'])}"


def _bar(share: float, size: int) -> str:
    """`━━━━━━────── 48%  `; nothing in a terminal that has no room for it."""
    if size < LEAST:
        return ""
    share = min(max(share, 0.0), 1.0)
    full = int(share * size)
    return f"{FULL * full}{EMPTY * (size - full)} {100 * share:3.0f}%  "


def _cut(line: Line, columns: int) -> Line:
    text = texts.in_one_line(line.text)
    return line._replace(text=texts.cut(text, columns - render.INDENT - texts.width(line.bar)))


def _folded(line: Line, columns: int) -> list[Line]:
    room = columns - render.INDENT - texts.width(line.bar)
    if room < render.INDENT:
        return [_cut(line, columns)]
    first, *others = texts.folded(texts.in_one_line(line.text), room)
    return [line._replace(text=first), *(Line("", " " * texts.width(line.bar), other) for other in others)]
