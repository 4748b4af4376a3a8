"""Shows a session to whoever started it, without waiting: a terminal that was stopped with Ctrl-S takes nothing for hours."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kgorch.core.session.events import Event, JournalNote
from kgorch.db.rows import SessionInfo

Observer = Callable[[SessionInfo], None]
Listener = Callable[[Event | JournalNote], None]

SHOWN_S = 2.0
"""Seconds that the end of a session waits for the display."""


def _nothing(_: object) -> None:
    pass


class Observers:
    """Calls an observer and a listener in a thread of their own, in the order in which things happened.

    Args:
        observer: is shown the session's row after a change; of several that wait, the newest.
        listener: is told each event, and each note of the journal.
        on_error: is given what one of them raises. A display that fails is not called again where it raised OSError: the terminal
            is gone, the training is not.
    """

    def __init__(self, observer: Observer, listener: Listener, on_error: Callable[[Exception], None]) -> None:
        self._observer, self._listener, self._on_error = observer, listener, on_error
        self._waiting: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._changed = threading.Condition()
        self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="observers", daemon=True)
        self._thread.start()

    def show(self, row: SessionInfo) -> None:
        with self._changed:
            if self._waiting and self._waiting[-1][0] is self._observer:
                self._waiting.pop()
            self._waiting.append((self._observer, row))
            self._changed.notify_all()

    def tell(self, event: Event | JournalNote) -> None:
        with self._changed:
            self._waiting.append((self._listener, event))
            self._changed.notify_all()

    def close(self) -> None:
        """Once all is shown, or after SHOWN_S."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_busy, SHOWN_S)
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                call, value = self._waiting.popleft()
                self._is_busy = True
            try:
                call(value)
            except OSError:
                self._observer, self._listener = _nothing, _nothing
            except Exception as error:
                self._on_error(error)
