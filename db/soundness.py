"""Whether what stands in the database is what kgorch writes: asked when something went wrong, for a row that a person or
another program has changed makes a traceback that looks like our bug."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Column, Engine, Float, Integer, String, Table, text
from sqlalchemy import inspect as look_into
from sqlalchemy.types import Boolean

from db.tables import Base, Utc

PHASES = (
    "queued", "starting", "training", "saving", "stopping", "recovering", "diagnosing", "finished", "suspended", "cut off",
    "failed",
)  # fmt: skip
"""Of a session: core/session.py's, which is not known here (a test compares them)."""

WORDS: dict[str, tuple[str, ...]] = {
    "runs.state": ("active", "finished", "failed", "superseded"),
    "sessions.phase": PHASES,
    "checkpoints.state": ("verified", "broken", "dropped", "superseded"),
    "resumes.state": ("due", "claimed", "done", "failed"),
    "events.phase": ("", *PHASES),
}

LARGEST = 1e15
"""Bytes, samples, seconds: nobody has more."""

YEARS = range(1969, 2200)
"""A machine without a clock of its own begins at 1970."""

Readers = Mapping[str, Callable[[Any], object]]


def first_oddity(engine: Engine, readers: Readers) -> str | None:
    """The first value that kgorch would not have written, in words; None when all are sound.

    Args:
        readers: of columns (`table.column`) whose text others read; they raise ValueError for what they cannot.
    """
    with engine.connect() as connection:
        found = (
            connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() if engine.dialect.name == "sqlite" else "ok"
        )
        if found != "ok":
            return str(found)
        tables = set(look_into(connection).get_table_names())
        for table in Base.metadata.sorted_tables:
            if table.name not in tables:
                return f"the table {table.name} is missing"
            for row in connection.execute(_as_kept(table)):
                for column, kept in zip(table.columns, row[1:], strict=True):
                    if expected := _odd(column, kept) or _unread(readers.get(f"{table.name}.{column.name}"), kept):
                        return (
                            f"{table.name}.{column.name} of row {row[0]}: expected {expected}, found {str(kept)[:80]!r}"
                        )
    return None


def _as_kept(table: Table) -> Any:
    """Its rows before any conversion, the primary key first."""
    key = next(iter(table.primary_key.columns)).name
    columns = ", ".join(f'"{column.name}"' for column in table.columns)
    return text(f'SELECT "{key}", {columns} FROM "{table.name}"')


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
    if isinstance(kind, String):
        if not isinstance(kept, str):
            return "text"
        allowed = WORDS.get(f"{column.table.name}.{column.name}", (kept,))
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
