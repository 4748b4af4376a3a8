"""Whether an optimizer has stepped since the last boundary: how a boundary within gradient accumulation is told from one after a
step.

A save between two backwards of one optimizer step would lose the gradients that were summed so far, because checkpoints do not
hold gradients. So a boundary counts only when no sum of gradients is open. With several optimizers it counts when one of them has
stepped: what lies in the gradients of the others may be left over from its loss, and never be used. One that is used is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Observes the steps of all optimizers of this process.

    Attributes:
        has_stepped: an optimizer has stepped since `begin`.
        is_used: an optimizer has stepped before.
        summing: classes of optimizers that have used a gradient which was summed over such a boundary.
    """

    def __init__(self) -> None:
        self.has_stepped = self.is_used = False
        self.summing: set[str] = set()
        self._records: dict[int, _ObservedOptimizer] = {}  # by the optimizer's id, as long as it lives
        self._step = 0
        self._handle: Any = None

    def begin(self) -> None:
        """A step begins."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._on_step)
        self.has_stepped = False
        self._step += 1

    def take_stepped(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped since the last call and live."""
        records = [record for record in self._records.values() if record.is_new]
        for record in records:
            record.is_new = False
        return [owner for record in records if (owner := record.owner()) is not None]

    def is_accumulating(self, tracked: Mapping[str, Any]) -> bool:
        """Whether gradients of a tracked optimizer wait for its step.

        After a step that a GradScaler has skipped there are none, if the script clears them: then the step counts.
        """
        for item in tracked.values():
            if not isinstance(item, torch.optim.Optimizer):
                continue
            record = self._records.get(id(item)) or self._record_of(item)
            if record.step == self._step or (gradient := _gradient(item)) is None:
                continue
            if not self.has_stepped:
                return True
            if record.used() is not gradient or record.version != gradient._version:
                record.waiting = weakref.ref(gradient)
        return False

    def close(self) -> None:
        """Stop observing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_stepped = self.is_used = True
        record = self._records.get(id(optimizer)) or self._record_of(optimizer)
        record.step, record.is_new = self._step, True
        if (gradient := _gradient(optimizer)) is not None:
            if record.waiting() is gradient:
                self.summing.add(type(optimizer).__name__)
            record.waiting, record.used, record.version = _nothing, weakref.ref(gradient), gradient._version

    def _record_of(self, optimizer: torch.optim.Optimizer) -> _ObservedOptimizer:
        key, records = id(optimizer), self._records
        record = records[key] = _ObservedOptimizer(weakref.ref(optimizer, lambda _: records.pop(key, None)))
        return record


def _nothing() -> None: ...


class _ObservedOptimizer:
    """Of one optimizer.

    Attributes:
        owner: a reference to it.
        step: number of the step in which it has stepped last; -1 for never.
        is_new: it has stepped since `take_stepped`.
        used, version: a reference to the first gradient that its newest step has used, and PyTorch's count of its writes then.
        waiting: the same of a gradient that waited at a boundary.
    """

    __slots__ = ("is_new", "owner", "step", "used", "version", "waiting")

    def __init__(self, owner: weakref.ref[torch.optim.Optimizer]) -> None:
        self.owner, self.step, self.is_new, self.version = owner, -1, False, 0
        self.used: Callable[[], Any] = _nothing
        self.waiting: Callable[[], Any] = _nothing


def _gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The first one that there is."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if (gradient := weight.grad) is not None:
                return gradient  # type: ignore[no-any-return]
    return None
