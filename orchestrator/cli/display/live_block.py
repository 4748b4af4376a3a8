"""Rows at the end of a terminal's output that are rewritten in place, while messages scroll above them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO

from kgorch.cli.display import render
from kgorch.core import text as texts

ERASE_ROW = "\r\x1b[2K"
"""Back to the first column, and erase the row (ECMA-48, EL)."""

ROW_UP = "\x1b[1A"


class LiveBlock:
    """Rows of a terminal. They end a column before the edge, because some terminals wrap a full row."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rows: tuple[str, ...] = ()

    def size(self) -> tuple[int, int]:
        """Columns and lines that may be used."""
        return max(render.terminal_width(self._stream) - 1, 20), terminal_height(self._stream)

    def show(self, rows: Sequence[str]) -> None:
        if tuple(rows) != self._rows:
            self._write(self._erased() + "\n".join(rows))
            self._rows = tuple(rows)

    def above(self, text: str) -> None:
        """Print lines that stay, and the rows again below them."""
        self._write(self._erased() + text + "\n" + "\n".join(self._rows))

    def clear(self) -> None:
        if self._rows:
            self._write(self._erased())
            self._rows = ()

    def _erased(self) -> str:
        """The sequence that erases the rows, from the last to the first; one empty row is left for the cursor."""
        count = rows_taken(self._rows, render.terminal_width(self._stream))
        return ERASE_ROW + (ROW_UP + ERASE_ROW) * (count - 1)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def rows_taken(rows: Sequence[str], columns: int) -> int:
    """Rows that these take on a terminal that has become so narrow since they were written, and wraps them; at least 1."""
    return max(1, sum(max(1, -(-texts.width(row) // max(columns, 1))) for row in rows))


def terminal_height(stream: TextIO) -> int:
    """Lines; 24 if the terminal does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).lines or 24
    except (OSError, ValueError, AttributeError):
        return 24
