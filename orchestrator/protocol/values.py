"""Bounds of what may be stored: every text and number that comes from a script, a file name or another process meets them."""

from __future__ import annotations

MAX_NUMBER = 1 << 62
"""Exclusive bound of steps, bytes and seconds: SQLite's integers have 64 bits."""


def escape_surrogates(text: str) -> str:
    r"""The text with lone surrogates written out as `\udcXX`, so that every file and every database takes it.

    Python makes lone surrogates of file names that are not UTF-8, and JSON can spell them; UTF-8 and SQLite refuse them.
    """
    return text.encode("utf-8", "backslashreplace").decode()
