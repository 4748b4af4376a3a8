"""What has changed in a training on its way: known to every rank, so that each checkpoint can tell it, and told by one of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from orchestrator.manifest import Change
from orchestrator.wire import Launch, Message, Remedied, RungTaken

KEPT = 1000
"""Remedies that a manifest lists at most: a scaler may leave out thousands of batches, and the old ones steer nothing any more."""


class AdjustmentLog:
    """Attributes:
    taken: as a manifest holds them, oldest first, those of earlier attempts among them.
    """

    def __init__(self, launch: Launch, send: Callable[[Message], None]) -> None:
        self.taken = [Change.of(row) for row in launch.changes]
        self._device, self._world, self._send = launch.device, launch.ranks, send
        self._bound()

    def add(self, told: RungTaken | Remedied, *, tells: bool) -> None:
        """All ranks take this one now. `tells`: this rank tells the supervisor."""
        row: dict[str, Any] = {"why": told.why, "at": datetime.now(UTC).isoformat(), "world": self._world, "up": False}
        if isinstance(told, RungTaken):
            row |= {
                "step": told.step,
                "rung": told.rung,
                "device": self._device,
                "settings": {"settings": told.settings},
            }
            row |= {"up": told.up, "changes_result": told.changes_result}
        else:
            entry = {name: value for name, value in told.change.items() if name != "step"}
            row |= {"step": told.change["step"], "rung": told.remedy, "device": "", "settings": entry}
            row |= {"changes_result": True}
        self.taken.append(Change.of(row))
        self._bound()
        if tells:
            self._send(told)

    def _bound(self) -> None:
        remedies = [item for item in self.taken if "settings" not in item.settings]
        old = {id(item) for item in remedies[:-KEPT]}
        self.taken = [item for item in self.taken if id(item) not in old]
