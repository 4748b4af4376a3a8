"""Alembic, driven from code: no ini file, the package is the script folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine

from db.migrations import HEAD, WHOLE


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


def schema(engine: Engine) -> str:
    """The statements that make an SQLite database as this one is, without its rows but with its revision. By name: migrations
    lay indexes in no order."""
    with engine.connect() as connection:
        made = connection.exec_driver_sql(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type = 'index', name"
        ).scalars()
        return "".join(f"{sql};\n\n" for sql in made) + f"INSERT INTO alembic_version VALUES ('{HEAD}');\n"


if __name__ == "__main__":  # after a new revision: python -m db.migrations.run
    new = create_engine("sqlite://")
    upgrade(new)
    WHOLE.write_text(schema(new))
