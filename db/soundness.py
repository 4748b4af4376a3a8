"""Whether what stands in the database is what kgorch writes: asked when something went wrong, for a row that a person or
another program has changed makes a traceback that looks like our bug."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import JSON, Column, Engine, Float, Integer, String, Table, text
from sqlalchemy import inspect as look_into
from sqlalchemy.types import Boolean

from db.facts import LARGEST
from db.tables import Base, Code, Place, Utc
from orchestrator.core.codes import Phase

CODES: dict[str, tuple[str, ...]] = {
    f"{table.name}.{column.name}": tuple(column.type.codes)
    for table in Base.metadata.tables.values()
    for column in table.columns
    if isinstance(column.type, Code) and column.name != "kind"  # a rank of another version may note other kinds
} | {"events.phase": ("", *Phase)}
"""Column → what it may hold."""

YEARS = range(1969, 2200)
"""A machine without a clock of its own begins at 1970."""

Readers = Mapping[str, Callable[[Any], object]]


class Oddity(NamedTuple):
    """A value that kgorch would not have written. `kept`: as the database has it."""

    told: str
    kept: Any


def first_oddity(engine: Engine, readers: Readers) -> str | None:
    """The first value of the whole database that kgorch would not have written, in words; None when all are sound."""
    return next((oddity.told for oddity in oddities(engine, readers)), None)


def oddities(engine: Engine, readers: Readers, *, newest: int | None = None) -> Iterator[Oddity]:
    """The values that kgorch would not have written.

    Args:
        readers: of columns (`table.column`) whose text others read; they raise ValueError for what they cannot.
        newest: of each table, so many rows at most, the newest ones.
    """
    with engine.connect() as connection:
        found = (
            connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() if engine.dialect.name == "sqlite" else "ok"
        )
        if found != "ok":
            yield Oddity(str(found), found)
            return
        tables = set(look_into(connection).get_table_names())
        for table in Base.metadata.sorted_tables:
            if table.name not in tables:
                yield Oddity(f"the table {table.name} is missing", table.name)
                return
            yield from _in_rows(table, connection.execute(_as_kept(table, "", newest)), readers)


def oddities_of(engine: Engine, run_ids: Sequence[str], readers: Readers, *, newest: int) -> Iterator[Oddity]:
    """The same in the rows of these runs, of their queue and of all pools, of each table at most the `newest`."""
    with engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            if table.name in SHARED:
                yield from _in_rows(table, connection.execute(_as_kept(table, "", newest)), readers)
            elif where := _of_run(table):
                for run_id in run_ids:
                    rows = connection.execute(_as_kept(table, where, newest), {"run": run_id})
                    yield from _in_rows(table, rows, readers)


def runs_among(engine: Engine, words: Set[object], *, newest: int) -> list[Any]:
    """The ids of runs whose id or name is one of the words."""
    with engine.connect() as connection:
        found = connection.exec_driver_sql(f"SELECT id, name FROM runs ORDER BY created_at DESC LIMIT {newest}")
        return [run_id for run_id, name in found if run_id in words or name in words]


SHARED = ("pools", "resumes")
"""Tables that verbs read which are about no run."""


def _of_run(table: Table) -> str | None:
    """Which of its rows are a run's, as SQL; None for a table of which none are."""
    columns = {column.name for column in table.columns}
    if table.name == "runs":
        return "WHERE id = :run"
    if "run_id" in columns:
        return "WHERE run_id = :run"
    return "WHERE session_id IN (SELECT id FROM sessions WHERE run_id = :run)" if "session_id" in columns else None


def odd_field(record: Any, readers: Readers) -> Oddity | None:
    """The first field of a record (db/records.py) that kgorch would not have written."""
    table = _TABLES.get(type(record).__name__)
    for column in table.columns if table is not None else ():
        value = getattr(record, column.name, None)
        odd = _odd_converted(column, value) or _unread(readers.get(f"{column.table.name}.{column.name}"), value)
        if odd:
            key = getattr(record, "id", None) or getattr(record, "name", "")
            where = f"{column.table.name}.{column.name} of row {key}"
            return Oddity(f"{where}: expected {odd}, found {str(value)[:80]!r}", value)
    return None


