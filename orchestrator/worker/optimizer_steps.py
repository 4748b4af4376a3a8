"""Whether an optimizer has stepped since the last boundary: how a boundary within gradient accumulation is told from one after a
step.

A save between two backwards of one optimizer step would lose the gradients that were summed so far, because checkpoints do not
hold gradients. So a boundary counts only when no sum of gradients is open. With several optimizers it counts when one of them has
stepped: what lies in the gradients of the others may be left over from its loss, and never be used. One that is used is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Observes the steps of all optimizers of this process.

    Attributes:
        has_stepped: an optimizer has stepped since `begin`.
        is_used: an optimizer has stepped before.
        summing: classes of optimizers that have used a gradient which was summed over such a boundary.
        stepped: the optimizers that have stepped, as long as they live; whoever looks at it may clear it.
    """

    def __init__(self) -> None:
        self.has_stepped = self.is_used = False
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.summing: set[str] = set()
        self._of_step: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # Of each optimizer its first gradient: the one that its newest step has used, and one that waited at a boundary.
        self._used: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, int]] = weakref.WeakKeyDictionary()
        self._waiting: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self._handle: Any = None

    def begin(self) -> None:
        """A step begins."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._on_step)
        self.has_stepped = False
        self._of_step.clear()

    def is_accumulating(self, tracked: Mapping[str, Any]) -> bool:
        """Whether gradients of a tracked optimizer wait for its step.

        After a step that a GradScaler has skipped there are none, if the script clears them: then the step counts.
        """
        optimizers = [thing for thing in tracked.values() if isinstance(thing, torch.optim.Optimizer)]
        if not self.has_stepped:
            return any(_gradient(item) is not None for item in optimizers)
        for item in optimizers:
            if item not in self._of_step and (gradient := _gradient(item)) is not None:
                used, version = self._used.get(item, (lambda: None, 0))
                if used() is not gradient or version != gradient._version:
                    self._waiting[item] = weakref.ref(gradient)
        return False

    def close(self) -> None:
        """Stop observing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_stepped = self.is_used = True
        self.stepped.add(optimizer)
        self._of_step.add(optimizer)
        if (gradient := _gradient(optimizer)) is not None:
            if (waited := self._waiting.pop(optimizer, None)) is not None and waited() is gradient:
                self.summing.add(type(optimizer).__name__)
            self._used[optimizer] = weakref.ref(gradient), gradient._version


def _gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The first one that there is."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return next((weight.grad for weight in weights if weight.grad is not None), None)
