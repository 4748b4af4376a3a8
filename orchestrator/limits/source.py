"""The interface of a source of time limits that can change: the quota, Slurm, or a cloud that reclaims its machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from kgorch.core.codes import Note
from kgorch.core.limits.wall import Wall


class News:
    """What a source reports: entries for the journal, and that its wall may have moved. Thread-safe.

    A source works before its session has a supervisor. Until then its entries are kept here.

    Attributes:
        undelivered: entries that nobody has received yet, kind and facts.
    """

    def __init__(self) -> None:
        self.undelivered: list[tuple[str, dict[str, Any]]] = []
        self._guard = threading.Lock()
        self._note: Note = lambda kind, facts: self.undelivered.append((kind, facts))
        self._on_move: Callable[[], None] = lambda: None

    def note(self, kind: str, facts: dict[str, Any]) -> None:
        """Report an entry for the journal."""
        with self._guard:
            self._note(kind, facts)

    def wall_moved(self) -> None:
        """Report that the source's wall may be another one. Whoever receives this compares."""
        self._on_move()

    def deliver(self, note: Note, on_move: Callable[[], None]) -> None:
        """Call these from here on. The entries that wait come first, and `on_move` once: the wall may have moved before."""
        # under the guard: an entry that the source's thread reports now must not overtake those before it
        with self._guard:
            for kind, facts in self.undelivered:
                note(kind, facts)
            self.undelivered.clear()
            self._note, self._on_move = note, on_move
        on_move()


class Source(Protocol):
    """A time limit that can change. It answers at once: what takes time (squeue, a metadata server) runs in a thread of its own."""

    news: News

    def wall(self, now_s: float) -> Wall | None:
        """The limit as it is known now; None for none. Args: now_s: CLOCK_BOOTTIME."""

    def stop(self) -> None: ...
