"""Alembic, driven from code: no ini file, the package is the script folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine


def config() -> Config:
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent))
    made.set_main_option("path_separator", "os")
    return made


def upgrade(engine: Engine, to: str = "head", *, busy_ms: int = 0) -> None:
    """Bring a database to a revision. `busy_ms`: how long another may hold it; two that open a new one come one after the other."""
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(f"PRAGMA busy_timeout={busy_ms}")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, to)
