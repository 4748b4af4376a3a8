"""Retry of a step's forward and backward after an out-of-memory error: the drain protocol.

The unit is all that `session.backward` does in a step. Its starting state (random states, buffers, gradients) is kept. A rank that
fails joins the collectives that the others wait for (ddp_drain.py), and all vote. When any rank has failed, all restore the
starting state, take the same rung, and compute the same batch again. So the result is that of a run that had used the smaller
microbatch from that step on.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from kgorch.worker import rng_state
from kgorch.worker.health.loss_guard import LossGuard
from kgorch.worker.memory import oom
from kgorch.worker.memory.ddp_drain import APART, DRAIN, NONE, GradientReduction
from kgorch.worker.memory.ladder import Ladder
from kgorch.worker.ranks import virtual_ranks
from kgorch.worker.ranks.consensus_board import Board
from kgorch.worker.rng_state import RngCache

OUT_OF_MEMORY = 4
"""Flag of a rank in the vote, above the flags of health/loss_guard.py, because the highest flag counts."""

NOTHING = nullcontext()

Result = TypeVar("Result")


class StepGuards(NamedTuple):
    """What watches a step under kgorch.

    Attributes:
        ladder: memory settings.
        health: checks of losses and weights.
        board: votes of the ranks.
        rank: of this process.
    """

    ladder: Ladder
    health: LossGuard
    board: Board
    rank: int


class OomRetry:
    """Runs steps on one rank.

    Args:
        modules: the tracked modules, each once.
        ranks: the virtual ranks that this process plays.
        reduction: of the gradients between ranks.
    """

    def __init__(
        self,
        guards: StepGuards,
        device: torch.device,
        modules: Sequence[nn.Module],
        ranks: virtual_ranks.VirtualRanks,
        reduction: GradientReduction,
    ) -> None:
        self._ladder, self._board, self._rank = guards.ladder, guards.board, guards.rank
        self._device = device
        self._ranks, self._reduction = ranks, reduction
        self._weights = list({id(item): item for module in modules for item in module.parameters()}.values())
        self._buffers = BufferCopies(modules)
        self._rng = rng_state.shared_cache(device)
        self._failed_at, self._failures = -1, 0

    def run(
        self,
        step: int,
        forward_backward: Callable[[], Result],
        *,
        health: LossGuard | None,
        scaled: bool,
        can_divide: Callable[[], bool],
    ) -> Result | None:
        """The result of `forward_backward`, retried with every rung that this process can take.

        Args:
            health: checks the loss; None where losses are not checked.
            scaled: a GradScaler is used.
            can_divide: returns whether the newest batch can be computed in parts.

        Returns:
            None when the loss was bad on some rank, and all ranks dropped the step.

        Raises:
            LadderEnds: no rung is left that this process can take.
            RuntimeError: the out-of-memory error itself, where nothing can be retried.
            Unwell: a loss or weight is not finite, and a new attempt is needed.
            PeersLost: a rank has died.
        """
        while True:
            in_parts = self._ladder.is_microbatched or self._ranks.are_split
            mode = self._reduction.mode(microbatched=in_parts)  # the same on all ranks
            if mode == NONE and health is None:
                return forward_backward()
            if health:
                health.forget_losses()
            # Kept at every step: what a failure has changed cannot be known before it happens.
            start = StepStart(self._weights, self._buffers, self._rng, self._ranks)
            result, message, flag = self._try(step, forward_backward, mode, can_divide)
            worst = self._board.vote(flag or (health.flag_of_step(scaled=scaled) if health else 0))
            if not worst:
                if mode == APART:
                    self._reduction.reduce()
                elif mode == DRAIN:
                    self._reduction.finish()
                if health:
                    health.accept_step()
                assert result is not None
                return result[0]
            # All ranks see the same `worst`, so all take the same branch from here on.
            if health and worst < OUT_OF_MEMORY:
                start.restore()
                health.apply_remedy(worst)
                self.drop(scaled=scaled)
                return None
            # The gradients of this step are worthless: some ranks have added zeros.
            self._reduction.reset()
            start.restore()
            why = f"rank {self._rank}: {message}" if message else "another rank ran out of memory"
            try:
                self._ladder.down(step, why, tells=self._board.worst_rank == self._rank, must=True)
            except oom.LadderEnds as error:
                error.is_collateral = not message
                raise

    @property
    def communicates(self) -> bool:
        """The script runs collectives of its own in a step, as far as that is known."""
        return self._reduction.communicates

    def drop(self, *, scaled: bool) -> None:
        """Remove the gradients, so that the optimizer does nothing. A GradScaler needs gradients: it skips the step for NaN."""
        for weight in self._weights:
            weight.grad = torch.full_like(weight, torch.nan) if scaled and weight.requires_grad else None

    def _try(
        self, step: int, forward_backward: Callable[[], Result], mode: str, can_divide: Callable[[], bool]
    ) -> tuple[tuple[Result] | None, str, int]:
        """One try of the step. It leaves no reference to the tensors of a failed one.

        Returns:
            The result in a tuple, or None; the first line of an out-of-memory error, or ""; the flag of the vote.
        """
        if mode == NONE:
            return (forward_backward(),), "", 0
        try:
            activations = self._ladder.activations
            with (
                activations.explained() if activations.is_on else NOTHING,
                self._reduction.apart() if mode == APART else NOTHING,
            ):
                if mode == DRAIN:
                    self._reduction.begin()
                return (forward_backward(),), "", 0
        except Exception as error:
            if not oom.is_out_of_memory(error):
                raise
            # Ranks of other nodes take part in no vote of a step: they would go on while this one repeats the step. And a smaller
            # microbatch, on which all ranks would agree, does not help a batch that is computed whole.
            if not oom.can_retry(error) or self._board.spans_nodes or not can_divide():
                raise oom.LadderEnds(oom.first_line(error)) from None
            message = oom.first_line(error)
        # Outside of the `except`: inside, the traceback would keep the failed step's tensors alive.
        oom.refusals.look()  # this one has been handled
        self._failures = self._failures + 1 if self._failed_at == step else 1
        self._failed_at = step
        self._make_room()
        self._ladder.report_lack(self._rank, step, message)
        if mode == DRAIN:
            try:
                self._reduction.drain()
            except RuntimeError as error:
                raise oom.LadderEnds(f"{message}; {error}") from None
        return None, message, OUT_OF_MEMORY

    def _make_room(self) -> None:
        """Free what the failed step has left.

        Its objects are young, so a collection of the young generations finds them. A full one takes a tenth of a second, and is
        made when two retries were not enough.
        """
        for weight in self._weights:
            weight.grad = None
        gc.collect(2 if self._failures > 2 else 1)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


class StepStart:
    """The state at the beginning of a step, which a retry restores.

    Gradients that exist then are copied. A script that sets them to None, as PyTorch does by default, pays nothing for that.
    """

    def __init__(
        self, weights: list[nn.Parameter], buffers: BufferCopies, rng: RngCache, ranks: virtual_ranks.VirtualRanks
    ) -> None:
        self._weights, self._buffers, self._rng, self._ranks = weights, buffers, rng, ranks
        self._random, self._played = rng.now(), dict(ranks.random_states)
        self._grads = [(weight, weight.grad, _copy_of(weight.grad)) for weight in weights if weight.grad is not None]
        buffers.keep()

    def restore(self) -> None:
        for weight in self._weights:
            weight.grad = None
        with torch.no_grad():
            for weight, grad, values in self._grads:
                weight.grad = grad.copy_(values)
        self._buffers.restore()
        self._rng.back_to(self._random)
        self._ranks.random_states.clear()
        self._ranks.random_states.update(self._played)


def _copy_of(gradient: torch.Tensor) -> torch.Tensor:
    """A copy on the gradient's device, or on the host where there is no room: a mere precaution must not end the attempt."""
    try:
        return gradient.clone()
    except RuntimeError as error:
        if not gradient.is_cuda or not oom.is_out_of_memory(error) or not oom.can_retry(error):
            raise
    oom.refusals.look()
    return gradient.to("cpu")


