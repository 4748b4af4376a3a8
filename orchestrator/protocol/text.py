"""Text that may be stored: every string that comes from a script, a file name or another process goes through here."""

from __future__ import annotations


def escape_surrogates(text: str) -> str:
    r"""The text with lone surrogates written out as `\udcXX`, so that every file and every database takes it.

    Python makes lone surrogates of file names that are not UTF-8, and JSON can spell them; UTF-8 and SQLite refuse them.
    """
    return text.encode("utf-8", "backslashreplace").decode()
