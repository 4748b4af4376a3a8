"""The figures that a script reports: plain numbers for status and checkpoints, without making the training wait for its device.

Only the thread that trains touches a tensor: it copies a figure when it is reported, and takes it over once the copy has arrived.
The thread that tells the supervisor reads plain numbers. It used to read the tensors itself: with a device that never came to an
end it then heard no order, missed the deadline, and kept a failed rank from ending.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from orchestrator.errors import KgorchError
from orchestrator.worker.host_copy import HostCopy

ON_THE_WAY = 2
"""Copies of one figure: the one that arrives next, and the newest. Those between are overtaken."""


class Metrics:
    """Attributes:
    pending: names of figures that have not arrived; empty unless tensors on a GPU are reported.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self.pending: dict[str, deque[HostCopy]] = {}

    @property
    def values(self) -> dict[str, float]:
        """The newest that have arrived; from any thread."""
        return dict(self._values)

    def restore(self, values: dict[str, float]) -> None:
        self._values = dict(values)

    def report(self, name: str, value: Any) -> None:
        """A number, or a tensor of one element. Raises: KgorchError for anything else."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self._values[name] = _number(name, value)
        elif value.is_cuda:
            copies = self.pending.setdefault(name, deque())
            if len(copies) == ON_THE_WAY:
                copies.pop()
            copies.append(HostCopy(value.detach().reshape(())))
        else:
            self._values[name] = _number(name, value.detach())

    def collect(self, *, wait: bool = False) -> None:
        """Take over the figures that have arrived; with `wait`, all that were reported."""
        for name in list(self.pending):
            copies = self.pending[name]
            while copies and (wait or copies[0].is_complete()):
                copy = copies.popleft()
                copy.wait()
                self._values[name] = _number(name, copy.values)
            if not copies:
                del self.pending[name]


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise KgorchError(
            f"session.report({name}=…): expected a number or a tensor of one element, found {kind}",
            next_step=f"report {name} as one figure, its mean perhaps",
        ) from None
