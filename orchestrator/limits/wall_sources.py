"""The walls of a session as they are just now: those that stand, and those that something outside moves.

A source answers at once; what takes time (squeue, a metadata server) it does in a thread of its own.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any, Protocol

from orchestrator.core.wall import Wall, nearest
from orchestrator.limits.quota_ledger import Ledger


class Source(Protocol):
    notes: queue.SimpleQueue[tuple[str, dict[str, Any]]]
    """Entries for the journal, kind and facts."""

    def wall(self, now_s: float) -> Wall | None:
        """Where it stands now; None for none. `now_s`: CLOCK_BOOTTIME."""

    def stop(self) -> None: ...


class Walls:
    def __init__(self, fixed: Wall | None = None, sources: Sequence[Source] = ()) -> None:
        self.fixed, self.sources = fixed, tuple(sources)

    def nearest(self, now_s: float) -> Wall | None:
        return nearest([self.fixed, *(source.wall(now_s) for source in self.sources)])

    @property
    def ledger(self) -> Ledger | None:
        """The quota's, where there is one."""
        return next((source for source in self.sources if isinstance(source, Ledger)), None)

    def stop(self) -> None:
        for source in self.sources:
            source.stop()
