"""Finds values in the database that kgorch does not write.

Called after a verb failed with an unexpected exception (cli/cause.py): a row that a user or another program has changed makes a
traceback that looks like a bug of kgorch. PRAGMA quick_check finds damage of the file
alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import JSON, Column, Engine, Float, Integer, String, Table, text
from sqlalchemy import inspect as look_into
from sqlalchemy.types import Boolean

from kgorch.core.codes import Phase
from kgorch.db.event_facts import MAX_NUMBER
from kgorch.db.tables import Base, Code, StatePath, Utc

CODES: dict[str, tuple[str, ...]] = {
    f"{table.name}.{column.name}": tuple(column.type.codes)
    for table in Base.metadata.tables.values()
    for column in table.columns
    if isinstance(column.type, Code) and column.name != "kind"  # a rank of another version may send other kinds
} | {"events.phase": ("", *Phase)}
"""Column (`table.column`) → the values that it may hold."""

MAX_SECONDS = 1e10
"""Three hundred years: an instant that is so far from one of `YEARS` can still be computed."""

YEARS = range(1969, 2200)
"""A machine without a clock of its own begins at 1970."""

Readers = Mapping[str, Callable[[Any], object]]


class InvalidValue(NamedTuple):
    """A value that kgorch would not have written.

    Attributes:
        description: table, column, row, what was expected and found.
        value: as the database has it.
    """

    description: str
    value: Any


def first_invalid_value(engine: Engine, readers: Readers) -> str | None:
    """Description of the first invalid value of the whole database; None where all are valid."""
    return next((invalid.description for invalid in invalid_values(engine, readers)), None)


def invalid_values(engine: Engine, readers: Readers, *, newest: int | None = None) -> Iterator[InvalidValue]:
    """All values that kgorch would not have written.

    Args:
        readers: `table.column` → the function that parses its text elsewhere, which raises ValueError for an invalid one.
        newest: check only so many rows of each table, the newest ones.
    """
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            result = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if result != "ok":
                yield InvalidValue(str(result), result)
                return
        tables = set(look_into(connection).get_table_names())
        for table in Base.metadata.sorted_tables:
            if table.name not in tables:
                yield InvalidValue(f"the table {table.name} is missing", table.name)
                return
            yield from _in_rows(table, connection.execute(_select_unconverted(table, "", newest)), readers)


def invalid_values_of_runs(
    engine: Engine, run_ids: Sequence[str], readers: Readers, *, newest: int
) -> Iterator[InvalidValue]:
    """The same in the newest rows of these runs, and in the tables that verbs read for any run."""
    with engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            if table.name in SHARED:
                yield from _in_rows(table, connection.execute(_select_unconverted(table, "", newest)), readers)
            elif where := _of_run(table):
                for run_id in run_ids:
                    rows = connection.execute(_select_unconverted(table, where, newest), {"run": run_id})
                    yield from _in_rows(table, rows, readers)


def find_run_ids(engine: Engine, words: Set[object], *, newest: int) -> list[Any]:
    """The ids of the newest runs whose id or name is one of the words."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(f"SELECT id, name FROM runs ORDER BY created_at DESC LIMIT {newest}")
        return [run_id for run_id, name in rows if run_id in words or name in words]


SHARED = ("pools", "resumes", "charges")
"""Tables that verbs read as a whole, whatever run they are about."""


def _of_run(table: Table) -> str | None:
    """SQL condition for the rows of the run `:run`; None for a table without any."""
    columns = {column.name for column in table.columns}
    if table.name == "runs":
        return "WHERE id = :run"
    if "run_id" in columns:
        return "WHERE run_id = :run"
    return "WHERE session_id IN (SELECT id FROM sessions WHERE run_id = :run)" if "session_id" in columns else None


def invalid_field(row: Any, readers: Readers) -> InvalidValue | None:
    """The first field of a row (a named tuple of db/rows.py) that kgorch would not have written."""
    table = _TABLES.get(type(row).__name__)
    for column in table.columns if table is not None else ():
        value = getattr(row, column.name, None)
        reader = readers.get(f"{column.table.name}.{column.name}")
        if expected := _expected_of_converted(column, value) or _expected_by_reader(reader, value):
            key = getattr(row, "id", None) or getattr(row, "name", "")
            where = f"{column.table.name}.{column.name} of row {key}"
            return InvalidValue(f"{where}: expected {expected}, found {str(value)[:80]!r}", value)
    return None


