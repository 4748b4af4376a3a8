"""What the supervisor writes into the database: in order, by a thread of its own.

The loop hands an entry over and goes on. A database that is locked, or whose disk is full, delays the entries; it delays neither an
order to the ranks nor a kill before the wall. Who reads what an entry has written waits for it first (`flush`).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from db import sessions
from orchestrator.launch.launcher import NoRoom

Write = Callable[[], None]

AGAIN_S = 0.5
"""Between two tries of an entry that the database did not take. It has waited for other writers before (db/engine.py)."""

SAY_S = 30.0
"""Between two lines on stderr about a database that cannot be written."""


def say(text: str) -> None:
    """On stderr, if that can be written: it may be a file on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Journal:
    """Of one session. Any thread may write; entries are written in the order in which they were handed over."""

    def __init__(self, engine: Engine, run_id: str, session_id: int) -> None:
        self._engine, self._run_id, self._session_id = engine, run_id, session_id
        self._waiting: deque[Write] = deque()
        self._newest: dict[str, Write] = {}
        self._changed = threading.Condition()
        self._is_closed, self._said_s = False, -SAY_S
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, entry: Write) -> None:
        """An entry is a whole transaction."""
        with self._changed:
            self._waiting.append(entry)
            self._changed.notify_all()

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """An event that moves nothing."""
        self.write(lambda: sessions.note(self._engine, self._run_id, kind, facts, self._session_id))

    def refresh(self, name: str, entry: Write) -> None:
        """An entry that the next one of its name makes worthless: written when nothing else waits, let go if it cannot be."""
        with self._changed:
            self._newest[name] = entry
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all entries are written, at most so long. Whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """The same, and nothing is written any more."""
        is_written = self.flush(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        return is_written

    def _run(self) -> None:
        while entry := self._next():
            entry()

    def _next(self) -> Write | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting or self._newest)
            if self._is_closed:
                return None
            if self._waiting:
                return self._write_first
            refreshed = self._newest.pop(next(iter(self._newest)))
            return lambda: self._refresh(refreshed)

    def _write_first(self) -> None:
        """It stays first while the database does not take it."""
        if self._attempted(self._waiting[0]):
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
        else:
            time.sleep(AGAIN_S)

    def _refresh(self, entry: Write) -> None:
        self._attempted(entry)

    def _attempted(self, entry: Write) -> bool:
        """Whether there is no sense in trying it again."""
        try:
            entry()
        except (OperationalError, NoRoom) as error:
            if time.monotonic() - self._said_s >= SAY_S:
                self._said_s = time.monotonic()
                cause = getattr(error, "orig", error)
                say(f"kgorch: the database cannot be written, {len(self._waiting)} entries wait: {cause}")
            return False
        except Exception as error:  # it would fail again and hold up what comes after it
            say(f"kgorch: an entry cannot be written down: {type(error).__name__}: {error}")
        return True
