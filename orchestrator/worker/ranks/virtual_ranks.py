"""Virtual ranks: with fewer processes than the run began with, each process computes several of its ranks, one after another.

A *virtual rank* has its own slice of each global batch and its own random states, so its results do not depend on the process that
computes them. BatchNorm's running statistics are rank 0's, as DistributedDataParallel broadcasts them at each step's first forward.
Gradients are summed in the order of ranks, and each rank's is divided by the number of ranks after its backward, as
DistributedDataParallel does. With two virtual ranks on one process the bits are those of two processes, under fp16 autocast too,
because a sum of two terms does not depend on their order; with more they differ in the order of summation alone.

Dividing the loss instead would be enough for fp32 and bf16. In fp16 half of a small gradient is rounded to another number, and a
large gradient overflows later.
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

from kgorch.errors import KgorchError
from kgorch.worker import rng_state


@dataclass
class VirtualRanks:
    """The virtual ranks that this process plays.

    Attributes:
        count: virtual ranks of the run.
        first: the first one of this process.
        end: one past the last one of this process.
        world_size: number of processes.
        random_states: of the played ranks beyond the first, by rank; the first one's are the process's own.
    """

    count: int
    first: int
    end: int
    world_size: int
    random_states: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def are_split(self) -> bool:
        """Processes play several ranks each."""
        return self.count != self.world_size

    @property
    def mine(self) -> range:
        """The ranks that this process plays."""
        return range(self.first, self.end)

    def describe(self) -> str:
        """For `status`: how many ranks, and how far their results are exact."""
        if not self.are_split:
            return f"{self.count}"
        exact = "the same bits" if (self.count, self.world_size) == (2, 1) else "sums in another order, else the same"
        return f"{self.count} virtual ranks on {self.world_size}: {exact}"


def ranks_of(count: int, rank: int, world_size: int) -> VirtualRanks:
    """Divides `count` virtual ranks over as many processes or fewer, in order."""
    return VirtualRanks(count, rank * count // world_size, (rank + 1) * count // world_size, world_size)


class RankDivision:
    """Which virtual ranks this process plays, and whether fewer processes could play them.

    Attributes:
        ranks: of this process; one per process until a checkpoint of more ranks is restored.
        is_divisible: every batch went through `session.backward` as it came, so a virtual rank's step can be computed by
            another process. Checkpoints hold it as `divisible`.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.ranks = ranks_of(world_size, rank, world_size)
        self.is_divisible = True

    def refuse(self, why: str) -> None:
        """Fewer processes cannot play this run's ranks from here on.

        Raises:
            KgorchError: they are doing so now.
        """
        self.is_divisible = False
        if self.ranks.are_split:
            raise KgorchError(f"{self.ranks.describe()}: {why}", next_step=f"run on {self.ranks.count} ranks again")


@contextmanager
def playing_rank(
    ranks: VirtualRanks, rank: int, device: torch.device, modules: Iterable[nn.Module], before: list[torch.Tensor]
) -> Iterator[None]:
    """Forward and backward as a virtual rank beyond the first: with its random states, and the buffers of the step's beginning.

    Args:
        before: copies of the modules' buffers at the beginning of the step.
    """
    mine = rng_state.capture(device)
    after = copied_buffers(modules)
    rng_state.restore(ranks.random_states[rank], device)
    set_buffers(modules, before)
    try:
        yield
    finally:
        ranks.random_states[rank] = rng_state.capture(device)
        rng_state.restore(mine, device)
        set_buffers(modules, after)


class GradientSum:
    """Sums the gradients of the ranks that a single process plays, each divided by their number, in the order of ranks.

    Gradients that exist at a step's beginning (a script that accumulates over several backwards) count for each rank, as on
    several processes. Several processes that play more ranks than they are leave the sum to their DistributedDataParallel, which
    reduces in the last backward: there the bits are not promised, and the losses are weighted instead.
    """

    def __init__(self, modules: Iterable[nn.Module], ranks: VirtualRanks) -> None:
        self._share = 1 / ranks.count if ranks.world_size == 1 else None
        parameters = (weight for module in modules for weight in module.parameters() if weight.requires_grad)
        self._weights = list({id(weight): weight for weight in parameters}.values())  # each once
        self._before: list[torch.Tensor | None] = [None] * len(self._weights)
        if self._share is not None:
            self._before = [None if weight.grad is None else weight.grad.clone() for weight in self._weights]
        self._sums: list[torch.Tensor | None] | None = None

    @contextmanager
    def rank(self) -> Iterator[None]:
        """A context for the forward and backward of one rank."""
        if self._share is None:
            yield
            return
        if self._sums is not None:
            for weight, grad in zip(self._weights, self._before, strict=True):
                weight.grad = None if grad is None else grad.clone()
        yield
        mine = [weight.grad for weight in self._weights]
        with torch.no_grad():
            if shares := [grad for grad in mine if grad is not None]:
                torch._foreach_mul_(shares, self._share)
            if self._sums is not None:
                mine = [_sum(before, grad) for before, grad in zip(self._sums, mine, strict=True)]
        self._sums = mine
        for weight, grad in zip(self._weights, mine, strict=True):
            weight.grad = grad


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if other is None:
        return one
    # `other` may be a view of one of DDP's buckets, which the next backward fills again.
    return other.clone() if one is None else one.add_(other)


def copied_buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Copies of the modules' buffers, in order."""
    return [buffer.clone() for module in modules for buffer in module.buffers()]


def set_buffers(modules: Iterable[nn.Module], contents: list[torch.Tensor]) -> None:
    """Copy the values of `copied_buffers` back."""
    with torch.no_grad():
        for buffer, value in zip((buffer for module in modules for buffer in module.buffers()), contents, strict=True):
            if buffer.shape == value.shape:
                buffer.copy_(value)
            else:  # it has grown in the forward, as a memory bank does
                buffer.data = value.clone()


def rng_fingerprint(device: torch.device) -> int:
    """A hash of the random states, to see whether random numbers were drawn between two moments."""
    parts: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        parts.append(numpy.random.get_state()[2])
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return hash(tuple(parts))
