"""Safe reading of another state folder's database: which columns are read, and which values each may hold.

The database in a source (an attached data set, a disk from another machine) may have been written by anybody. Nothing in it
decides what runs here: numbers are imported, and text that is only shown. `COLUMNS` has a rule for every column; a test fails for
a column without one. An invalid value is reported by table and column, and the database is skipped: the checkpoints beside it are
found without it. Only an invalid event, charge or curve is left out alone.

The file is bounded, too. SQLite executes what a schema holds (a view over an endless query, a trigger), so a schema with anything
but our tables is not opened, and every statement ends when the budget of the search is spent.
"""

from __future__ import annotations

import enum
import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Boolean, Connection, Float, String

from kgorch import untrusted_io
from kgorch.core.codes import EventKind
from kgorch.db import event_facts
from kgorch.db.integrity_check import CODES, YEARS
from kgorch.db.tables import Base, Code
from kgorch.untrusted_io import Budget

Columns = dict[str, Any]
"""Column name → value of a row."""

VALUE_BYTES = 4 << 20
"""Of the largest value, row or statement that SQLite accepts from the file (SQLITE_LIMIT_LENGTH)."""

CURVE_BYTES = 32 << 20
"""Of the newest pieces of curves. A long run has more; then the start of its plot is missing."""

TEXT_BYTES = 64 << 20
"""Of text in all rows that are read. As Python objects they take a few times as much memory."""

MAX_TEXT_LENGTH = 64 << 10
"""Characters of a text that is shown; a traceback has some thousands."""

ROWS: Mapping[str, int] = {
    "runs": 100, "stages": 1_000, "sessions": 20_000, "attempts": 50_000, "checkpoints": 50_000, "events": 100_000,
    "charges": 50_000, "rungs": 20_000, "curves": 20_000,
}  # fmt: skip
"""Table → how many of its newest rows are read. Other tables are not read."""

TEN_YEARS_S = 10 * 366 * 86400.0

SCHEMA_ENTRIES, SCHEMA_LENGTH = 200, 20_000
"""Tables and indexes of a schema, and characters of each. Ours has 36, the longest of 1,119 characters."""

STEPS_BETWEEN_CHECKS = 1_000
"""Instructions of SQLite's virtual machine between two checks of the budget: a millisecond or less, unless one of them computes
with values of megabytes, which no schema may say (`_computes`)."""

_QUOTED = re.compile(r"""'(?:[^']|'')*+'?|"[^"]*+"?|`[^`]*+`?|\[[^\]]*+\]?""")
_WORD_OR_CALL = re.compile(r"(?<!\w)\w+(?:\s*\()?+")
_PLAIN = re.compile(r"[\w\s(),=]*")
_TAKES_BRACKETS = {"VARCHAR", "KEY", "UNIQUE", "IN"}
"""Words of our schemas before a bracket that is no call; besides them the names of tables and constraints."""


class ColumnRule(enum.Enum):
    """What a column may hold, and why that is harmless here."""

    LOCAL = "not read: this machine's own value, or none, replaces it"
    KEY = "a number that joins the rows of that database; here they get others"
    NAME = "one line; compared with names of this plan, and shown"
    TEXT = "only shown: cut, without control characters"
    CODE = "a value of an enum of core/codes.py"
    ORDINAL = "from 1 to a million: numbers runs, sessions, attempts"
    COUNT = "an integer from 0"
    NUMBER = "a finite number below 1e15"
    SECONDS = "from 0 to ten years"
    BOOLEAN = "0 or 1"
    INSTANT = "a date of this or the last century"
    METRICS = "numbers by name"
    TABLE = "texts by name, only shown"
    FACTS = "as its kind of event has them (db/event_facts.py); else the event is left out"
    SETTINGS = (
        "a rung's: numbers and switches; arguments of a stage only as this plan's ladder names them, or with consent"
    )
    LINES = "decoded, bounded and written again, or left out (core/metrics/metric_curve.py)"
    CONSENT = "decides what runs: used after a user has seen it and passed --accept-plan"