_TABLES: dict[str, Table] = {
    name: Base.metadata.tables[table]
    for name, table in {
        "RunInfo": "runs", "StageInfo": "stages", "SessionInfo": "sessions", "AttemptInfo": "attempts", "PoolInfo": "pools",
        "CheckpointInfo": "checkpoints", "ResumeInfo": "resumes", "ChargeInfo": "charges", "EventInfo": "events",
        "RungInfo": "rungs", "SampleInfo": "samples",
    }.items()
}  # fmt: skip


def _odd_converted(column: Column[Any], value: Any) -> str | None:
    """What was expected of a value that SQLAlchemy has converted."""
    if value is None:
        return None  # a record may leave a column out
    if isinstance(column.type, Utc):
        return None if isinstance(value, datetime) and value.year in YEARS else "an instant"
    if isinstance(column.type, JSON):
        return _odd_document(column.name, json.dumps(value, default=str))
    return _odd(column, value if not isinstance(value, bool) else int(value))


def _in_rows(table: Table, rows: Iterable[Any], readers: Readers) -> Iterator[Oddity]:
    for row in rows:
        for column, kept in zip(table.columns, row[1:], strict=True):
            if expected := _odd(column, kept) or _unread(readers.get(f"{table.name}.{column.name}"), kept):
                where = f"{table.name}.{column.name} of row {row[0]}"
                yield Oddity(f"{where}: expected {expected}, found {str(kept)[:80]!r}", kept)


def _as_kept(table: Table, where: str = "", newest: int | None = None) -> Any:
    """Its rows before any conversion, the primary key first."""
    key = next(iter(table.primary_key.columns)).name
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    bound = f' ORDER BY "{key}" DESC LIMIT {newest}' if newest else ""
    return text(f'SELECT "{key}", {columns} FROM "{table.name}" {where}{bound}')


def _odd(column: Column[Any], kept: Any) -> str | None:
    """What was expected of this value, if it is not that."""
    if kept is None:
        return None if column.nullable else "a value"
    kind = column.type
    if isinstance(kind, Utc):
        return None if _is_instant(kept) else "an instant"
    if isinstance(kind, JSON):
        return _odd_document(column.name, kept)
    if isinstance(kind, Boolean):
        return None if kept in (0, 1) else "0 or 1"
    if isinstance(kind, Integer | Float):
        if isinstance(kept, bool | str | bytes) or (isinstance(kind, Integer) and not isinstance(kept, int)):
            return "a number"
        return None if math.isfinite(kept) and abs(kept) < LARGEST else f"a number below {LARGEST:g}"
    if isinstance(kind, String | Place | Code):
        if not isinstance(kept, str):
            return "text"
        allowed = CODES.get(f"{column.table.name}.{column.name}", (kept,))
        return None if kept in allowed else f"one of {', '.join(allowed)}"
    return None


def _unread(reader: Callable[[Any], object] | None, kept: Any) -> str | None:
    try:
        if reader and kept is not None:
            reader(kept)
    except ValueError as error:
        return str(error).removeprefix("expected ")
    return None


def _is_instant(kept: Any) -> bool:
    try:
        return datetime.fromisoformat(kept).year in YEARS
    except (TypeError, ValueError):
        return False


def _odd_document(name: str, kept: Any) -> str | None:
    """Only what is alike in all rows of a column is known: not what the facts of an event say."""
    try:
        found = json.loads(kept)
    except (TypeError, ValueError, RecursionError):
        return "JSON"
    if name == "overrides":
        return None if isinstance(found, list) and all(isinstance(item, str) for item in found) else "a list of texts"
    if not isinstance(found, dict):
        return "an object of JSON"
    is_plain = name != "metrics" or all(isinstance(value, int | float) for value in found.values())
    return None if is_plain else "numbers by name"
