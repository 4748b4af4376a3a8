"""The learning rate: a straight rise, then cosines of growing length, each from the full rate down to next to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR

LOWEST = 1e-6


@dataclass(frozen=True)
class Cycles:
    """Attributes:
    warmup: steps of the rise.
    lengths: steps of each cosine up to the end of training, the last one as planned, not as far as training gets in it.
    left: steps of the last cosine that training does not reach.
    """

    warmup: int
    lengths: tuple[int, ...]
    left: int

    def said(self, lr: float, steps_per_epoch: int) -> str:
        """Where the rate ends, in one line, and what to change where it does not end low."""
        last, epochs = self.lengths[-1], [f"{length / steps_per_epoch:g}" for length in self.lengths]
        text = f"rate: warm-up {self.warmup / steps_per_epoch:g} epochs, cosines of {', '.join(epochs)}"
        if not self.left:
            return f"{text}; the last one ends with the training, at {LOWEST:g}"
        gone = (last - self.left) / last
        end = LOWEST + (lr - LOWEST) * (1 + math.cos(math.pi * gone)) / 2
        return (
            f"{text}; training ends at epoch {(last - self.left) / steps_per_epoch:g} of the last one, with a rate of {end:.2e},"
            f" {end / lr:.0%} of the highest: the best weights may be those from the end of the cosine before"
            " (end_low = true stretches the cosines so that the last one ends with the training)"
        )


def cycles(steps: int, warmup: int, first: int, growth: int, *, end_low: bool) -> Cycles:
    """How `steps` steps are divided.

    Args:
        warmup, first: steps of the rise and of the first cosine. growth: how much longer each cosine is than the one before.
        end_low: stretch the cosines that fit whole, so that the last one ends with the training.
    """
    left, lengths = steps - warmup, [first]
    while sum(lengths) < left:
        lengths.append(lengths[-1] * growth)
    if end_low and sum(lengths) != left:
        whole = max(len(lengths) - (sum(lengths) > left), 1)
        parts = sum(growth**number for number in range(whole))
        first = -(-left // parts)
        lengths = [first * growth**number for number in range(whole)]
        return Cycles(warmup, tuple(lengths), 0)  # rounded up: fewer than `parts` steps of the last one do not come
    return Cycles(warmup, tuple(lengths), sum(lengths) - left)


def scheduler(optimizer: torch.optim.Optimizer, plan: Cycles, growth: int) -> SequentialLR:
    """To be stepped once an optimizer step."""
    restarts = CosineAnnealingWarmRestarts(optimizer, T_0=plan.lengths[0], T_mult=growth, eta_min=LOWEST)
    if not plan.warmup:
        return SequentialLR(optimizer, [restarts], [])
    rise = LinearLR(optimizer, start_factor=0.01, total_iters=plan.warmup)
    return SequentialLR(optimizer, [rise, restarts], [plan.warmup])
