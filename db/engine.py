"""SQLite opened one way: write-ahead log, foreign keys, patience with other writers, readable by its owner alone.

A database that is older is brought up to date as it is opened; one that is newer is refused.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DatabaseError, OperationalError

from db.migrations import HEAD, KNOWN, WHOLE
from orchestrator.errors import StateUnusable

BUSY_MS = 3_000
"""The supervisor must not sit in a write for long: what cannot be written now it writes later."""

LOG_BYTES = 16 << 20
"""The write-ahead log grows while anybody reads, by some 140 MB an hour, and by itself stays as large as it ever was."""

SET_UP_MS = 60_000
"""A new database is made by the first of those who open it; the others have nothing else to do meanwhile."""


def open_database(home: Path) -> Engine:
    """The database of a state folder, made or migrated where needed.

    Raises: StateUnusable when it cannot be read or written, or was written by a newer kgorch.
    """
    path = home / "kgorch.db"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path)
    except OSError as error:
        raise StateUnusable(
            f"the state folder {home} cannot be written",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None
    return open_url(f"sqlite:///{path}", home)


def _make(path: Path) -> None:
    """An empty file readable by its owner alone, where there is none. Raises OSError, also for one that may not be written.

    One that is there is never opened besides SQLite: closing it would take this process's locks off it, another connection's
    too, and whoever goes last elsewhere would then take the log away under it.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(f"{path} may not be read and written, or its disk is read-only") from None


def open_url(url: str, home: Path | None = None, guard: Callable[[sqlite3.Connection], None] | None = None) -> Engine:
    """A database, made or migrated where needed.

    Args:
        home: the state folder that paths in it are relative to; None for a copy of another's, whose paths mean nothing here.
        guard: is given every new connection to SQLite before it is used, to bound what it may do.
    Raises: StateUnusable.
    """
    engine = create_engine(url, json_serializer=_json)
    if home:
        engine.dialect.kgorch_home = str(home)  # type: ignore[attr-defined]  # for tables.Place
    if guard:
        event.listen(engine, "connect", lambda connection, _: guard(connection))
    if engine.dialect.name == "sqlite":
        path = Path(engine.url.database or "")
        event.listen(engine, "connect", lambda connection, _: _configure(connection, is_new=_is_empty(path)))
    try:
        _bring_up_to_date(engine)
    except (OperationalError, DatabaseError, sqlite3.Error) as error:
        raise _unusable(str(engine.url.database), str(getattr(error, "orig", error))) from None
    return engine


def files(engine: Engine) -> tuple[tuple[int, int] | None, ...]:
    """Which files lie under the names of a database and its log; None for one that is missing. Who holds others open
    reads what is no more: SQLite does not say so."""
    found: list[tuple[int, int] | None] = []
    for name in ("", "-wal"):
        try:
            told = Path(f"{engine.url.database}{name}").stat()
            found.append((told.st_dev, told.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _unusable(path: str, why: str) -> StateUnusable:
    next_step = "see whether its disk is full or read-only, or another program holds it; then try again"
    if "malformed" in why or "not a database" in why:
        next_step = (
            f"put a copy of it back, or mv {path} {path}.broken: then kgorch start PLAN goes on from the"
            " checkpoints, which are found without it; only the history is lost"
        )
    return StateUnusable(f"the database {path} cannot be used", why, next_step=next_step)


def _json(value: Any) -> str:
    """Without blanks: samples are many."""
    return json.dumps(value, separators=(",", ":"))


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def _configure(connection: Any, *, is_new: bool) -> None:
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={SET_UP_MS if is_new else BUSY_MS}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"journal_size_limit={LOG_BYTES}",
        "foreign_keys=ON",
        "trusted_schema=OFF",
        f"busy_timeout={BUSY_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _bring_up_to_date(engine: Engine) -> None:
    with engine.connect() as connection:
        present = inspect(connection).has_table("alembic_version")
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar() if present else None
    if found == HEAD:
        return
    if found is not None and found not in KNOWN:
        raise StateUnusable(
            f"the database {engine.url.database} was written by a newer kgorch",
            f"its schema is {found}, this kgorch knows up to {HEAD}",
            next_step="install that newer kgorch, or use another KGORCH_HOME",
        )
    if found is None and _made_whole(engine):
        return
    from db.migrations.run import upgrade  # Alembic takes a while to import, and is needed once

    upgrade(engine, busy_ms=SET_UP_MS)
    engine.dispose()  # with the patience that was for this alone


def _made_whole(engine: Engine) -> bool:
    """Whether this was a new database of SQLite, which has its tables now."""
    if engine.dialect.name != "sqlite":
        return False
    with engine.begin() as connection:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={SET_UP_MS}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
            return False  # another has made it meanwhile, or an older kgorch long ago
        for statement in WHOLE.read_text().split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
    engine.dispose()  # with the patience that was for this alone
    return True
