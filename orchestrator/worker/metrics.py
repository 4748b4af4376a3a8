"""The figures that a script reports: plain numbers for status and checkpoints, without making the training wait for its device.

Only the thread that trains touches a tensor: it copies a figure when it is reported, and takes it over once the copy has arrived.
The thread that tells the supervisor reads plain numbers. It used to read the tensors itself: with a device that never came to an
end it then heard no order, missed the deadline, and kept a failed rank from ending.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from orchestrator.core.metric_curve import Mark
from orchestrator.errors import KgorchError
from orchestrator.protocol.messages import MAX_METRIC_NAME, MAX_METRICS, MAX_METRICS_BYTES
from orchestrator.worker.host_copy import HostCopy

NUMBER_BYTES = 32
"""Of a figure as JSON, with what stands around it."""

ON_THE_WAY = 2
"""Copies of one figure: the one that arrives next, and the newest. Those between are overtaken."""


class Metrics:
    """Attributes:
    pending: names of figures that have not arrived; empty unless tensors on a GPU are reported.
    dropped: why a name was not kept, the first time that this happened; empty until then.
    on_arrival: is told of each figure that has arrived, with the mark that it was reported under.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # as reported → as kept; of those that are kept alone
        self._names_bytes, self.dropped = 0, ""
        self._values: dict[str, float] = {}
        self._measured: dict[str, int] = {}
        self.pending: dict[str, deque[tuple[HostCopy, Mark | None]]] = {}
        self.on_arrival: Callable[[str, float, Mark], None] | None = None

    @property
    def values(self) -> dict[str, float]:
        """The newest that have arrived; from any thread."""
        return dict(self._values)

    @property
    def measured(self) -> dict[str, int]:
        """The step on whose weights each of them was measured; without those of which nobody knows it."""
        return dict(self._measured)

    def restore(self, values: Mapping[str, float], measured: Mapping[str, int]) -> None:
        self._values = {kept: value for name, value in values.items() if (kept := self._admit(name)) is not None}
        self._measured = {name: step for name, step in measured.items() if name in self._values}

    def report(self, name: str, value: Any, mark: Mark | None = None) -> None:
        """A number, or a tensor of one element, measured on the weights after `mark.step` steps. A name more
        than can be told and saved is passed over (`dropped`).

        Raises: KgorchError for any other value.
        """
        kept = self._names[name] if name in self._names else self._admit(name)
        if kept is None:
            return
        name = kept
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self._arrived(name, _number(name, value), mark)
        elif value.is_cuda:
            copies = self.pending.setdefault(name, deque())
            if len(copies) == ON_THE_WAY:
                copies.pop()
            copies.append((HostCopy(value.detach().reshape(())), mark))
        else:
            self._arrived(name, _number(name, value.detach()), mark)

    def _admit(self, name: str) -> str | None:
        """The name under which a figure is kept: without control characters, which a terminal would obey. None where it is not."""
        kept = "".join(letter if letter.isprintable() else "�" for letter in name)
        size = len(json.dumps(kept)) + NUMBER_BYTES
        if len(name) > MAX_METRIC_NAME:
            why = f"{kept[:40]}… has {len(name)} letters, more than {MAX_METRIC_NAME}"
        elif len(self._names) >= MAX_METRICS:
            why = f"{kept} and later ones are more than {MAX_METRICS} names"
        elif self._names_bytes + size > MAX_METRICS_BYTES:
            why = f"{kept} and later ones are more than {MAX_METRICS_BYTES >> 10} KiB of names"
        else:
            self._names[name], self._names_bytes = kept, self._names_bytes + size
            return kept
        self.dropped = self.dropped or why
        return None

    def collect(self, *, wait: bool = False) -> None:
        """Take over the figures that have arrived; with `wait`, all that were reported."""
        for name in list(self.pending):
            copies = self.pending[name]
            while copies and (wait or copies[0][0].is_complete()):
                copy, mark = copies.popleft()
                copy.wait()
                self._arrived(name, _number(name, copy.values), mark)
            if not copies:
                del self.pending[name]

    def _arrived(self, name: str, value: float, mark: Mark | None) -> None:
        self._values[name] = value
        if mark is not None:
            self._measured[name] = mark.step
            if self.on_arrival:
                self.on_arrival(name, value, mark)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise KgorchError(
            f"session.report({name}=…): expected a number or a tensor of one element, found {kind}",
            next_step=f"report {name} as one figure, its mean perhaps",
        ) from None
