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


def upgrade(engine: Engine, to: str = "head") -> None:
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql(
                "BEGIN IMMEDIATE"
            )  # two processes that open a new database come one after the other
        made = config()
        made.attributes["connection"] = connection
        command.upgrade(made, to)
