"""Whether an optimizer has stepped since the last boundary: how a boundary within gradient accumulation is told from one after a
step.

A save between two backwards of one optimizer step would lose the gradients that were summed so far, because checkpoints do not
hold gradients. So a boundary counts only when no sum of gradients is open.
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
        stepped: the optimizers that have stepped, as long as they live; whoever looks at it may clear it.
    """

    def __init__(self) -> None:
        self.has_stepped = self.is_used = False
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._handle: Any = None

    def begin(self) -> None:
        """A step begins."""
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._on_step)
        self.has_stepped = False

    def is_accumulating(self, tracked: Mapping[str, Any]) -> bool:
        """Whether gradients of a tracked optimizer wait for its step.

        After a step that a GradScaler has skipped there are none, if the script clears them: then the step counts.
        """
        if self.has_stepped:
            return False
        optimizers = (thing for thing in tracked.values() if isinstance(thing, torch.optim.Optimizer))
        return any(
            weight.grad is not None for item in optimizers for group in item.param_groups for weight in group["params"]
        )

    def close(self) -> None:
        """Stop observing."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_stepped = self.is_used = True
        self.stepped.add(optimizer)