_R = ColumnRule
COLUMNS: Mapping[str, Mapping[str, ColumnRule]] = {
    "runs": {
        "id": _R.NAME, "name": _R.NAME, "number": _R.ORDINAL, "folder": _R.LOCAL, "workdir": _R.CONSENT, "checkpoints": _R.LOCAL,
        "plan": _R.CONSENT, "overrides": _R.CONSENT, "plan_hash": _R.NAME, "state": _R.CODE, "why": _R.TEXT,
        "created_at": _R.INSTANT, "finished_at": _R.INSTANT, "pool": _R.LOCAL, "machine": _R.LOCAL,
    },
    "stages": {
        "id": _R.KEY, "run_id": _R.LOCAL, "position": _R.COUNT, "name": _R.NAME, "finished_at": _R.INSTANT, "note": _R.TEXT,
    },
    "sessions": {
        "id": _R.KEY, "run_id": _R.LOCAL, "number": _R.ORDINAL, "site": _R.NAME, "phase": _R.CODE,
        "reason": _R.CODE, "why": _R.TEXT, "boot_id": _R.LOCAL, "wall_boottime_s": _R.LOCAL, "wall_kind": _R.CODE,
        "fixed_wall_boottime_s": _R.LOCAL, "fixed_wall_kind": _R.CODE, "pool": _R.NAME,
        "wall_at": _R.INSTANT, "save_lead_s": _R.SECONDS, "started_at": _R.INSTANT, "ended_at": _R.INSTANT,
        "supervisor_pid": _R.LOCAL, "supervisor_started_ticks": _R.LOCAL, "stage": _R.NAME, "first_step": _R.COUNT,
        "epoch": _R.COUNT, "epochs_total": _R.COUNT, "step": _R.COUNT, "steps_total": _R.COUNT, "samples": _R.COUNT,
        "step_s": _R.SECONDS, "metrics": _R.METRICS, "heartbeat_at": _R.INSTANT, "exactness": _R.TABLE,
        "machine": _R.LOCAL, "lease_expires_at": _R.LOCAL,
    },
    "attempts": {
        "id": _R.KEY, "session_id": _R.KEY, "number": _R.ORDINAL, "stage": _R.NAME, "folder": _R.LOCAL, "ranks": _R.COUNT,
        "first_step": _R.COUNT, "last_step": _R.COUNT, "made_progress": _R.BOOLEAN, "outcome": _R.CODE, "cause": _R.TEXT,
        "started_at": _R.INSTANT, "ended_at": _R.INSTANT,
    },
    "checkpoints": {
        "id": _R.KEY, "run_id": _R.LOCAL, "session_id": _R.KEY, "stage": _R.NAME, "step": _R.COUNT, "final": _R.BOOLEAN,
        "pinned": _R.LOCAL,
        "path": _R.LOCAL, "bytes": _R.COUNT, "state": _R.CODE, "why": _R.TEXT, "save_duration_s": _R.SECONDS,
        "blocking_s": _R.SECONDS, "metrics": _R.METRICS, "measured": _R.METRICS, "best": _R.LOCAL, "created_at": _R.INSTANT,
        "verified_at": _R.INSTANT, "source": _R.TEXT,
    },
    "events": {
        "id": _R.KEY, "run_id": _R.LOCAL, "session_id": _R.KEY, "at": _R.INSTANT, "kind": _R.NAME, "phase": _R.CODE,
        "facts": _R.FACTS,
    },
    "charges": {
        "id": _R.KEY, "session_id": _R.KEY, "pool": _R.NAME, "accelerator": _R.NAME, "factor": _R.NUMBER, "started_at": _R.INSTANT,
        "used_s": _R.NUMBER, "why": _R.TEXT,
    },
    "rungs": {
        "id": _R.KEY, "run_id": _R.LOCAL, "session_id": _R.KEY, "plan_hash": _R.NAME, "stage": _R.NAME, "device": _R.NAME,
        "world_size": _R.COUNT, "at": _R.INSTANT, "step": _R.COUNT, "rung": _R.TEXT, "why": _R.TEXT, "up": _R.BOOLEAN,
        "changes_result": _R.BOOLEAN, "settings": _R.SETTINGS,
    },
    "curves": {"id": _R.KEY, "attempt_id": _R.KEY, "number": _R.COUNT, "lines": _R.LINES},
}  # fmt: skip

NOT_IMPORTED = frozenset({EventKind.RUN_CHOSEN})
"""Kinds of events that are a user's decision on another machine."""

SKIPPABLE = frozenset({"events", "charges", "curves"})
"""Tables of which an invalid row is left out. In any other table it makes the whole database doubtful."""


class InvalidDatabase(ValueError):
    """A database, or a value in it, that kgorch did not write."""


