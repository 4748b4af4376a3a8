"""The metrics that a script reports, as plain numbers for status and checkpoints, without making the training wait for its device.

Only the thread that trains touches a tensor: it starts a copy when a value is reported, and takes the number when the copy has
arrived. The link's thread reads plain numbers. When it read the tensors itself, a device that hung kept it from receiving orders,
so it missed the deadline and kept a failed rank from ending.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kgorch.core.codes import EventKind
from kgorch.core.metrics.metric_curve import Mark
from kgorch.errors import KgorchError
from kgorch.protocol.messages import MAX_METRIC_NAME, MAX_METRICS, MAX_METRICS_BYTES
from kgorch.worker.telemetry.event_sender import EventSender
from kgorch.worker.telemetry.host_copy import HostCopy

NUMBER_BYTES = 32
"""Bytes of a number as JSON, with the punctuation around it."""

ON_THE_WAY = 2
"""Copies of one metric that are under way: the one that arrives next, and the newest. Those between are dropped."""


class ReportedMetrics:
    """The newest value of each metric.

    Args:
        events: None on ranks other than 0, whose dropped names would be the same.

    Attributes:
        pending: copies that have not arrived, by name; empty unless tensors on a GPU are reported.
        dropped: why a name was not kept, the first time that this happened; empty until then.
        on_arrival: called with name, value and mark of each value that has arrived.
    """

    def __init__(self, events: EventSender | None = None) -> None:
        self._events, self._is_drop_reported = events, False
        self._names: dict[str, str] = {}  # as reported → as kept
        self._names_bytes, self.dropped = 0, ""
        self._values: dict[str, float] = {}
        self._measured: dict[str, int] = {}
        self.pending: dict[str, deque[tuple[HostCopy, Mark | None]]] = {}
        self.on_arrival: Callable[[str, float, Mark], None] | None = None

    @property
    def values(self) -> dict[str, float]:
        """The newest values that have arrived. From any thread."""
        return dict(self._values)

    @property
    def measured(self) -> dict[str, int]:
        """The step on whose weights each metric was measured, where that is known."""
        return dict(self._measured)

    def restore(self, values: Mapping[str, float], measured: Mapping[str, int]) -> None:
        """Set the values of a checkpoint."""
        self._values = {
            admitted: value for name, value in values.items() if (admitted := self._admit(name)) is not None
        }
        self._measured = {name: step for name, step in measured.items() if name in self._values}

    def report(self, name: str, value: Any, mark: Mark | None = None) -> None:
        """Record a number, or a tensor of one element, measured on the weights after `mark.step` steps.

        A name beyond the limits of messages and manifests is dropped (`dropped`), which is printed and sent once.

        Raises:
            KgorchError: the value is neither.
        """
        admitted = self._names[name] if name in self._names else self._admit(name)
        if self.dropped and not self._is_drop_reported:
            self._report_drop()
        if admitted is None:
            return
        name = admitted
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            self._arrived(name, _number(name, value), mark)
        elif value.is_cuda:
            copies = self.pending.setdefault(name, deque())
            if len(copies) == ON_THE_WAY:
                copies.pop()
            copies.append((HostCopy(value.detach().reshape(())), mark))
        else:
            self._arrived(name, _number(name, value.detach() if value.requires_grad else value), mark)

    def _admit(self, name: str) -> str | None:
        """The name under which a metric is kept, without control characters, which a terminal would obey. None: it is dropped."""
        admitted = "".join(letter if letter.isprintable() else "�" for letter in name)
        size = len(json.dumps(admitted)) + NUMBER_BYTES
        if len(name) > MAX_METRIC_NAME:
            why = f"{admitted[:40]}… has {len(name)} letters, more than {MAX_METRIC_NAME}"
        elif len(self._names) >= MAX_METRICS:
            why = f"{admitted} and later ones are more than {MAX_METRICS} names"
        elif self._names_bytes + size > MAX_METRICS_BYTES:
            why = f"{admitted} and later ones are more than {MAX_METRICS_BYTES >> 10} KiB of names"
        else:
            self._names[name], self._names_bytes = admitted, self._names_bytes + size
            return admitted
        self.dropped = self.dropped or why
        return None

    def _report_drop(self) -> None:
        self._is_drop_reported = True
        print(f"kgorch: session.report(): not kept: {self.dropped}", flush=True)
        if self._events is not None:
            self._events.send(EventKind.METRICS_DROPPED, {"why": self.dropped})

    def collect(self, *, wait: bool = False) -> None:
        """Take the numbers that have arrived; with `wait`, all that were reported."""
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
    except OverflowError:  # an int beyond the range of floats
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise KgorchError(
            f"session.report({name}=…): expected a number or a tensor of one element, found {kind}",
            next_step=f"report {name} as one figure, its mean perhaps",
        ) from None
