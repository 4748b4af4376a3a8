"""One step: forward and backward in microbatches, for each rank that this process plays, with a retry after an out-of-memory
error."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.errors import KgorchError
from kgorch.worker import local_tensors, rng_state
from kgorch.worker.data import batches
from kgorch.worker.memory import activation_checkpointing, ddp_drain
from kgorch.worker.memory.oom_retry import OomRetry, StepGuards
from kgorch.worker.ranks import virtual_ranks
from kgorch.worker.ranks.virtual_ranks import VirtualRanks

Work = Callable[[Any, float], torch.Tensor]
"""`work(part, weight)`: forward of a part of a batch, and backward of its mean loss times `weight`; returns the detached loss."""

NOT_DIVIDED = (
    "none: a batch cannot be divided, for its tensors neither share a first axis nor are in lists of one item a sample;"
    " it is computed whole"
)

MOST_PARTS = 255
"""The highest flag of a vote."""


class MicrobatchRunner:
    """Computes the steps of a training.

    Args:
        device: of this rank.
        ranks: returns the virtual ranks that this process plays.
        report: records what is known of identical results.
        guards: None when the script runs alone.
        on_reset: see GradientReduction.

    Attributes:
        parts: this step's batch, its weight and its samples, for each rank that this process plays.
        saw_batch: the script has passed on the batch as it was given.
        is_whole: the newest batch could not be divided.
        is_used: the script has had a batch computed.
        has_dropout_state: cuDNN keeps a random state for the tracked modules, to be renewed before each step.
        is_sharded: weights of a tracked module are sharded, so a forward and a backward have collectives of their own.
    """

    def __init__(
        self,
        device: torch.device,
        ranks: Callable[[], VirtualRanks],
        report: Callable[..., None],
        guards: StepGuards | None,
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._ranks_now, self._report, self._guard = device, ranks, report, guards
        self._on_reset = on_reset
        self._modules: list[nn.Module] = []
        self.parts: list[tuple[Any, float, int]] = []
        self.saw_batch = self.is_used = self.has_dropout_state = self.is_sharded = False
        self.is_whole = False
        self._fingerprint = 0  # of the random states after the newest step

    def set_modules(self, modules: Iterable[nn.Module]) -> None:
        """Set the tracked modules."""
        self._modules = list(modules)
        self.is_sharded = any(local_tensors.is_any_sharded(module.parameters()) for module in self._modules)
        self.has_dropout_state = self._device.type == "cuda" and activation_checkpointing.has_dropout_state(
            self._modules
        )

    def set_batches(self, parts: Iterable[Any], weights: Iterable[float], samples: Iterable[int]) -> None:
        """Set the next step's batches.

        Args:
            parts: one per rank that this process plays.
            weights: each batch's share of the global batch, times the number by which the gradients are divided later.
            samples: that its loader has put into each.
        """
        self.parts, self.saw_batch = list(zip(parts, weights, samples, strict=True)), False

    @property
    def weight(self) -> float:
        """Weight of this rank's own batch; 1.0 before the first step."""
        return self.parts[0][1] if self.parts else 1.0

    @property
    def microbatch(self) -> int | None:
        """Samples of one forward and backward under the current memory settings; None for a rank's whole share."""
        return self._guard.ladder.settings.microbatch if self._guard else None

    def run(self, step: int, batch: Any, work: Work, *, scaled: bool) -> torch.Tensor:
        """Compute a batch.

        Args:
            scaled: `work` uses a GradScaler.

        Returns:
            The mean loss over this rank's batch, a detached scalar; NaN where all ranks dropped the batch.

        Raises:
            See OomRetry.run.
        """
        is_own = bool(self.parts) and batch is self.parts[0][0]
        self.saw_batch = self.saw_batch or is_own
        if not self.is_used:
            self.is_used = True
            self.report_use()
        if self.has_dropout_state:
            rng_state.renew_dropout_state(self._device)

        def forward_backward() -> torch.Tensor:
            if is_own and self._ranks_now().are_split:
                return self._of_all(work)
            # Of a batch that the script has changed the loader's count is still a hint.
            _, weight, samples = self.parts[0] if self.parts else (batch, 1.0, 0)
            return self._of_one((batch, weight, samples), work, last=True)

        # Without tracked modules there is nothing that a retry could restore.
        if not self._guard or not self._modules:
            return forward_backward()
        health = self._guard.health
        # An earlier attempt has dropped this batch; it must be dropped again to get the same weights.
        if health and health.skips(step):
            self.retry.drop(scaled=scaled)
            return self._dropped()
        if not self._guard.ladder.has_rungs and not (health and health.is_on):
            return forward_backward()
        loss = self.retry.run(
            step, forward_backward, health=health, scaled=scaled, can_divide=lambda: not self.is_whole
        )
        return self._dropped() if loss is None else loss

    @property
    def communicates(self) -> bool:
        """The script runs collectives of its own in a step, as far as that is known."""
        return "retry" in vars(self) and self.retry.communicates

    @functools.cached_property
    def retry(self) -> OomRetry:
        """Created at the first step, when the script has wrapped its modules."""
        assert self._guard
        # A rank that fails in FSDP2's forward owes the others all-gathers and reduce-scatters of every later layer, whose number
        # and sizes PyTorch does not tell: they cannot be drained, so the next rung starts a new attempt.
        hidden = self.is_sharded or activation_checkpointing.has_sync_batchnorm(self._modules)
        reduction = ddp_drain.GradientReduction(self.ddps, hidden=hidden, on_reset=self._on_reset)
        return OomRetry(self._guard, self._device, self._modules, self._ranks_now(), reduction)

    @functools.cached_property
    def ddps(self) -> list[DistributedDataParallel]:
        """The DDPs of the training. Searched at the first step: a script may wrap its module after it has tracked it."""
        return ddp_drain.find(self._modules)

    def _dropped(self) -> torch.Tensor:
        return torch.full((), math.nan, device=self._device)

    def _of_all(self, work: Work) -> torch.Tensor:
        """Compute the batches of all ranks that this process plays (ranks/virtual_ranks.py). Returns the first one's loss."""
        ranks = self._ranks_now()
        if self._fingerprint and self._fingerprint != virtual_ranks.rng_fingerprint(self._device):
            self._report(ranks=f"{ranks.describe()}, but chance was drawn outside of session.backward")
        before, summing = virtual_ranks.copied_buffers(self._modules), virtual_ranks.GradientSum(self._modules, ranks)
        last = ranks.end - 1
        with summing.rank():
            loss = self._of_one(self.parts[0], work, last=ranks.first == last)
        for rank, part in zip(ranks.mine[1:], self.parts[1:], strict=True):
            with virtual_ranks.playing_rank(ranks, rank, self._device, self._modules, before), summing.rank():
                self._of_one(part, work, last=rank == last)
        self._fingerprint = virtual_ranks.rng_fingerprint(self._device)
        return loss

    def _of_one(self, part: tuple[Any, float, int], work: Work, *, last: bool) -> torch.Tensor:
        """Compute one rank's batch in microbatches.

        Args:
            part: an item of `parts`.
            last: this is the last rank that the process plays, so DDP reduces the gradients in its last microbatch.
        """
        batch, weight, declared = part
        division, microbatch = batches.division(batch, declared), self.microbatch
        samples, self.is_whole = division.samples, division.way == batches.WHOLE
        if self.is_whole:
            microbatch = None if microbatch is None else samples
            self._report_whole()
        padding = self._padding(samples, microbatch) if self.is_sharded and microbatch else 0
        # Nearly all steps: the same bits as below, in less time.
        if last and not padding and (microbatch is None or microbatch >= samples):
            total = work(batches.moved(batch, self._device), weight)
            if self._device.type == "cuda":
                # As the sum of several is: a CUDA graph writes its losses to the same memory each time.
                total = total.to(torch.float32, copy=True)
            elif total.dtype is not torch.float32:
                total = total.float()
        else:
            losses = []
            size = microbatch or samples
            parts = division.parts(batch, size)
            for number, part_of_batch in enumerate(parts):
                fraction = min(size, samples - number * size) / samples
                reduces = last and number == len(parts) - 1
                with contextlib.nullcontext() if reduces else ddp_drain.without_reduction(self.ddps):
                    loss = work(batches.moved(part_of_batch, self._device), fraction * weight)
                    losses.append(loss.float() * fraction)
            for _ in range(padding):
                work(batches.moved(division.parts(batch, 1)[0], self._device), 0.0)
            total = functools.reduce(operator.add, losses)
        if self._guard:
            self._guard.health.add_loss(total)
        return total

    def report_use(self) -> None:
        """Tell the ladder whether a smaller microbatch can help: not where the script has no batch computed here."""
        if self._guard:
            self._guard.ladder.report_use(self._guard.rank, is_used=self.is_used)

    def _report_whole(self) -> None:
        self._report(ladder=NOT_DIVIDED)
        if self._guard:
            self._guard.ladder.report_facts(self._guard.rank, splits=False)

    def _padding(self, samples: int, microbatch: int) -> int:
        """Microbatches of weight 0 that this rank adds, because another one has more.

        Where weights are sharded, all ranks take part in each forward and backward: one that had done its own would leave the
        others waiting. The vote costs no more than these collectives, at which the ranks wait for each other anyway.

        Raises:
            KgorchError: a rank's share is cut into more parts than a vote can count.
        """
        assert self._guard
        mine = -(-samples // microbatch)
        if (most := self._guard.board.vote_everywhere(min(mine, MOST_PARTS))) == MOST_PARTS:
            raise KgorchError(
                f"a microbatch of {microbatch} cuts a batch of a sharded model into {MOST_PARTS} parts or more",
                next_step="give the plan a larger [memory] microbatch",
            )
        return most - mine
