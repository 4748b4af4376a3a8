"""The rungs and remedies of a stage so far. Every rank keeps them, for the manifests; one rank reports each to the supervisor."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kgorch.checkpoint.manifest import Adjustment
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Message, RemedyApplied, RungApplied

KEPT = 1000
"""Remedies that a manifest lists at most: a GradScaler may skip thousands of batches, and the oldest have no effect any more."""


class AdjustmentLog:
    """The changes of a stage.

    Attributes:
        entries: as a manifest holds them, oldest first, including those of earlier attempts.
    """

    def __init__(self, launch: LaunchSpec, send: Callable[[Message], None]) -> None:
        self.entries = [Adjustment.from_document(row) for row in launch.changes]
        self._device, self._world, self._send = launch.device, launch.ranks, send
        self._bound()

    def add(self, message: RungApplied | RemedyApplied, *, tells: bool) -> None:
        """Record a change that all ranks make now.

        Args:
            tells: this rank reports it to the supervisor.
        """
        row: dict[str, Any] = {
            "why": message.why,
            "at": datetime.now(UTC).isoformat(),
            "world": self._world,
            "up": False,
        }
        if isinstance(message, RungApplied):
            row |= {
                "step": message.step,
                "rung": message.rung,
                "device": self._device,
                "settings": {"settings": message.settings},
            }
            row |= {"up": message.up, "changes_result": message.changes_result}
        else:
            entry = {name: value for name, value in message.change.items() if name != "step"}
            row |= {
                "step": message.change["step"],
                "rung": message.remedy,
                "device": "",
                "settings": entry,
            }
            row |= {"changes_result": True}
        self.entries.append(Adjustment.from_document(row))
        self._bound()
        if tells:
            self._send(message)

    def _bound(self) -> None:
        remedies = [item for item in self.entries if "settings" not in item.settings]
        old = {id(item) for item in remedies[:-KEPT]}
        self.entries = [item for item in self.entries if id(item) not in old]
