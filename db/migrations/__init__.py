"""Alembic revisions. They only go forward, ship with the package, and run when a database is opened (db/engine.py)."""

from pathlib import Path

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0014", "0015")
"""All revisions, oldest first. Listed here because importing Alembic to ask for them takes 0.35 s; a test compares the two."""

HEAD = REVISIONS[-1]

SCHEMA_FILE = Path(__file__).with_name("schema.sql")
"""The result of all revisions, from which a new SQLite database is created. `python -m kgorch.db.migrations.run` writes it."""
