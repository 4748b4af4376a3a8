"""What the supervisor writes down, in order. While the database cannot be written (disk full, locked) entries wait:
training goes on."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from db import sessions

Write = Callable[[], None]


def say(text: str) -> None:
    """On stderr, if that can be written: it may be a file on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class NoRoom(Exception):
    """An entry that is a file, on a disk that takes nothing now."""


class Journal:
    """Of one session. Not for several threads: the loop alone writes."""

    def __init__(self, engine: Engine, run_id: str, session_id: int) -> None:
        self._engine, self._run_id, self._session_id = engine, run_id, session_id
        self._waiting: deque[Write] = deque()

    @property
    def is_behind(self) -> bool:
        return bool(self._waiting)

    def write(self, entry: Write) -> None:
        """Write now, or after what waits already. An entry is a whole transaction."""
        self._waiting.append(entry)
        self.catch_up()

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """An event that moves nothing."""
        self.write(lambda: sessions.note(self._engine, self._run_id, kind, facts, self._session_id))

    def catch_up(self) -> None:
        while self._waiting:
            try:
                self._waiting[0]()
            except (OperationalError, NoRoom) as error:
                cause = getattr(error, "orig", error)
                say(f"kgorch: the database cannot be written, {len(self._waiting)} entries wait: {cause}")
                return
            except Exception as error:  # it would fail again and hold up what comes after it
                say(f"kgorch: an entry cannot be written down: {type(error).__name__}: {error}")
            self._waiting.popleft()