_TABLES: dict[str, Table] = {
    name: Base.metadata.tables[table]
    for name, table in {
        "RunInfo": "runs", "StageInfo": "stages", "SessionInfo": "sessions", "AttemptInfo": "attempts", "PoolInfo": "pools",
        "CheckpointInfo": "checkpoints", "ResumeInfo": "resumes", "ChargeInfo": "charges", "EventInfo": "events",
        "RungInfo": "rungs", "SampleInfo": "samples",
    }.items()
}  # fmt: skip


def _expected_of_converted(column: Column[Any], value: Any) -> str | None:
    """What was expected instead of a value that SQLAlchemy has converted; None where it is valid."""
    if value is None:
        return None  # the named tuple may lack the column
    if isinstance(column.type, Utc):
        return None if isinstance(value, datetime) and value.year in YEARS else "an instant"
    if isinstance(column.type, JSON):
        return _expected_document(column.name, json.dumps(value, default=str))
    return _expected(column, value if not isinstance(value, bool) else int(value))


def _in_rows(table: Table, rows: Iterable[Any], readers: Readers) -> Iterator[InvalidValue]:
    for row in rows:
        for column, value in zip(table.columns, row[1:], strict=True):
            reader = readers.get(f"{table.name}.{column.name}")
            if expected := _expected(column, value) or _expected_by_reader(reader, value):
                where = f"{table.name}.{column.name} of row {row[0]}"
                yield InvalidValue(f"{where}: expected {expected}, found {str(value)[:80]!r}", value)


def _select_unconverted(table: Table, where: str = "", newest: int | None = None) -> Any:
    """Query of the rows without SQLAlchemy's conversions, which fail for invalid values; the primary key comes first."""
    key = next(iter(table.primary_key.columns)).name
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    limit = f' ORDER BY "{key}" DESC LIMIT {newest}' if newest else ""
    return text(f'SELECT "{key}", {columns} FROM "{table.name}" {where}{limit}')


def _expected(column: Column[Any], value: Any) -> str | None:
    """What was expected instead of a stored value; None where it is valid."""
    if value is None:
        return None if column.nullable else "a value"
    kind = column.type
    if isinstance(kind, Utc):
        return None if _is_instant(value) else "an instant"
    if isinstance(kind, JSON):
        return _expected_document(column.name, value)
    if isinstance(kind, Boolean):
        return None if value in (0, 1) else "0 or 1"
    if isinstance(kind, Integer | Float):
        if isinstance(value, bool | str | bytes) or (isinstance(kind, Integer) and not isinstance(value, int)):
            return "a number"
        most = MAX_SECONDS if column.name.endswith("_s") else MAX_NUMBER
        return None if math.isfinite(value) and abs(value) < most else f"a number below {most:g}"
    if isinstance(kind, String | StatePath | Code):
        if not isinstance(value, str):
            return "text"
        allowed = CODES.get(f"{column.table.name}.{column.name}", (value,))
        return None if value in allowed else f"one of {', '.join(allowed)}"
    return None


def _expected_by_reader(reader: Callable[[Any], object] | None, value: Any) -> str | None:
    try:
        if reader and value is not None:
            reader(value)
    except ValueError as error:
        return str(error).removeprefix("expected ")
    return None


def _is_instant(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).year in YEARS
    except (TypeError, ValueError):
        return False


def _expected_document(name: str, text: Any) -> str | None:
    """Checks what all rows of a column have in common. The facts of events differ by kind: db/event_facts.py checks them."""
    try:
        document = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return "JSON"
    if name == "overrides":
        is_list = isinstance(document, list) and all(isinstance(item, str) for item in document)
        return None if is_list else "a list of texts"
    if not isinstance(document, dict):
        return "an object of JSON"
    is_plain = name != "metrics" or all(isinstance(value, int | float) for value in document.values())
    return None if is_plain else "numbers by name"
