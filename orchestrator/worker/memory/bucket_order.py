"""The order in which DistributedDataParallel sums its gradients, kept over a resume.

DDP lays the gradients into buckets: at first by the order of the parameters, from the second step on by that in which the first
backward gave them. A sum of three terms and more depends on where in its bucket a gradient lies, so the first step of a resumed
process needs the buckets of the run before. A backward of zeros, one parameter after another in the saved order, has DDP build
them: no module is called, and no gradient of it stays.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.worker.memory import ddp_drain

UNKNOWN = "the first step may sum the gradients in another order than the run before"
NOT_SAVED = "the checkpoint does not hold DDP's order"
NONE, PARTIAL, WHOLE = range(3)
"""What a rank can do for a DDP: nothing, for it had reduced nothing yet; nothing, though it had; build its buckets."""


class BucketOrder:
    """The order of the gradients in the buckets of all DDPs of a training.

    Attributes:
        is_resumed: `restore` is to be called before the first step.
        is_learning: `learn` is to be called after a step.
    """

    def __init__(self, ranks: int) -> None:
        self.is_resumed, self.is_learning = False, ranks > 2  # the sum of two is the same in any order
        self._orders: dict[str, list[int] | None] | None = {} if ranks > 2 else None
        self._before: Any = None
        self._met: weakref.WeakSet[DistributedDataParallel] | None = None  # by `restore`
        self._left: dict[str, DistributedDataParallel] | None = None  # searched after the first step

    @property
    def saved(self) -> Any:
        """For a checkpoint: by DDP the places of its parameters among its module's; None for one whose order cannot be read.

        Without DDPs that have reduced nothing yet. None for all where fewer than three ranks sum.
        """
        return self._before if self.is_resumed else self._orders

    def resume(self, saved: Any) -> None:
        """Take the order of a checkpoint, whatever it holds: it is compared with the parameters."""
        self.is_resumed, self._before = self.is_learning, saved

    def restore(self, modules: Sequence[nn.Module]) -> str:
        """Have each DDP build its buckets. Before the first step, on all ranks.

        Args:
            modules: the tracked ones, in the same order on all ranks and in all sessions.

        Returns:
            Why the order may be another one than before, in words; "" where it is the same.
        """
        before, doubts = self._before, dict[str, None]()
        self.is_resumed, self._before, self._orders, self._met = False, None, {}, weakref.WeakSet()
        for key, ddp in _found(modules):
            self._met.add(ddp)
            order: list[int] | None = before.get(key) if isinstance(before, dict) else None
            has_reduced_nothing = isinstance(before, dict) and key not in before
            why = "" if has_reduced_nothing else _why_not(ddp, order)
            able = NONE if has_reduced_nothing else PARTIAL if why else WHOLE
            least, most = _of_all_ranks(ddp, able)
            if order is not None and least == WHOLE:
                _build(ddp, order)
                if _read(ddp) not in (order, None):
                    doubts["DDP has built other buckets"] = None
                self._orders[key] = order
            elif most != NONE:
                doubts[why or "not every rank can have DDP build its buckets"] = None
        return f"{UNKNOWN}: {'; '.join(doubts)}" if doubts else ""

    def learn(self, modules: Sequence[nn.Module]) -> str:
        """Read the order of DDPs that have reduced their gradients for the first time. After a step, on all ranks.

        Returns:
            As `restore`, of DDPs that it has not met.
        """
        orders, is_late = self._orders or {}, False
        if self._left is None:
            found = dict(_found(modules))
            is_late = self._met is not None and any(ddp not in self._met for ddp in found.values())
            self._left, self._met = {key: ddp for key, ddp in found.items() if key not in orders}, None
        for key, ddp in list(self._left.items()):
            if ddp.static_graph or _has_reduced(ddp):
                del self._left[key]
                orders[key] = None if ddp.static_graph else _read(ddp)
        self._orders, self.is_learning = orders, bool(self._left)
        return f"{UNKNOWN}: the script made its DDP in the first step" if is_late else ""

    def learn_again(self) -> None:
        """The DDPs have forgotten their buckets, as after a step that is tried again in less memory."""
        if self._orders is not None:
            self._orders, self._left, self.is_learning = {}, None, True


def _found(modules: Sequence[nn.Module]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """The DDPs that build their buckets anew after their first backward, and for which it makes a difference.

    Yields:
        Each with a name of its own: the number of its first parameter among the tracked ones.
    """
    gc.collect()  # one that the script has replaced may be left on some ranks
    number_of, taken = ddp_drain.numbered(modules), set[str]()
    for ddp in ddp_drain.find(modules):
        if (ddp.static_graph or not ddp.find_unused_parameters) and ddp.process_group.size() > 2:
            key = str(min(number_of[id(weight)] for weight in ddp.module.parameters() if id(weight) in number_of))
            while key in taken:  # several share that weight
                key += "'"
            taken.add(key)
            yield key, ddp


def _why_not(ddp: DistributedDataParallel, order: Any) -> str:
    """Why this rank cannot have a DDP build its buckets in an order, in words; "" where it can."""
    weights = list(ddp.module.parameters())
    if ddp.static_graph:  # what it learns in its first step is more than an order
        return "DDP(static_graph=True) learns it in its first step"
    if not isinstance(order, list) or not all(type(place) is int and 0 <= place < len(weights) for place in order):
        return NOT_SAVED
    if len({*order}) != len(order) or len(order) != len(ddp.reducer.get_backward_stats()):
        return "DDP reduces other weights than before"
    if getattr(ddp, "mixed_precision", None) or getattr(ddp, "_delay_all_reduce_params", None):
        return "DDP reduces other tensors than the gradients"
    if not all(state is None or isinstance(state, dist.ProcessGroup) for _, state in getattr(ddp, "_comm_hooks", ())):
        return "DDP's communication hook has a state"
    if any(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights):
        return "the script has hooks on gradients"
    return ""


def _of_all_ranks(ddp: DistributedDataParallel, able: int) -> tuple[int, int]:
    """The least and the most that any rank can do: they must act alike, or some would wait for ever."""
    votes = torch.tensor([able, -able], device=next(ddp.module.parameters()).device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=ddp.process_group)
    least, most = votes.tolist()
    return least, -most


def _has_reduced(ddp: DistributedDataParallel) -> bool:
    return any(ddp.reducer.get_backward_stats())


def _read(ddp: DistributedDataParallel) -> list[int] | None:
    """The places of its parameters among its module's, in the order of the buckets; None where PyTorch does not tell.

    As of sparse gradients, in a version without these names, or where memory runs out: it takes as much as the gradients.
    """
    place = {id(weight): number for number, weight in enumerate(ddp.module.parameters())}
    with contextlib.suppress(AttributeError, KeyError, RuntimeError):
        ddp.reducer._rebuild_buckets()  # DDP would do it in its next forward, with a collective
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return [place[id(weight)] for bucket in buckets for weight in bucket.parameters()]
    return None


def _build(ddp: DistributedDataParallel, order: Sequence[int]) -> None:
    if _has_reduced(
        ddp
    ):  # as in Accelerate's epochs that are done, of which each has a batch again: DDP has learned its order
        return
    all_weights = list(ddp.module.parameters())
    weights = [all_weights[place] for place in order]
    before = [(weight.grad, weight.requires_grad) for weight in weights]
    for weight in weights:
        weight.grad, weight.requires_grad = None, True
    ddp.reducer.prepare_for_backward([])
    for weight in weights:
        weight.backward(torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight))
    ddp.reducer._rebuild_buckets()
    for weight, (gradient, requires_grad) in zip(weights, before, strict=True):
        weight.grad, weight.requires_grad = gradient, requires_grad