def guard(budget: Budget) -> Callable[[sqlite3.Connection], None]:
    """A function that limits a connection to an untrusted file: statements end with the budget, values have a maximum size."""

    def limit(connection: sqlite3.Connection) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(lambda: int(budget.is_spent), STEPS_BETWEEN_CHECKS)

    return limit


def check_schema(path: Path, budget: Budget) -> None:
    """To be called before any other query of the file.

    Raises: InvalidDatabase for anything but our tables and their indexes; sqlite3.Error.
    """
    tables = {*Base.metadata.tables, "alembic_version"}
    with closing(sqlite3.connect(path)) as connection:
        guard(budget)(connection)
        connection.execute("PRAGMA trusted_schema=OFF")
        query = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT ?"
        entries = connection.execute(query, [SCHEMA_ENTRIES + 1]).fetchall()
        if len(entries) > SCHEMA_ENTRIES:
            raise InvalidDatabase(f"its schema has more than {SCHEMA_ENTRIES} entries")
        for kind, name, table, sql in entries:
            is_ours = kind in ("table", "index") and table in tables and (kind == "index" or name == table)
            is_plain = sql is None or (
                len(sql) <= SCHEMA_LENGTH and re.match(r"\s*CREATE\s+(UNIQUE\s+)?(TABLE|INDEX)\b", sql)
            )
            if not (is_ours and is_plain):
                raise InvalidDatabase(
                    f"its schema holds the {printable(kind)} {printable(name)}, which is none of ours"
                )
            if sql is not None and _computes(sql, tables):
                raise InvalidDatabase(
                    f"its {printable(kind)} {printable(name)} computes something, as none of ours does"
                )
        for name in {table for _, _, table, _ in entries}:
            if any(column[-1] for column in connection.execute(f'PRAGMA table_xinfo("{name}")')):
                raise InvalidDatabase(f"a column of {printable(name)} is computed")


def _computes(sql: str, tables: Set[str]) -> bool:
    """Whether a definition calls a function, checks rows or has an operator but `=` and IN: one instruction of SQLite, between two
    checks of the budget, may then take any time.
    """

    def plain(quoted: re.Match[str]) -> str:
        text = quoted[0]
        if text[0] == "'":
            return "0"
        name = text[1:-1]
        return name if re.fullmatch(r"\w+", name) else "?"

    bare = _QUOTED.sub(plain, sql)
    if not _PLAIN.fullmatch(bare):
        return True
    words = [word.rstrip("( \t\r\n") if word.endswith("(") else "" for word in _WORD_OR_CALL.findall(bare)]
    is_called = any(word and word.upper() not in _TAKES_BRACKETS and word not in tables for word in words)
    return is_called or bool(
        re.search(r"\b(CHECK|COLLATE|LIKE|GLOB|REGEXP|MATCH|AS|SELECT|CASE)\b", bare, re.IGNORECASE)
    )


