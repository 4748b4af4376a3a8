"""Alembic, driven from code: no ini file, the package is the script folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine

from kgorch.db import postgres
from kgorch.db.migrations import HEAD, SCHEMA_FILE


def config() -> Config:
    alembic = Config()
    alembic.set_main_option("script_location", str(Path(__file__).parent))
    alembic.set_main_option("path_separator", "os")
    return alembic


def upgrade(engine: Engine, to: str = "head", *, busy_ms: int = 0) -> None:
    """Migrate a database to a revision.

    Args:
        busy_ms: how long to wait for another process's lock. BEGIN IMMEDIATE takes the write lock before the revision is
            read, so that two processes that open the same old database do not both migrate it.
    """
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(f"PRAGMA busy_timeout={busy_ms}")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            postgres.lock_set_up(connection)
        alembic = config()
        alembic.attributes["connection"] = connection
        command.upgrade(alembic, to)


def schema(engine: Engine) -> str:
    """SQL statements that create this SQLite database without its rows, but with its revision.

    Sorted by name, tables first, because batch migrations recreate indexes in no fixed order.
    """
    with engine.connect() as connection:
        statements = connection.exec_driver_sql(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type = 'index', name"
        ).scalars()
        return "".join(f"{sql};\n\n" for sql in statements) + f"INSERT INTO alembic_version VALUES ('{HEAD}');\n"


if __name__ == "__main__":  # after a new revision: python -m kgorch.db.migrations.run
    engine = create_engine("sqlite://")
    upgrade(engine)
    SCHEMA_FILE.write_text(schema(engine))
