"""What of a stranger's database is read, and what each column may hold.

The database that lies in a source (an attached data set, a disk that was carried over) was written by nobody knows whom. It
decides nothing that runs here: figures are taken over, and text that is only shown. `COLUMNS` says it of every column; a test
fails for a column without a rule. What is found out by a rule is told by table and column, and the database is passed over:
the checkpoints beside it are found without it. An odd event or charge costs itself alone.

The file is bounded, too: SQLite runs what stands in a schema (a view over an endless query, a trigger), so a schema that is not
made of our tables is not opened at all, and every statement ends when the budget of the search is spent.
"""

from __future__ import annotations

import enum
import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Boolean, Connection, Float, String

from db import facts
from db.soundness import CODES, YEARS
from db.tables import Base, Code
from orchestrator import untrusted_io
from orchestrator.core.codes import EventKind
from orchestrator.untrusted_io import Budget

Columns = dict[str, Any]

VALUE_BYTES = 4 << 20
"""The largest single value, row or statement that SQLite makes of the file (SQLITE_LIMIT_LENGTH)."""

CURVE_BYTES = 32 << 20
"""Of the newest pieces of curves: a long run has more, and only a picture of its beginning is lost."""

TEXT_BYTES = 64 << 20
"""Of text in all rows that are read: as Python's objects they take a few times as much memory."""

LONGEST_TEXT = 64 << 10
"""Letters of a text that is shown; a traceback has some thousands."""

ROWS: Mapping[str, int] = {
    "runs": 100, "stages": 1_000, "sessions": 20_000, "attempts": 50_000, "checkpoints": 50_000, "events": 100_000,
    "charges": 50_000, "rungs": 20_000, "curves": 20_000,
}  # fmt: skip
"""The newest of a table that are read; a table that is not named here is not read at all."""

TEN_YEARS_S = 10 * 366 * 86400.0

SCHEMA_ENTRIES, SCHEMA_LETTERS = 200, 20_000
STEPS_BETWEEN_LOOKS = 20_000
"""Steps of SQLite's machine between two looks at the budget: a millisecond or less."""


class Rule(enum.Enum):
    """What a column may hold, and why that is harmless here."""

    OURS = "is not read: this machine's own value, or none, stands in its place"
    KEY = "a number that joins the rows of that database; here they get others"
    NAME = "one line; is compared with names of this plan, and shown"
    TEXT = "is shown alone: cut, without control characters"
    CODE = "one of the codes of core/codes.py"
    NUMBER = "from 1 to a million: counts runs, sessions, attempts"
    COUNT = "a whole number from 0"
    FIGURE = "a finite number below 1e15"
    SECONDS = "from 0 to ten years"
    TRUTH = "yes or no"
    INSTANT = "a date of this or the last century"
    METRICS = "numbers by name"
    TABLE = "texts by name, shown alone"
    FACTS = "as its kind of event has them (db/facts.py); else the event is left out"
    SETTINGS = (
        "a rung's: numbers and switches; arguments of a stage only as this plan's ladder names them, or by consent"
    )
    LINES = "is decoded, bounded and written anew, or left out (core/metric_curve.py)"
    CONSENT = "decides what runs: is used when a person has seen it and said --accept-plan"


