"""Alembic revisions, forward only; they ship with the package and run by themselves (db/engine.py)."""

from pathlib import Path

KNOWN = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""All revisions, oldest first: so that opening an up-to-date database needs no Alembic. A test compares it with them."""

HEAD = KNOWN[-1]

WHOLE = Path(__file__).with_name("whole.sql")
"""What all of them come to: a new SQLite database is made by it, without Alembic. `python -m db.migrations.run` writes it."""
