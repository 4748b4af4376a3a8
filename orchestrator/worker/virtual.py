"""Fewer processes than the run began with: each plays several of its ranks, one after another.

A *virtual rank* has its own slice of each global batch and its own random states; so what a rank would have computed is
computed, whoever does it. BatchNorm's running statistics are rank 0's, as DistributedDataParallel broadcasts them at each
step's first forward. Gradients are summed in the order of ranks: with two virtual ranks on one process the bits are those
of two processes (a sum of two terms does not hang on their order, a factor of 1/2 rounds nothing); with more they differ
in the order of summation alone. Measured: FACTS.md, "Exact resume".
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from orchestrator.worker import state


@dataclass
class Ranks:
    """Which virtual ranks this process plays: `first` to `end` of `count`, on `world_size` processes in all."""

    count: int
    first: int
    end: int
    world_size: int
    random_states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of the played ranks beyond the first, whose states are the process's own."""

    @property
    def are_split(self) -> bool:
        return self.count != self.world_size

    @property
    def mine(self) -> range:
        return range(self.first, self.end)

    def said(self) -> str:
        if not self.are_split:
            return f"{self.count}"
        exact = "the same bits" if (self.count, self.world_size) == (2, 1) else "sums in another order, else the same"
        return f"{self.count} virtual ranks on {self.world_size}: {exact}"


def ranks_of(count: int, rank: int, world_size: int) -> Ranks:
    """`count` virtual ranks over fewer or as many processes, in order."""
    return Ranks(count, rank * count // world_size, (rank + 1) * count // world_size, world_size)


@contextmanager
def playing(
    ranks: Ranks, rank: int, device: torch.device, modules: Iterable[nn.Module], before: list[torch.Tensor]
) -> Iterator[None]:
    """Forward and backward as a virtual rank beyond the first: with its chance, and buffers as they were before the step."""
    mine = state.rng_state(device)
    after = copied_buffers(modules)
    state.set_rng_state(ranks.random_states[rank], device)
    set_buffers(modules, before)
    try:
        yield
    finally:
        ranks.random_states[rank] = state.rng_state(device)
        state.set_rng_state(mine, device)
        set_buffers(modules, after)


@contextmanager
def summing(modules: Iterable[nn.Module], ranks: Ranks) -> Iterator[None]:
    """On a single process, keep what is summed of the ranks before apart while this one sums its microbatches.

    On several the gradients must lie together when DDP reduces them; there the bits are not promised.
    """
    if ranks.world_size > 1:
        yield
        return
    weights = {id(weight): weight for module in modules for weight in module.parameters()}.values()  # each once
    kept = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    for weight, _ in kept:
        weight.grad = None
    yield
    for weight, before in kept:
        weight.grad = before if weight.grad is None else before.add_(weight.grad)


def copied_buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [buffer.clone() for module in modules for buffer in module.buffers()]


def set_buffers(modules: Iterable[nn.Module], kept: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip((buffer for module in modules for buffer in module.buffers()), kept, strict=True):
            buffer.copy_(value)


def fingerprint(device: torch.device) -> int:
    """Of the random states: whether chance was drawn between two moments."""
    parts: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        parts.append(numpy.random.get_state()[2])
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return hash(tuple(parts))