_R = Rule
COLUMNS: Mapping[str, Mapping[str, Rule]] = {
    "runs": {
        "id": _R.NAME, "name": _R.NAME, "number": _R.NUMBER, "folder": _R.OURS, "workdir": _R.CONSENT, "checkpoints": _R.OURS,
        "plan": _R.CONSENT, "overrides": _R.CONSENT, "plan_hash": _R.NAME, "state": _R.CODE, "why": _R.TEXT,
        "created_at": _R.INSTANT, "finished_at": _R.INSTANT, "pool": _R.OURS,
    },
    "stages": {
        "id": _R.KEY, "run_id": _R.OURS, "position": _R.COUNT, "name": _R.NAME, "finished_at": _R.INSTANT, "note": _R.TEXT,
    },
    "sessions": {
        "id": _R.KEY, "run_id": _R.OURS, "number": _R.NUMBER, "place": _R.NAME, "phase": _R.CODE,
        "reason": _R.CODE, "why": _R.TEXT, "boot_id": _R.OURS, "boot_wall_s": _R.OURS, "wall_kind": _R.CODE,
        "fixed_wall_s": _R.OURS, "fixed_wall_kind": _R.CODE, "pool": _R.NAME,
        "wall_at": _R.INSTANT, "lead_s": _R.SECONDS, "started_at": _R.INSTANT, "ended_at": _R.INSTANT,
        "supervisor_pid": _R.OURS, "supervisor_started_ticks": _R.OURS, "stage": _R.NAME, "first_step": _R.COUNT,
        "epoch": _R.COUNT, "epochs_total": _R.COUNT, "step": _R.COUNT, "steps_total": _R.COUNT, "samples": _R.COUNT,
        "step_s": _R.SECONDS, "metrics": _R.METRICS, "beat_at": _R.INSTANT, "exactness": _R.TABLE,
    },
    "attempts": {
        "id": _R.KEY, "session_id": _R.KEY, "number": _R.NUMBER, "stage": _R.NAME, "folder": _R.OURS, "ranks": _R.COUNT,
        "first_step": _R.COUNT, "last_step": _R.COUNT, "gained": _R.TRUTH, "outcome": _R.CODE, "cause": _R.TEXT,
        "started_at": _R.INSTANT, "ended_at": _R.INSTANT,
    },
    "checkpoints": {
        "id": _R.KEY, "run_id": _R.OURS, "session_id": _R.KEY, "stage": _R.NAME, "step": _R.COUNT, "final": _R.TRUTH,
        "path": _R.OURS, "bytes": _R.COUNT, "state": _R.CODE, "why": _R.TEXT, "took_s": _R.SECONDS, "blocking_s": _R.SECONDS,
        "metrics": _R.METRICS, "measured": _R.METRICS, "best": _R.OURS, "created_at": _R.INSTANT, "verified_at": _R.INSTANT,
        "source": _R.TEXT,
    },
    "events": {
        "id": _R.KEY, "run_id": _R.OURS, "session_id": _R.KEY, "at": _R.INSTANT, "kind": _R.NAME, "phase": _R.CODE,
        "facts": _R.FACTS,
    },
    "charges": {
        "id": _R.KEY, "session_id": _R.KEY, "pool": _R.NAME, "accelerator": _R.NAME, "factor": _R.FIGURE, "from_at": _R.INSTANT,
        "used_s": _R.FIGURE, "why": _R.TEXT,
    },
    "rungs": {
        "id": _R.KEY, "run_id": _R.OURS, "session_id": _R.KEY, "plan_hash": _R.NAME, "stage": _R.NAME, "device": _R.NAME,
        "world": _R.COUNT, "at": _R.INSTANT, "step": _R.COUNT, "rung": _R.TEXT, "why": _R.TEXT, "up": _R.TRUTH,
        "changes_result": _R.TRUTH, "settings": _R.SETTINGS,
    },
    "curves": {"id": _R.KEY, "attempt_id": _R.KEY, "number": _R.COUNT, "lines": _R.LINES},
}  # fmt: skip

NOT_TAKEN = frozenset({EventKind.RUN_CHOSEN})
"""Kinds of events that are a person's decision at another machine."""

ONE_BY_ONE = frozenset({"events", "charges", "curves"})
"""Of these an odd row is left out; anywhere else it makes the whole database doubtful."""


class Odd(ValueError):
    """A database, or a value in it, that kgorch has not written."""


def guard(budget: Budget) -> Callable[[sqlite3.Connection], None]:
    """For every connection to a stranger's file: statements end with the budget, and no value is larger than ours are."""

    def bound(connection: sqlite3.Connection) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(lambda: int(budget.is_spent), STEPS_BETWEEN_LOOKS)

    return bound


def check_schema(path: Path, budget: Budget) -> None:
    """Before anything else is asked of the file. Raises: Odd for more than our tables and their indexes; sqlite3.Error."""
    tables = {*Base.metadata.tables, "alembic_version"}
    with closing(sqlite3.connect(path)) as connection:
        guard(budget)(connection)
        connection.execute("PRAGMA trusted_schema=OFF")
        asked = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT ?"
        entries = connection.execute(asked, [SCHEMA_ENTRIES + 1]).fetchall()
        if len(entries) > SCHEMA_ENTRIES:
            raise Odd(f"its schema has more than {SCHEMA_ENTRIES} entries")
        for kind, name, table, sql in entries:
            is_ours = kind in ("table", "index") and table in tables and (kind == "index" or name == table)
            is_plain = sql is None or (
                len(sql) <= SCHEMA_LETTERS and re.match(r"\s*CREATE\s+(UNIQUE\s+)?(TABLE|INDEX)\b", sql)
            )
            if not (is_ours and is_plain):
                raise Odd(f"its schema holds the {shown(kind)} {shown(name)}, which is none of ours")
        for name in {table for _, _, table, _ in entries}:
            if any(column[-1] for column in connection.execute(f'PRAGMA table_xinfo("{name}")')):
                raise Odd(f"a column of {shown(name)} is computed")


