"""`kgorch top`: all runs on the whole screen, those that train first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kgorch.cli.display import bars, render
from kgorch.cli.display.screen import Screen, ScreenLine
from kgorch.core import text as texts
from kgorch.core.codes import RunState

View = dict[str, Any]

INTERVAL_S = 2.0
"""Between two reads of the database."""

KEY_HELP = "q quits, ↑ ↓ choose, Enter shows the run"

MIN_HELP_LINES = 6
"""A lower screen has no line for the keys."""


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        rank: by importance; on a narrow terminal the highest are left out.
        width: in columns; it is cut or padded to that.
    """

    title: str
    width: int
    rank: int
    text: Callable[[View], str]


def progress(view: View) -> str:
    share = (view.get("progress") or {}).get("stage")
    if view["state"] == RunState.FINISHED:
        share = 1.0
    return "" if share is None else bars.bar(share, 8).rstrip()


def headline(view: View) -> str:
    """`loss 0.0412 ▇▅▃▂▁`; empty for a run without metrics."""
    if not (found := view.get("headline")):
        return ""
    value = "nan" if found["value"] is None else f"{found['value']:.4g}"
    return f"{texts.cut(texts.in_one_line(found['name']), 12)} {value} {bars.trend(found['line'], 12)}"


def outlook(view: View) -> str:
    """When the stage ends, else what the run waits for."""
    if view["state"] in (RunState.FINISHED, RunState.FAILED, RunState.SUPERSEDED):
        return render.words(view["state"])
    forecast, following = view["forecast"] or {}, view["next"] or {}
    session = view["session"] or {}
    if forecast.get("end_at"):
        return f"{forecast['stage']} ends {render.clock(forecast['end_at'])}"
    if following.get("at"):
        return f"due {render.clock(following['at'])}"
    if session.get("left_s") is not None and session.get("training_alive"):
        return f"wall in {render.duration(session['left_s'])}"
    return str(following.get("command") or "")


def state(view: View) -> str:
    """The phase; of a session without any process, that it is over."""
    session = view["session"] or {}
    if session and not session["ended_at"] and not session["training_alive"]:
        return "no process"
    return render.words(view["phase"])


def wall(view: View) -> str:
    session = view["session"] or {}
    is_known = session.get("left_s") is not None and session.get("training_alive")
    return render.duration(session["left_s"]) if is_known else ""


COLUMNS = (
    Column("run", 18, 0, lambda view: view["run"] + (f"/{view['run_number']}" if view["run_number"] > 1 else "")),
    Column("state", 10, 1, state),
    Column("progress", 13, 2, progress),
    Column("step", 9, 5, lambda view: str(view["step"] or "")),
    Column("wall in", 8, 6, wall),
    Column("metric", 34, 4, headline),
    Column("then", 26, 3, outlook),
)


def frame(views: Sequence[View], columns: int, lines: int, chosen: int = 0) -> list[ScreenLine]:
    """The table of runs that fits on a screen of this size. It scrolls so that the chosen run is on it.

    Args:
        views: entries of report/overview.py.
    """
    shown = columns_of(columns)
    head = ScreenLine(None, "", _cells([column.title for column in shown], shown, columns), "head")
    has_help = lines >= MIN_HELP_LINES
    room = max(lines - 1 - has_help, 1)
    first = min(max(0, chosen - room + 1), max(0, len(views) - room))
    rows = [
        ScreenLine(
            None, "", _cells([column.text(view) for column in shown], shown, columns), _kind(view, index == chosen)
        )
        for index, view in enumerate(views[first : first + room], start=first)
    ]
    if not rows:
        rows = [ScreenLine(None, "", texts.cut("there is no run yet: kgorch start plan.toml", columns), "row")]
    count = f"{len(views)} run{'s' if len(views) != 1 else ''}"
    keys = [ScreenLine(None, "", texts.cut(f"{count}; {KEY_HELP}", columns), "keys")] if has_help else []
    return [head, *rows, *keys][: max(lines, 1)]


def columns_of(width: int) -> list[Column]:
    """The most important columns that fit, in their order; the run always."""
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if chosen and sum(item.width + 1 for item in chosen) + column.width > width:
            break
        chosen.append(column)
    return sorted(chosen, key=COLUMNS.index)


def _cells(values: Sequence[str], columns: Sequence[Column], width: int) -> str:
    parts = []
    for value, column in zip(values, columns, strict=True):
        text = texts.cut(texts.in_one_line(value), min(column.width, width))
        parts.append(text + " " * (column.width - texts.width(text)))
    return texts.cut(" ".join(parts).rstrip(), width)


def _kind(view: View, is_chosen: bool) -> str:
    if is_chosen:
        return "chosen"
    return "failed" if view["state"] == RunState.FAILED else "row"


def show(read: Callable[[], Sequence[View]], open_run: Callable[[str], object]) -> None:
    """The screen, until q or Ctrl-C.

    Args:
        read: the runs as of now.
        open_run: shows one run, by NAME/NUMBER, until it is left; called without this screen.
    """
    chosen = 0
    while name := _choose(read, chosen):
        open_run(name[0])
        chosen = name[1]


def _choose(read: Callable[[], Sequence[View]], chosen: int) -> tuple[str, int] | None:
    """NAME/NUMBER of the run that was opened, and its row; None to end."""
    with Screen() as screen:
        while True:
            views = read()
            last = max(len(views) - 1, 0)
            chosen = min(chosen, last)
            # Keys move the choice at once; the database is read again at the interval.
            while key := screen.show(functools.partial(frame, views, chosen=chosen), INTERVAL_S):
                if key == "q":
                    return None
                if key == "enter" and views:
                    view = views[chosen]
                    return f"{view['run']}/{view['run_number']}", chosen
                chosen = min(max(chosen + MOVES.get(key, 0), 0), last)


MOVES = {"up": -1, "down": 1, "k": -1, "j": 1, "page up": -10, "page down": 10}
"""Keys that choose another run, and by how many rows."""
