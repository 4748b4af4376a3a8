"""Alembic revisions, forward only; they ship with the package and run by themselves (db/engine.py)."""

KNOWN = ("0001", "0002", "0003", "0004")
"""All revisions, oldest first: so that opening an up-to-date database needs no Alembic. A test compares it with them."""

HEAD = KNOWN[-1]
