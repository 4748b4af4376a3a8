"""Formats (durations, sizes, dates) and output (lines, tables, JSON).

No other module of the command line prints (tests/docs/test_architecture.py): so all text passes `core.text.printable`, which
removes what a terminal would obey. Names of metrics and texts of exceptions may hold anything.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from kgorch.core import text as texts
from kgorch.core.formats import duration, size
from kgorch.errors import KgorchError

__all__ = ["duration", "size"]  # others take them from here
printable = texts.printable

MAX_METRICS = 12
"""Metrics on a line: a training may report thousands. --json has all."""
MAX_NAME_COLUMNS = 60
"""Of the name of a metric."""
INDENT = 12
"""Columns of the label before a value."""


def ago(stamp: str | None) -> str:
    """`12m 30s ago`, from an instant in ISO 8601."""
    if not stamp:
        return "–"
    age_s = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
    return f"{duration(max(age_s, 0.0))} ago"  # the clock may have been set back since


def clock(stamp: str | None) -> str:
    """Local time of an instant, with the date unless it is today."""
    if not stamp:
        return "–"
    at = datetime.fromisoformat(stamp).astimezone()
    return at.strftime("%H:%M:%S" if at.date() == datetime.now().astimezone().date() else "%Y-%m-%d %H:%M")


def span(dates: Mapping[str, Any]) -> str:
    """A forecast: `Sun 22 Nov 03:40 (between 02:10 and 06:30)`, local time.

    A bound has its date if that differs from the middle's, a date its year if that is not the current one.
    """
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
            return "an unknown time"
        return at.strftime("%H:%M") if at.date() == middle.date() else dated(at)

    return f"{dated(middle)} (between {short(early)} and {short(late)})"


def metrics(values: Mapping[str, float | None]) -> str:
    parts = [metric(name, value) for name, value in list(values.items())[:MAX_METRICS]]
    return "  ".join(parts) + (f"  and {len(values) - MAX_METRICS} more (--json)" if len(values) > MAX_METRICS else "")


def metric(name: str, value: float | None) -> str:
    return f"{texts.cut(texts.in_one_line(name), MAX_NAME_COLUMNS)} {'nan' if value is None else f'{value:.4g}'}"


def words(code: str) -> str:
    """A code as people read it: `cut_off` as `cut off`."""
    return code.replace("_", " ")


def quota(pool: Mapping[str, Any]) -> str:
    """`3h 20m left of 30h 00m (kaggle), renewed at 2026-11-28 01:00`."""
    if pool["hours"] is None:
        return f"{duration(pool['used_s'])} used ({pool['pool']}), no limit known"
    renewal = f", renewed at {clock(pool['resets_at'])}" if pool["resets_at"] else ""
    return f"{duration(pool['left_s'])} left of {duration(3600 * pool['hours'])} ({pool['pool']}){renewal}"


def rung(entry: Mapping[str, Any]) -> str:
    """A change of the memory ladder: `microbatch/2 from step 12: rank 1: OutOfMemoryError`."""
    changes = ", which changes the result" if entry["changes_result"] else ""
    return f"{entry['rung']} from step {entry['step']}{changes}: {printable(entry['why'])}"


def echo(text: str = "", *, err: bool = False, nl: bool = True, colours: bool = False) -> None:
    """Print a line: the data that a verb returns on stdout, everything else with `err` on stderr.

    Args:
        colours: keep colours, for a plot. All other control characters are always replaced.
    Raises: OSError: the reader of the pipe has ended, or the disk is full.
    """
    _write(texts.coloured(text) if colours else printable(text), err=err, nl=nl)


def echo_log(safe: str) -> None:
    """Print text from a LogText. Colours are kept in a pipe, too, because `| less -R` shows them."""
    _write(safe, nl=False, colours=True)


def echo_bytes(content: bytes) -> None:
    """Print bytes unchanged, control characters too: for `kgorch logs --raw`."""
    click.echo(content, nl=False)


def _write(safe: str, *, err: bool = False, nl: bool = True, colours: bool | None = None) -> None:
    """`colours`: None to keep them on a terminal and remove them in a pipe."""
    try:
        click.echo(safe, err=err, nl=nl, color=colours)
    except UnicodeEncodeError:  # the locale is ASCII or Latin-1
        encoding = (sys.stderr if err else sys.stdout).encoding
        click.echo(safe.encode(encoding, "replace").decode(encoding), err=err, nl=nl, color=colours)


def as_json(value: Any, output: Path | None = None) -> None:
    """Print it, or write it to `output`."""
    text = json.dumps(value, indent=2)  # needs no `printable`: json writes ASCII, a control character as \\u001b
    if output:
        write_file(output, text + "\n")
    else:
        click.echo(text)


def as_json_line(value: Any) -> None:
    """One line of JSON, written at once: a program follows what a pipe brings."""
    click.echo(json.dumps(value, separators=(",", ":")))


def write_file(path: Path, text: str) -> None:
    """Write a page whole or not at all, and print where it is. Raises: KgorchError."""
    content = text.encode("utf-8", "replace")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".kgorch-", delete=False) as file:
            partial = Path(file.name)
            file.write(content)
        try:
            partial.chmod(0o644)  # to be handed on, not private as a temporary file is
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KgorchError(f"{path} cannot be written", str(reason), next_step="name another file with -o") from None
    echo(f"{path.absolute()} ({size(len(content))})")


def labelled(rows: Iterable[tuple[str, str]], *, err: bool = False) -> None:
    """Print lines of `label  value`; on a terminal a long value is wrapped below its beginning."""
    stream = sys.stderr if err else sys.stdout
    columns = terminal_width(stream) if is_terminal(stream) else None
    for line in labelled_lines(rows, columns):
        echo(line, err=err)


def labelled_lines(rows: Iterable[tuple[str, str]], columns: int | None = None) -> list[str]:
    """The lines that `labelled` prints; without `columns` a row is one line."""
    lines = []
    for label, value in rows:
        one = texts.in_one_line(value)
        first, *others = texts.folded(one, columns - INDENT) if columns and columns > 2 * INDENT else [one]
        lines += [f"{label:<{INDENT - 1}} {first}", *(" " * INDENT + part for part in others)]
    return lines


def is_terminal(stream: Any) -> bool:
    """False also for a stream that is closed or None."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def terminal_width(stream: Any) -> int:
    """Columns; 80 if the terminal does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a rich table on a terminal, and columns separated by tabs in a pipe, for cut and awk."""
    cells = [[texts.in_one_line(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):
        for row in (head, *cells):
            _write("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(*head, box=box.SIMPLE_HEAD, header_style="bold")
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))  # a str would be parsed for styles: "[train]" would disappear
    Console().print(grid)


class LogText:
    """Makes the output of a training safe for a terminal, piece by piece, as a growing file is read."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, content: bytes, *, is_last: bool = False) -> str:
        """The text that is complete; half of a character or of an escape sequence waits for the next piece."""
        text = self._rest + self._decoder.decode(content, is_last)
        partial = None if is_last else texts.BEGUN.search(text, max(text.rfind("\x1b"), 0))
        text, self._rest = (text[: partial.start()], partial[0]) if partial else (text, "")
        return texts.coloured(text)
