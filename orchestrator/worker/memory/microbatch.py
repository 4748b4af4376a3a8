"""A step's batch, forward and backward: in microbatches, for each rank that this process plays, and watched
(memory/oom_retry.py)."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.worker import rng_state
from orchestrator.worker.data import batches
from orchestrator.worker.health.loss_guard import LossGuard
from orchestrator.worker.memory import activation_checkpointing, ddp_drain
from orchestrator.worker.memory.ladder import Ladder
from orchestrator.worker.memory.oom_retry import OomRetry
from orchestrator.worker.ranks import virtual_ranks
from orchestrator.worker.ranks.consensus_board import Board
from orchestrator.worker.ranks.virtual_ranks import VirtualRanks

Work = Callable[[Any, float], torch.Tensor]


class StepGuards(NamedTuple):
    """What watches over a step under kgorch."""

    ladder: Ladder
    health: LossGuard
    board: Board
    rank: int


class MicrobatchRunner:
    """Args:
    ranks: those that this process plays, as they are by then.
    tell: what holds of the same bits, in words.
    guard: None when the script runs alone.
    Attributes:
    parts: this step's batch of each rank played here, and its weight.
    came: the batch has come here as it was given.
    rehearses: the step is to no effect.
    has_dropout_state: cuDNN keeps one for the tracked modules, which has to be renewed before each step.
    """

    def __init__(
        self,
        device: torch.device,
        ranks: Callable[[], VirtualRanks],
        tell: Callable[..., None],
        guard: StepGuards | None,
    ) -> None:
        self._device, self._ranks_now, self._tell, self._guard = device, ranks, tell, guard
        self._modules: list[nn.Module] = []
        self.parts: list[tuple[Any, float]] = []
        self.came = self.rehearses = self.has_dropout_state = False
        self._chance = 0

    def learn(self, modules: Iterable[nn.Module]) -> None:
        """The tracked modules."""
        self._modules = list(modules)
        self.has_dropout_state = self._device.type == "cuda" and activation_checkpointing.has_dropout_state(
            self._modules
        )

    def give(self, parts: Iterable[Any], weights: Iterable[float]) -> None:
        """The next step's batches."""
        self.parts, self.came = list(zip(parts, weights, strict=True)), False

    @property
    def weight(self) -> float:
        """Of this rank's own batch."""
        return self.parts[0][1] if self.parts else 1.0

    @property
    def microbatch(self) -> int | None:
        """Samples of one forward and backward as memory allows now; None for a rank's whole share."""
        return self._guard.ladder.settings.microbatch if self._guard else None

    def run(self, step: int, batch: Any, work: Work, *, scaled: bool) -> torch.Tensor:
        """The mean loss over this rank's batch, detached; NaN where all ranks dropped it. Raises: as Retry.run."""
        is_own = bool(self.parts) and batch is self.parts[0][0]
        self.came = self.came or is_own
        if self.has_dropout_state:
            rng_state.renew_dropout_state(self._device)

        def forward_backward() -> torch.Tensor:
            if is_own and self._ranks_now().are_split:
                return self._of_all(work)
            return self._of_one(batch, work, self.weight, last=True)

        if not self._guard or not self._modules:
            return forward_backward()
        health = None if self.rehearses else self._guard.health
        if health and health.leaves_out(step):
            self.retry.drop(scaled=scaled)
            return self._dropped()
        if not self._guard.ladder.is_there and not (health and health.is_on):
            return forward_backward()
        loss = self.retry.run(step, forward_backward, health=health, scaled=scaled)
        return self._dropped() if loss is None else loss

    @property
    def communicates(self) -> bool:
        """The script's forward or backward runs collectives of its own, as far as that is known."""
        return "retry" in vars(self) and self.retry.communicates

    @functools.cached_property
    def retry(self) -> OomRetry:
        assert self._guard
        hidden = activation_checkpointing.has_sync_batchnorm(self._modules)
        return OomRetry(
            self._guard.ladder, self._guard.board, self._guard.rank, self._device, self._modules, self._ranks_now(),
            ddp_drain.GradientReduction(self.ddps, hidden=hidden),
        )  # fmt: skip

    @functools.cached_property
    def ddps(self) -> list[DistributedDataParallel]:
        """Looked for at the first step: a script may wrap its module after it has tracked it."""
        return ddp_drain.find(self._modules)

    def _dropped(self) -> torch.Tensor:
        return torch.full((), math.nan, device=self._device)

    def _of_all(self, work: Work) -> torch.Tensor:
        """The batches of all ranks that this process plays (ranks/virtual_ranks.py). Returns the first one's loss."""
        ranks = self._ranks_now()
        if self._chance and self._chance != virtual_ranks.rng_fingerprint(self._device):
            self._tell(ranks=f"{ranks.said()}, but chance was drawn outside of session.backward")
        before, summing = virtual_ranks.copied_buffers(self._modules), virtual_ranks.GradientSum(self._modules, ranks)
        last = ranks.end - 1
        batch, weight = self.parts[0]
        with summing.rank():
            loss = self._of_one(batch, work, weight, last=ranks.first == last)
        for rank, (batch, weight) in zip(ranks.mine[1:], self.parts[1:], strict=True):
            with virtual_ranks.playing_rank(ranks, rank, self._device, self._modules, before), summing.rank():
                self._of_one(batch, work, weight, last=rank == last)
        self._chance = virtual_ranks.rng_fingerprint(self._device)
        return loss

    def _of_one(self, batch: Any, work: Work, weight: float, *, last: bool) -> torch.Tensor:
        """One rank's batch in microbatches; DDP reduces the gradients after the last one of the `last` rank played here."""
        samples = batches.length(batch)
        parts = batches.split(batch, self.microbatch or samples)
        losses = []
        for number, part in enumerate(parts):
            fraction = batches.length(part) / samples
            reduces = last and number == len(parts) - 1
            with contextlib.nullcontext() if reduces else ddp_drain.without_reduction(self.ddps):
                losses.append(work(batches.moved(part, self._device), fraction * weight).float() * fraction)
        total = functools.reduce(operator.add, losses)
        if self._guard:
            self._guard.health.hear(total)
        return total