class Reader:
    """Rows of a stranger's database, newest bounded, each value held against its rule."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._left, self._curves_left = connection, TEXT_BYTES, CURVE_BYTES
        self.left_out: dict[str, int] = {}

    def rows(self, table: str, where: str, *values: Any, order: str = "id") -> list[Columns]:
        """Oldest first; of more than `ROWS` the newest. Raises: Odd; what SQLite raises."""
        return list(reversed(list(self._rows(table, where, values, order))))

    def _rows(self, table: str, where: str, values: tuple[Any, ...], order: str) -> Iterator[Columns]:
        rules = {name: rule for name, rule in COLUMNS[table].items() if rule is not Rule.OURS}
        chosen = ", ".join(f'"{name}"' for name in rules)
        asked = f'SELECT {chosen} FROM "{table}" WHERE {where} ORDER BY "{order}" DESC LIMIT {ROWS[table]}'
        for row in self._connection.exec_driver_sql(asked, values):
            size = sum(len(value) for value in row if isinstance(value, str | bytes))
            if table == "curves":
                self._curves_left -= size
                if self._curves_left < 0:
                    return
            else:
                self._left -= size
            if self._left < 0:
                raise Odd(f"it holds more than {TEXT_BYTES >> 20} MiB of text about this run")
            try:
                yield _columns(table, rules, row)
            except Odd:
                if table not in ONE_BY_ONE:
                    raise
                self.left_out[table] = self.left_out.get(table, 0) + 1


def shown(text: Any, letters: int = 80) -> str:
    """A stranger's word in a message to a person."""
    return clean(str(text))[:letters]


def clean(text: str, *, lines: bool = False) -> str:
    """Without control characters, which a terminal obeys, and without lone surrogates, which no file takes."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(letter if letter.isprintable() or letter in kept else "?" for letter in text)


def _columns(table: str, rules: Mapping[str, Rule], row: Any) -> Columns:
    found: Columns = {}
    for (name, rule), value in zip(rules.items(), row, strict=True):
        column = Base.metadata.tables[table].columns[name]
        if value is None:
            if not column.nullable:
                raise Odd(f"{table}.{name} is empty")
            found[name] = None
            continue
        try:
            taken: Any = _texts(value) if rule is Rule.CONSENT and isinstance(column.type, JSON) else _READ[rule](value)
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise Odd(f"{table}.{name} holds {shown(repr(value), 60)}") from None
        if rule is Rule.CODE and taken not in CODES[f"{table}.{name}"]:
            raise Odd(f"{table}.{name} holds {shown(repr(value), 60)}")
        if isinstance(column.type, String | Code) and column.type.length and rule is not Rule.CONSENT:
            taken = taken[: column.type.length]
        found[name] = (
            float(taken)
            if isinstance(column.type, Float)
            else bool(taken)
            if isinstance(column.type, Boolean)
            else taken
        )
    if table == "events" and (found["kind"] in NOT_TAKEN or not facts.is_sound(found["kind"], found["facts"])):
        raise Odd(f"facts of an event {found['kind']} that it does not have")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return clean(value[:LONGEST_TEXT], lines=True)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return clean(value[:1000])


def _whole(value: Any, least: int, most: float) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError
    return value


def _figure(value: Any) -> float:
    if not facts.is_number(value):
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    found = _figure(value)
    if not 0 <= found <= TEN_YEARS_S:
        raise ValueError
    return found


def _instant(value: Any) -> datetime:
    found = datetime.fromisoformat(value)
    if found.year not in YEARS or found.tzinfo is not None:
        raise ValueError
    return found.replace(tzinfo=UTC)


def _document(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError
    found = untrusted_io.parse_json(value.encode())
    if not isinstance(found, dict):
        raise ValueError
    return found


def _metrics(value: Any) -> dict[str, float]:
    """As far as they are numbers: a script may have reported anything."""
    told = {clean(name[:1000]): figure for name, figure in _document(value).items()}
    return {
        name: float(figure)
        for name, figure in told.items()
        if type(figure) is float or facts.is_number(figure)  # a float may be NaN, and is then shown as such
    }


def _cleaned(value: Any) -> Any:
    """A document whose texts can be shown."""
    if isinstance(value, dict):
        return {clean(name): _cleaned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    if isinstance(value, str):
        return clean(value, lines=True)
    if type(value) is int and not math.isfinite(float(value)):
        raise ValueError
    return value


def _lines(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _consent(value: Any) -> Any:
    """Text, or a list of texts, as it stands: nothing is done with it before a person has seen it."""
    if not isinstance(value, str):
        raise ValueError
    untrusted_io.check_toml(value)
    return value


def _texts(value: Any) -> list[str]:
    found = untrusted_io.parse_json(_consent(value).encode())
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError
    return found


def _truth(value: Any) -> bool:
    return bool(_whole(value, 0, 1))


_READ: Mapping[Rule, Callable[[Any], Any]] = {
    Rule.KEY: lambda value: _whole(value, -(1 << 62), 1 << 62),
    Rule.NAME: _name,
    Rule.TEXT: _text,
    Rule.CODE: _name,
    Rule.NUMBER: lambda value: _whole(value, 1, 1_000_000),
    Rule.COUNT: lambda value: _whole(value, 0, facts.LARGEST),
    Rule.FIGURE: _figure,
    Rule.SECONDS: _seconds,
    Rule.TRUTH: _truth,
    Rule.INSTANT: _instant,
    Rule.METRICS: _metrics,
    Rule.TABLE: lambda value: _cleaned(_document(value)),
    Rule.FACTS: lambda value: _cleaned(_document(value)),
    Rule.SETTINGS: _document,
    Rule.LINES: _lines,
    Rule.CONSENT: _consent,
}
