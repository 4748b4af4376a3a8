"""What has changed in a training on its way: known to every rank, so that each checkpoint can tell it, and told by one of them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from orchestrator.manifest import Change
from orchestrator.wire import Launch, Message, Remedied, RungTaken

KEPT = 1000
"""Remedies that a manifest lists at most: a scaler may leave out thousands of batches, and the old ones steer nothing any more."""


class Changes:
    """Attributes:
    taken: oldest first, those of earlier attempts among them.
    """

    def __init__(self, launch: Launch, send: Callable[[Message], None]) -> None:
        self.taken = [Change.of(row) for row in launch.changes]
        self._device, self._world, self._send = launch.device, launch.ranks, send

    def add(self, told: RungTaken | Remedied, *, tells: bool) -> None:
        """All ranks take this one now. `tells`: this rank tells the supervisor."""
        at = datetime.now(UTC).isoformat()
        if isinstance(told, RungTaken):
            row = Change(
                told.step, told.rung, told.why, at, {"settings": told.settings}, self._device, self._world,
                up=told.up, changes_result=told.changes_result,
            )  # fmt: skip
        else:
            entry = {name: value for name, value in told.change.items() if name != "step"}
            row = Change(told.change["step"], told.remedy, told.why, at, entry, "", self._world, changes_result=True)
        self.taken.append(row)
        if tells:
            self._send(told)

    def listed(self) -> tuple[Change, ...]:
        """As a manifest holds them."""
        old = [item for item in self.taken if "settings" not in item.settings][:-KEPT]
        return tuple(item for item in self.taken if item not in old) if old else tuple(self.taken)
