"""Opens the database: creates or migrates it where needed, and configures each SQLite connection.

It is the SQLite file of the state folder, or the PostgreSQL that the machines of a fleet share (db/location.py, db/postgres.py).
Connections to SQLite use the write-ahead log, so that readers do not block writers, except where several machines share the disk
(shared_disk.py), and enforce foreign keys. Only the owner may read the file. A database of an older version is migrated when it is
opened; one of a newer version is refused.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DatabaseError, InterfaceError, InternalError, OperationalError, SQLAlchemyError

from kgorch.db import location, shared_disk
from kgorch.db.migrations import HEAD, REVISIONS, SCHEMA_FILE
from kgorch.errors import DatabaseUnusable, StateUnusable

MAY_PASS = (InterfaceError, InternalError, OperationalError)
"""Errors of a database that is locked, or whose server is away, as DatabaseUnusable is: a later try may succeed."""

BUSY_MS = 3_000
"""Time to wait for another writer's lock. Short, because a supervisor writes again later what it cannot write now."""

LOG_BYTES = 16 << 20
"""Bound of the write-ahead log between checkpoints of it. It grows by some 140 MB an hour while anybody reads, and SQLite by
itself never shrinks the file."""

SET_UP_MS = 60_000
"""Time to wait while another process creates or migrates the database: nothing else can be done meanwhile."""


def open_database(home: Path) -> Engine:
    """The database of a state folder, created or migrated where needed: its SQLite file, or that of the fleet it belongs to.

    Raises: StateUnusable when it cannot be read or written, or was written by a newer kgorch; ConfigError.
    """
    if fleet := location.fleet():
        return open_fleet(fleet, home)
    path = home / "kgorch.db"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        _create_file(path)
    except OSError as error:
        raise StateUnusable(
            f"the state folder {home} cannot be written",
            str(error),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None
    return open_url(of_file(path), home)


def open_fleet(fleet: location.Fleet, home: Path) -> Engine:
    """The PostgreSQL of a fleet, its tables created or migrated where needed.

    Args:
        home: this machine's state folder: the paths of its runs are relative to it, as in SQLite.
    Raises: StateUnusable.
    """
    from kgorch.db import postgres

    engine = postgres.create(fleet.url)
    engine.dialect.kgorch_home = str(home)  # type: ignore[attr-defined]  # read by tables.StatePath
    engine.dialect.kgorch_fleet = fleet  # type: ignore[attr-defined]  # read by fleet.py
    try:
        _migrate(engine)
    except (SQLAlchemyError, OSError) as error:
        engine.dispose()
        raise postgres.unusable(engine, error) from None
    return engine


def _create_file(path: Path) -> None:
    """Create an empty file that only its owner may read, unless it exists.

    An existing file is never opened here. Closing a file releases all POSIX locks that this process has on it, those of SQLite
    connections included; another process that closes its last connection would then delete the log in use.

    Raises: OSError, also where the file may not be read or written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(f"{path} may not be read and written, or its disk is read-only") from None


def of_file(path: Path) -> URL:
    """The URL of an SQLite database: whatever letters its path has."""
    return URL.create("sqlite", database=str(path))


def open_url(url: URL, home: Path | None = None, guard: Callable[[sqlite3.Connection], None] | None = None) -> Engine:
    """A database, created or migrated where needed.

    Args:
        home: the state folder that its paths are relative to; None for a copy of an untrusted database, whose paths are unused.
        guard: called with each new SQLite connection before its use, to limit what it may do.
    Raises: StateUnusable.
    """
    engine = create_engine(url, json_serializer=_json)
    if home:
        engine.dialect.kgorch_home = str(home)  # type: ignore[attr-defined]  # read by tables.StatePath
    if guard:
        event.listen(engine, "connect", lambda connection, _: guard(connection))
    if engine.dialect.name == "sqlite":
        path = Path(engine.url.database or "")
        may_log = not (home and shared_disk.is_on_network(path))
        event.listen(engine, "connect", lambda connection, _: _configure(connection, may_log, is_new=_is_empty(path)))
    try:
        _migrate(engine)
    except (OperationalError, DatabaseError, sqlite3.Error) as error:
        raise _unusable(str(engine.url.database), getattr(error, "orig", error)) from None
    return engine


def file_ids(engine: Engine) -> tuple[tuple[int, int] | None, ...]:
    """Device and inode of the database and of its log; None for a file that is missing.

    If they change, the files were replaced. Connections to the former files then go on without an error from SQLite.
    """
    ids: list[tuple[int, int] | None] = []
    for suffix in ("", "-wal"):
        try:
            status = Path(f"{engine.url.database}{suffix}").stat()
            ids.append((status.st_dev, status.st_ino))
        except OSError:
            ids.append(None)
    return tuple(ids)


def _unusable(path: str, error: BaseException | None) -> StateUnusable:
    why = str(error)
    next_step = "see whether its disk is full or read-only, or another program holds it; then try again"
    if "malformed" in why or "not a database" in why:
        next_step = (
            f"put a copy of it back, or mv {path} {path}.broken: then kgorch start PLAN continues from the"
            " checkpoints, which are found without it; only the history is lost"
        )
    return (DatabaseUnusable if isinstance(error, sqlite3.OperationalError) else StateUnusable)(
        f"the database {path} cannot be used", why, next_step=next_step, error_code="KG602"
    )


def _json(value: Any) -> str:
    """JSON without blanks, because samples are many."""
    return json.dumps(value, separators=(",", ":"))


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False


def _configure(connection: Any, may_log: bool, *, is_new: bool) -> None:
    """Prepare a new connection.

    A database that has no write-ahead log stays so: to the machine that exports a shared disk the disk is its own, while others use
    the database.

    Args:
        may_log: the disk is this machine's own, so that there may be a write-ahead log.
    """
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={SET_UP_MS if is_new else BUSY_MS}")
    has_log = is_new or cursor.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    journal = "WAL" if may_log and has_log else "TRUNCATE"
    for pragma in (
        f"journal_mode={journal}",
        f"synchronous={'NORMAL' if journal == 'WAL' else 'FULL'}",  # with a rollback journal less may break the file
        f"journal_size_limit={LOG_BYTES}",
        "foreign_keys=ON",
        "trusted_schema=OFF",
        f"busy_timeout={BUSY_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(engine: Engine) -> None:
    with engine.connect() as connection:
        is_set_up = inspect(connection).has_table("alembic_version")
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar() if is_set_up else None
    if revision == HEAD:
        return
    if revision is not None and revision not in REVISIONS:
        raise StateUnusable(
            f"the database {engine.url.database} was written by a newer kgorch",
            f"its schema is {revision}, this kgorch knows up to {HEAD}",
            next_step="install that newer kgorch, or use another KGORCH_HOME (another KGORCH_DATABASE for a fleet)",
            error_code="KG603",
        )
    if revision is None and _create_tables(engine):
        return
    from kgorch.db.migrations.run import upgrade  # only here: importing Alembic takes 0.35 s

    upgrade(engine, busy_ms=SET_UP_MS)
    engine.dispose()  # closes the connection with the long busy timeout


def _create_tables(engine: Engine) -> bool:
    """Create the tables of a new SQLite database from SCHEMA_FILE. False where it is not new, or not SQLite: Alembic creates
    those of a PostgreSQL, once for a fleet."""
    if engine.dialect.name != "sqlite":
        return False
    with engine.begin() as connection:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={SET_UP_MS}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
            return False  # another process has created it meanwhile, or it is older than its version table
        for statement in SCHEMA_FILE.read_text().split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
    engine.dispose()  # closes the connection with the long busy timeout
    return True
