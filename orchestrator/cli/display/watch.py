"""`kgorch status --watch`: a run on the whole screen. On a small terminal the most important lines are shown."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from kgorch.cli.display import bars, render
from kgorch.cli.display.progress import FIRST_S, Cadence, Figures, mode_of, plain_line
from kgorch.cli.display.screen import Screen, ScreenLine
from kgorch.core import text as texts
from kgorch.report.glance import Glance, Trend

INTERVAL_S = 1.0
"""Between two reads of the database."""

BAR_COLUMNS = 30

MIN_LOG_LINES = 2
"""With less room the log is left out."""

PRIORITY = (
    "run", "phase", "failed", "progress", "session", "trend", "end", "metrics", "next", "notice", "checkpoint", "target", "gpu",
    "remote", "best", "ranks", "stages",
)  # fmt: skip
"""Kinds of lines by importance. On a small terminal other lines are left out first, the lowest before the others."""

View = dict[str, Any]
Reader = Callable[[bool], tuple[View, Glance]]
"""Reads the view of a run, and, if asked for, its glance: a pipe needs none, and curves may have megabytes."""
Rows = list[tuple[str, str]]


def watch(read: Reader, rows_of: Callable[[View], Rows], *, stays: bool = False) -> int:
    """Show a run until its session is over, or q or Ctrl-C; the last state stays on the terminal.

    Args:
        read: the view of the run (report/run_view.py) as of now, and its glance.
        rows_of: its lines, as `kgorch status` prints them.
        stays: a run whose session is over is shown, too, and nothing is left on the terminal.
    """
    with contextlib.suppress(KeyboardInterrupt):
        if mode_of("auto", sys.stdout) == "live":
            _full_screen(read, rows_of, stays=stays)
        else:
            _plain_lines(lambda: read(False)[0])
    if not stays:
        render.labelled(rows_of(read(False)[0]))
    return 0


def _is_training(view: View) -> bool:
    return bool((view["session"] or {}).get("training_alive"))


def _full_screen(read: Reader, rows_of: Callable[[View], Rows], *, stays: bool) -> None:
    with Screen() as screen:
        while True:
            view, glance = read(True)
            if not (stays or _is_training(view)):
                return
            rows = rows_of(view)
            if screen.show(functools.partial(frame, view, rows, glance=glance), INTERVAL_S) == "q":
                return


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


def frame(view: View, rows: Rows, columns: int, lines: int, glance: Glance | None = None) -> list[ScreenLine]:
    """The lines that fit on a screen of this size, in the order of `kgorch status`, with the end of the log below them.

    Args:
        rows: labels and values of `kgorch status`; its steps and its session get a bar.
        glance: trends, shown after the metrics, and the log.
    """
    glance = glance or Glance()
    every = [_with_bar(view, label, value, columns) for label, value in rows]
    after = next((index for index, line in enumerate(every) if line.label == "metrics"), len(every))
    every[after:after] = [_trend_line(trend, columns) for trend in glance.trends]
    by_priority = sorted(range(len(every)), key=lambda index: _priority(every[index], index))
    indices = sorted(by_priority[: max(lines, 1)])
    spare = lines - len(indices)
    screen: list[ScreenLine] = []
    for index in indices:
        wrapped = _wrap(every[index], columns)
        fitting = wrapped if len(wrapped) - 1 <= spare else [_cut(every[index], columns)]
        spare -= len(fitting) - 1
        screen += fitting
    return [*screen, *_log(glance.log, columns, spare)]


def _log(log: Sequence[str], columns: int, room: int) -> list[ScreenLine]:
    """The last lines of the log, as many as there is room for."""
    if not log or room < MIN_LOG_LINES:
        return []
    shown = [_cut(ScreenLine("", "", line, "log"), columns) for line in log[-room:]]
    return [shown[0]._replace(label="log"), *shown[1:]]


def _trend_line(trend: Trend, columns: int) -> ScreenLine:
    size = min(2 * BAR_COLUMNS, (columns - render.INDENT) // 2)
    line = bars.trend(trend.values, size)
    name, value = texts.in_one_line(trend.name), f"{trend.values[-1]:.4g}"
    bar = line and f"{line}  "
    # The label is padded by characters: of wide letters it would be too wide.
    if texts.width(name) == len(name) < render.INDENT:
        return ScreenLine(name, bar, value, "trend")
    return ScreenLine("metric", bar, f"{value} {name}", "trend")


def _priority(line: ScreenLine, index: int) -> tuple[int, int]:
    kind = line.kind if line.kind in PRIORITY else (line.label or "").split(" ")[0]
    return (PRIORITY.index(kind) if kind in PRIORITY else len(PRIORITY), index)


def _with_bar(view: View, label: str, value: str, columns: int) -> ScreenLine:
    size = min(BAR_COLUMNS, (columns - render.INDENT) // 3)
    if label == "step" and view["steps_total"]:
        return ScreenLine("progress", bars.bar(view["step"] / view["steps_total"], size), _of_stage(view) + value)
    session = view["session"]
    if label == "session" and session and session["wall_at"] and session["left_s"] is not None:
        start, wall = (datetime.fromisoformat(session[name]) for name in ("started_at", "wall_at"))
        whole_s = (wall - start).total_seconds()
        share = 1 - session["left_s"] / whole_s if whole_s > 0 else 1.0
        return ScreenLine("session", bars.bar(share, size), _time_left(session))
    return ScreenLine(label, "", value, "failed" if label == "failed" else "")


def _of_stage(view: View) -> str:
    """What the bar of several stages' run is about: `stage 2 of 3, train: `; empty for a run of one stage."""
    names = [item["name"] for item in view.get("stages") or ()]
    if len(names) < 2 or view["stage"] not in names:
        return ""
    return f"stage {names.index(view['stage']) + 1} of {len(names)}, {view['stage']}: "


def _time_left(session: View) -> str:
    """The most important part first: a small terminal cuts the rest."""
    time_left = f"wall in {render.duration(session['left_s'])}" if session["left_s"] > 0 else "at its wall"
    lead = f"last save starts {render.duration(session['save_lead_s'])} before"
    return f"{time_left} ({lead}), number {session['number']}, since {render.clock(session['started_at'])}"


def _cut(line: ScreenLine, columns: int) -> ScreenLine:
    text = texts.in_one_line(line.text)
    return line._replace(text=texts.cut(text, columns - render.INDENT - texts.width(line.bar)))


def _wrap(line: ScreenLine, columns: int) -> list[ScreenLine]:
    room = columns - render.INDENT - texts.width(line.bar)
    if room < render.INDENT:
        return [_cut(line, columns)]
    first, *others = texts.folded(texts.in_one_line(line.text), room)
    blank = " " * texts.width(line.bar)
    return [line._replace(text=first), *(ScreenLine("", blank, other, line.kind) for other in others)]
