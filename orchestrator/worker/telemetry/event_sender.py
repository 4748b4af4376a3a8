"""Entries of the run's journal that a rank writes, and the report on how exact a resume is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kgorch.core.codes import EventKind
from kgorch.protocol import transport
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry, Message


class EventSender:
    """Sends journal entries to the supervisor. In a script that runs alone it sends nothing."""

    def __init__(self) -> None:
        self._attempt = ""
        self._send: Callable[[Message], None] | None = None

    def connect(self, attempt: str, send: Callable[[Message], None]) -> None:
        """Send through this function from now on."""
        self._attempt, self._send = attempt, send

    def send(self, kind: str, facts: dict[str, str]) -> None:
        """From any thread; does not wait."""
        if self._send is not None:
            self._send(JournalEntry(self._attempt, kind, facts))


def send_late(launch: LaunchSpec, kind: str, facts: dict[str, str]) -> None:
    """Send an entry when the session is over, on a connection of its own. It is lost where nobody listens."""
    with contextlib.suppress(OSError), transport.connect(launch.socket) as supervisor:
        transport.send(supervisor, JournalEntry(launch.attempt, kind, facts))


class Exactness:
    """What is known about the promise of identical results, in words by topic: of the loader, the devices, the ranks.

    Args:
        events: None on ranks other than 0, whose findings would be the same.

    Attributes:
        facts: by topic.
    """

    def __init__(self, events: EventSender | None) -> None:
        self.facts: dict[str, str] = {}
        self._events = events

    def update(self, **facts: str) -> None:
        """Record the facts, and send all of them when one has changed. Called at every step."""
        if not facts.items() <= self.facts.items():
            self.facts |= facts
            if self._events is not None:
                self._events.send(EventKind.EXACTNESS, dict(self.facts))