SMALL = 1 << 16
"""Elements up to which a buffer is always copied: kernels such as BatchNorm's write to it without a new version."""

LEARNED = 5
"""Steps in which larger buffers are compared, to find out whether they are written to without a new version."""


class BufferCopies:
    """Copies of the modules' buffers at a step's beginning. A large buffer that has not changed (a mask, a table) is not
    copied again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        self._slots = [
            (part._buffers, name) for part in parts for name, buffer in part._buffers.items() if buffer is not None
        ]
        self._current: list[Any] = []
        self._values: list[torch.Tensor] = []
        self._large: dict[int, int] = {}  # index of a buffer that is copied when it has changed → its version
        self._often: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # all others: the copies, and the buffers
        self._steps = 0

    def keep(self) -> None:
        """Bring the copies up to date."""
        current: list[Any] = [buffers[name] for buffers, name in self._slots]
        if len(current) != len(self._current) or any(map(operator.is_not, current, self._current)):
            self._current, self._values = current, [buffer.clone() for buffer in current]
            self._large = {number: item._version for number, item in enumerate(current) if item.numel() > SMALL}
            self._often = self._by_kind(number for number in range(len(current)) if number not in self._large)
            return
        if self._large:
            self._keep_large()
        for values, buffers in self._often:
            torch._foreach_copy_(values, buffers)

    def _keep_large(self) -> None:
        current, values = self._current, self._values
        changed = [number for number, version in self._large.items() if current[number]._version != version]
        if self._steps < LEARNED:
            self._steps += 1
            same = self._large.keys() - set(changed)
            if unseen := [number for number in same if not torch.equal(current[number], values[number])]:
                # Written to without a new version, as through `.data`.
                for number in unseen:
                    del self._large[number]
                self._often = self._by_kind(number for number in range(len(current)) if number not in self._large)
        for copies, buffers in self._by_kind(changed):
            torch._foreach_copy_(copies, buffers)
        for number in changed:
            self._large[number] = current[number]._version

    def _by_kind(self, numbers: Iterable[int]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Copies and buffers of one device and type each: a mixed list (BatchNorm counts its batches in int64) is copied by one
        kernel per tensor."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for number in numbers:
            buffer = self._current[number]
            copies, buffers = kinds.setdefault((buffer.device, buffer.dtype), ([], []))
            copies.append(self._values[number])
            buffers.append(buffer)
        return list(kinds.values())

    def restore(self) -> None:
        with torch.no_grad():
            for number, (buffers, name) in enumerate(self._slots):
                buffer = buffers[name] = self._current[number]
                if number not in self._large or buffer._version != self._large[number]:
                    buffer.copy_(self._values[number])
