"""How things look: durations, sizes, tables, JSON. Tables are plain text when piped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click


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


def metrics(values: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {'nan' if value is None else f'{value:.4g}'}" for name, value in values.items())


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


def printable(text: str) -> str:
    """A folder of a stranger's may have any name: nothing of it moves the cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def as_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A rich table on a terminal; columns set apart by tabs when piped, for cut and awk."""
    if not sys.stdout.isatty():
        for row in (head, *rows):
            click.echo("\t".join(row))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(*head, box=box.SIMPLE_HEAD, header_style="bold")
    for row in rows:
        made.add_row(*row)
    Console().print(made)
