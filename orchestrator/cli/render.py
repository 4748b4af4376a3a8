"""How things look: durations, sizes, tables, JSON. Tables are plain text when piped.

The one way to the terminal, too: nothing else in this package prints (tests/core/test_house.py), so that all text passes
`core.text.printable` first.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from orchestrator.core import text as texts

printable = texts.printable

METRICS, NAME = 12, 60
"""So many metrics are shown, and so many columns of a name: a training may report thousands, and --json has all."""

INDENT = 12
"""Columns of the label before a value."""


def duration(seconds: float | None) -> str:
    """`9h 05m`, `12m 30s`, `4.2s`, `8ms`; `–` for what is not known."""
    if seconds is None:
        return "–"
    if 0 < seconds < 0.95:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def ago(stamp: str | None) -> str:
    if not stamp:
        return "–"
    passed = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
    return f"{duration(max(passed, 0.0))} ago"


def clock(stamp: str | None) -> str:
    """Local time of an instant, with the date when it is not today's."""
    if not stamp:
        return "–"
    at = datetime.fromisoformat(stamp).astimezone()
    return at.strftime("%H:%M:%S" if at.date() == datetime.now().astimezone().date() else "%Y-%m-%d %H:%M")


def span(dates: Mapping[str, Any]) -> str:
    """`Sun 22 Nov 03:40 (between 02:10 and 06:30)`, local time; a date where it is another than the middle's, its year where
    that is not this one."""
    middle, early, late = (
        datetime.fromisoformat(at).astimezone() if at else None
        for at in (dates["end_at"], dates["earliest_at"], dates["latest_at"])
    )
    if middle is None:
        return "–"

    this_year = datetime.now().astimezone().year

    def dated(at: datetime) -> str:
        return at.strftime("%a %d %b %H:%M" if at.year == this_year else "%a %d %b %Y %H:%M")

    def short(at: datetime | None) -> str:
        if at is None:
            return "nobody knows when"
        return at.strftime("%H:%M") if at.date() == middle.date() else dated(at)

    return f"{dated(middle)} (between {short(early)} and {short(late)})"


def metrics(values: Mapping[str, float | None]) -> str:
    shown = [metric(name, value) for name, value in list(values.items())[:METRICS]]
    return "  ".join(shown) + (f"  and {len(values) - METRICS} more (--json)" if len(values) > METRICS else "")


def metric(name: str, value: float | None) -> str:
    return f"{texts.cut(texts.in_one_line(name), NAME)} {'nan' if value is None else f'{value:.4g}'}"


def words(code: str) -> str:
    """A code as people read it: `cut_off` as `cut off`."""
    return code.replace("_", " ")


def quota(found: Mapping[str, Any]) -> str:
    """`3h 20m left of 30h 00m (kaggle), more on 2026-11-28 01:00`, as of status and quota."""
    if found["hours"] is None:
        return f"{duration(found['used_s'])} used ({found['pool']}), no limit known"
    more = f", more at {clock(found['resets_at'])}" if found["resets_at"] else ""
    return f"{duration(found['left_s'])} left of {duration(3600 * found['hours'])} ({found['pool']}){more}"


def rung(taken: Mapping[str, Any]) -> str:
    """A rung of the memory ladder, as of status and history."""
    changes = ", which changes the result" if taken["changes_result"] else ""
    return f"{taken['rung']} from step {taken['step']}{changes}: {printable(taken['why'])}"


def echo(said: str = "", *, err: bool = False, nl: bool = True, colours: bool = False) -> None:
    """Print text: on stdout what was asked for, with `err` on stderr what is told besides.

    Args:
        colours: of a picture or a training's output; else nothing that a terminal would obey is printed.
    Raises: OSError: a pipe whose reader has gone, a full disk.
    """
    _write(texts.coloured(said) if colours else printable(said), err=err, nl=nl)


def echo_log(cleaned: str) -> None:
    """What a LogText has cleaned; colours stay in a pipe, too: what reads it knows what to do with them."""
    _write(cleaned, nl=False, colours=True)


def echo_bytes(content: bytes) -> None:
    """As it is, control characters too: for who asked for it."""
    click.echo(content, nl=False)


def _write(clean: str, *, err: bool = False, nl: bool = True, colours: bool | None = None) -> None:
    """`colours`: None where a terminal has them and a pipe has not."""
    try:
        click.echo(clean, err=err, nl=nl, color=colours)
    except UnicodeEncodeError:  # a terminal that is set to ASCII or Latin-1
        encoding = (sys.stderr if err else sys.stdout).encoding
        click.echo(clean.encode(encoding, "replace").decode(encoding), err=err, nl=nl, color=colours)


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))  # its strings are ASCII, control characters are written as \\u001b


def labelled(rows: Iterable[tuple[str, str]], *, err: bool = False) -> None:
    """Lines of `label  value`; on a terminal a long value goes on below its own beginning."""
    stream = sys.stderr if err else sys.stdout
    columns = terminal_width(stream) if is_terminal(stream) else None
    for line in labelled_lines(rows, columns):
        echo(line, err=err)


def labelled_lines(rows: Iterable[tuple[str, str]], columns: int | None = None) -> list[str]:
    """As `labelled`; without `columns` each row is one line."""
    lines = []
    for label, value in rows:
        one = texts.in_one_line(value)
        first, *others = texts.folded(one, columns - INDENT) if columns and columns > 2 * INDENT else [one]
        lines += [f"{label:<{INDENT - 1}} {first}", *(" " * INDENT + part for part in others)]
    return lines


def is_terminal(stream: Any) -> bool:
    """Also of a stream that is closed, or that is none."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def terminal_width(stream: Any) -> int:
    """Columns; 80 where the terminal does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A rich table on a terminal; columns set apart by tabs when piped, for cut and awk."""
    cells = [[texts.in_one_line(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):
        for row in (head, *cells):
            _write("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(*head, box=box.SIMPLE_HEAD, header_style="bold")
    for row in cells:
        made.add_row(*(Text(cell) for cell in row))  # as text: "[train]" would be taken for a style
    Console().print(made)


class LogText:
    """A training's output for a terminal, in the pieces in which a growing file is read."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, content: bytes, *, is_last: bool = False) -> str:
        """What can be shown by now: half of a letter or of an escape sequence waits for the other half."""
        text = self._rest + self._decoder.decode(content, is_last)
        begun = None if is_last else texts.BEGUN.search(text, max(text.rfind("\x1b"), 0))
        text, self._rest = (text[: begun.start()], begun[0]) if begun else (text, "")
        return texts.coloured(text)