class Reader:
    """Reads the newest rows of an untrusted database, each value checked by its rule.

    Attributes:
        skipped: table → number of its rows that were invalid and left out.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._text_bytes, self._curve_bytes = connection, TEXT_BYTES, CURVE_BYTES  # that are left
        self.skipped: dict[str, int] = {}

    def rows(self, table: str, where: str, *values: Any, order: str = "id") -> list[Columns]:
        """Rows of a table, oldest first; of more than ROWS the newest. Raises: InvalidDatabase; what SQLite raises."""
        return list(reversed(list(self._rows(table, where, values, order))))

    def _rows(self, table: str, where: str, values: tuple[Any, ...], order: str) -> Iterator[Columns]:
        rules = {name: rule for name, rule in COLUMNS[table].items() if rule is not ColumnRule.LOCAL}
        names = ", ".join(f'"{name}"' for name in rules)
        query = f'SELECT {names} FROM "{table}" WHERE {where} ORDER BY "{order}" DESC LIMIT {ROWS[table]}'
        for row in self._connection.exec_driver_sql(query, values):
            size = sum(len(value) for value in row if isinstance(value, str | bytes))
            if table == "curves":
                self._curve_bytes -= size
                if self._curve_bytes < 0:
                    return
            else:
                self._text_bytes -= size
            if self._text_bytes < 0:
                raise InvalidDatabase(f"it holds more than {TEXT_BYTES >> 20} MiB of text about this run")
            try:
                yield _columns(table, rules, row)
            except InvalidDatabase:
                if table not in SKIPPABLE:
                    raise
                self.skipped[table] = self.skipped.get(table, 0) + 1


def printable(text: Any, length: int = 80) -> str:
    """Untrusted text for a message to a person: cut, without control characters."""
    return clean(str(text))[:length]


def clean(text: str, *, lines: bool = False) -> str:
    """Text without control characters, which a terminal executes, and without lone surrogates, which cannot be encoded.

    Args:
        lines: keep line feeds and tabs.
    """
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in allowed else "?" for char in text)


def _columns(table: str, rules: Mapping[str, ColumnRule], row: Any) -> Columns:
    result: Columns = {}
    for (name, rule), value in zip(rules.items(), row, strict=True):
        column = Base.metadata.tables[table].columns[name]
        if value is None:
            if not column.nullable:
                raise InvalidDatabase(f"{table}.{name} is empty")
            result[name] = None
            continue
        try:
            read: Any = (
                _texts(value) if rule is ColumnRule.CONSENT and isinstance(column.type, JSON) else _READ[rule](value)
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            raise InvalidDatabase(f"{table}.{name} holds {printable(repr(value), 60)}") from None
        if rule is ColumnRule.CODE and read not in CODES[f"{table}.{name}"]:
            raise InvalidDatabase(f"{table}.{name} holds {printable(repr(value), 60)}")
        if isinstance(column.type, String | Code) and column.type.length and rule is not ColumnRule.CONSENT:
            read = read[: column.type.length]
        if isinstance(column.type, Float):
            read = float(read)
        elif isinstance(column.type, Boolean):
            read = bool(read)
        result[name] = read
    if table == "events" and (
        result["kind"] in NOT_IMPORTED or not event_facts.is_valid(result["kind"], result["facts"])
    ):
        raise InvalidDatabase(f"facts of an event {result['kind']} that it does not have")
    return result


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return clean(value[:MAX_TEXT_LENGTH], lines=True)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return clean(value[:1000])


def _integer(value: Any, minimum: int, maximum: float) -> int:
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if not event_facts.is_number(value):
        raise ValueError
    return float(value)


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if not 0 <= seconds <= TEN_YEARS_S:
        raise ValueError
    return seconds


def _instant(value: Any) -> datetime:
    instant = datetime.fromisoformat(value)
    if instant.year not in YEARS or instant.tzinfo is not None:
        raise ValueError
    return instant.replace(tzinfo=UTC)


def _document(value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise ValueError
    document = untrusted_io.parse_json(value.encode())
    if not isinstance(document, dict):
        raise ValueError
    return document


def _metrics(value: Any) -> dict[str, float]:
    """The values that are numbers: a script may have reported anything. A float may be NaN and is shown as such."""
    return {
        clean(name[:1000]): float(number)
        for name, number in _document(value).items()
        if type(number) is float or event_facts.is_number(number)
    }


def _cleaned(value: Any) -> Any:
    """The document with all its texts cleaned for a terminal."""
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
    """A text as it is: it is used only after a user has seen it."""
    if not isinstance(value, str):
        raise ValueError
    untrusted_io.check_toml(value)
    return value


def _texts(value: Any) -> list[str]:
    texts = untrusted_io.parse_json(_consent(value).encode())
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise ValueError
    return texts


def _boolean(value: Any) -> bool:
    return bool(_integer(value, 0, 1))


_READ: Mapping[ColumnRule, Callable[[Any], Any]] = {
    ColumnRule.KEY: lambda value: _integer(value, -(1 << 62), 1 << 62),
    ColumnRule.NAME: _name,
    ColumnRule.TEXT: _text,
    ColumnRule.CODE: _name,
    ColumnRule.ORDINAL: lambda value: _integer(value, 1, 1_000_000),
    ColumnRule.COUNT: lambda value: _integer(value, 0, event_facts.MAX_NUMBER),
    ColumnRule.NUMBER: _number,
    ColumnRule.SECONDS: _seconds,
    ColumnRule.BOOLEAN: _boolean,
    ColumnRule.INSTANT: _instant,
    ColumnRule.METRICS: _metrics,
    ColumnRule.TABLE: lambda value: _cleaned(_document(value)),
    ColumnRule.FACTS: lambda value: _cleaned(_document(value)),
    ColumnRule.SETTINGS: _document,
    ColumnRule.LINES: _lines,
    ColumnRule.CONSENT: _consent,
}
