"""The order in which DistributedDataParallel sums its gradients, kept over a resume.

DDP lays the gradients into buckets: at first by the order of the parameters, from the second step on by that in which the first
backward gave them. A sum of three terms and more depends on where in its bucket a gradient lies, so the first step of a resumed
process needs the buckets of the run before. A backward of zeros, one parameter after another in the saved order, has DDP build
them: no module is called, and no gradient of it stays.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.worker.memory import ddp_drain

UNKNOWN = "the first step may sum the gradients in another order than the run before"
NOT_SAVED = "the checkpoint does not hold DDP's order"
NONE, PARTIAL, WHOLE = range(3)
"""How much of a DDP's order a checkpoint holds. None of it: that DDP had reduced nothing yet."""

_NAMES = ("_get_zeros_like_grad_buckets", "_rebuild_buckets", "get_backward_stats", "prepare_for_backward")


class BucketOrder:
    """The order of the gradients in the buckets of all DDPs of a training.

    Attributes:
        indices: of the parameters, counted through all tracked modules, without those of DDPs that have reduced nothing yet. Saved
            by each checkpoint. None where fewer than three ranks sum: then no order makes a difference.
        is_resumed: `restore` is to be called before the first step.
        is_learning: `learn` is to be called after a step.
    """

    def __init__(self, ranks: int) -> None:
        self.indices: list[int] | None = [] if ranks > 2 else None
        self.is_resumed, self.is_learning = False, ranks > 2
        self._saved: Any = None
        self._was_resumed, self._met = False, list[DistributedDataParallel]()
        self._left: list[DistributedDataParallel] | None = None  # searched after the first step

    def resume(self, saved: Any) -> None:
        """Take the order of a checkpoint, whatever it holds: it is compared with the parameters."""
        self.is_resumed = self._was_resumed = self.is_learning
        self._saved = saved

    def restore(self, modules: Sequence[nn.Module]) -> str:
        """Have each DDP build its buckets. Before the first step, on all ranks; rank 0's order counts.

        Returns:
            Why the order may be another one than before, in words; "" where it is the same.
        """
        number_of, saved = _numbered(modules), self._saved if isinstance(self._saved, list) else []
        turns = {index: turn for turn, index in enumerate(saved) if type(index) is int}
        self.is_resumed, self.indices, doubts = False, [], dict[str, None]()
        self._met = _found(modules)
        for ddp in self._met:
            weights, why = _weights(ddp, number_of)
            if why:
                doubts[why] = None
                continue
            ordered = [weight for weight in weights if number_of[id(weight)] in turns]
            ordered.sort(key=lambda weight: turns[number_of[id(weight)]])
            held = WHOLE if len(ordered) == len(weights) else PARTIAL if ordered or saved is not self._saved else NONE
            least, most = _of_all_ranks(ddp, held, weights[0].device)
            if least == WHOLE:
                aim = [number_of[id(weight)] for weight in ordered]
                if not _has_reduced(ddp):
                    _replay(ddp, ordered)
                elif _read(ddp, number_of) != aim:  # as in an epoch that is done, whose batches are the script's again
                    doubts["the script has called backward before it"] = None
                self.indices += aim
            elif most != NONE:
                doubts[NOT_SAVED] = None
        return f"{UNKNOWN}: {'; '.join(doubts)}" if doubts else ""

    def learn(self, modules: Sequence[nn.Module]) -> str:
        """Read the order of DDPs that have reduced their gradients for the first time. After a step, on all ranks.

        Returns:
            As `restore`, of DDPs that it has not met.
        """
        number_of, is_late, indices = _numbered(modules), False, self.indices or []
        if self._left is None:
            found, done = _found(modules), {*indices}
            is_late = self._was_resumed and any(ddp not in self._met for ddp in found)
            weights_of = ((ddp, _weights(ddp, number_of)[0]) for ddp in found)
            self._left = [
                ddp for ddp, weights in weights_of if any(number_of[id(item)] not in done for item in weights)
            ]
        for ddp in [ddp for ddp in self._left if _has_reduced(ddp)]:
            self._left.remove(ddp)
            indices += _read(ddp, number_of)
        self.indices, self.is_learning = indices, bool(self._left)
        return f"{UNKNOWN}: the script made its DDP in the first step" if is_late else ""


def _found(modules: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    """The DDPs that build their buckets anew after their first backward, and for which it makes a difference."""
    gc.collect()  # one that the script has replaced may be left on some ranks
    return [
        ddp
        for ddp in ddp_drain.find(modules)
        if (ddp.static_graph or not ddp.find_unused_parameters) and ddp.process_group.size() > 2
    ]


def _has_reduced(ddp: DistributedDataParallel) -> bool:
    return any(ddp.reducer.get_backward_stats())


def _read(ddp: DistributedDataParallel, number_of: Mapping[int, int]) -> list[int]:
    """The order of its parameters by their numbers; empty where memory runs out, for it takes as much as the gradients."""
    ddp.reducer._rebuild_buckets()  # DDP would do it in its next forward, with a collective
    with contextlib.suppress(RuntimeError):
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return [number_of[id(weight)] for bucket in buckets for weight in bucket.parameters()]
    return []


def _of_all_ranks(ddp: DistributedDataParallel, held: int, device: torch.device) -> tuple[int, int]:
    """The least and the most that any rank's checkpoint holds: the ranks must act alike, or some would wait for ever."""
    votes = torch.tensor([held, -held], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=ddp.process_group)
    least, most = votes.tolist()
    return least, -most


def _numbered(modules: Iterable[nn.Module]) -> dict[int, int]:
    """The number of each parameter by its id; DDP may reduce some that are tracked under two names."""
    found = dict[int, int]()
    for number, weight in enumerate(weight for module in modules for weight in module.parameters()):
        found.setdefault(id(weight), number)
    return found


def _builds_anew(ddp: DistributedDataParallel) -> bool:
    return ddp.static_graph or not ddp.find_unused_parameters


def _weights(ddp: DistributedDataParallel, number_of: Mapping[int, int]) -> tuple[list[nn.Parameter], str]:
    """The parameters that it reduces, and why their order cannot be kept, in words; "" where it can. The same on all ranks."""
    if not all(hasattr(ddp.reducer, name) for name in _NAMES):
        return [], "this PyTorch does not tell DDP's order"
    weights, is_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if ddp.static_graph:  # what it learns in its first step is more than an order
        return [], "DDP(static_graph=True) learns it in its first step"
    if any(is_sparse):
        return [], "DDP does not tell the order of sparse gradients"
    if getattr(ddp, "mixed_precision", None) or getattr(ddp, "_delay_all_reduce_params", None):
        return [], "DDP reduces other tensors than the gradients"
    if not all(state is None or isinstance(state, dist.ProcessGroup) for _, state in getattr(ddp, "_comm_hooks", ())):
        return [], "DDP's communication hook has a state"
    if any(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None) for weight in weights):
        return [], "the script has hooks on gradients"
    if len(weights) != len(ddp.reducer.get_backward_stats()) or not all(id(weight) in number_of for weight in weights):
        return [], "weights were frozen, thawed or replaced after DDP had taken them"
    return weights, ""


def _replay(ddp: DistributedDataParallel, ordered: Sequence[nn.Parameter]) -> None:
    gradients = [weight.grad for weight in ordered]
    for weight in ordered:
        weight.grad = None
    ddp.reducer.prepare_for_backward([])
    for weight in ordered:
        weight.backward(torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight))  # type: ignore[no-untyped-call]
    ddp.reducer._rebuild_buckets()
    for weight, gradient in zip(ordered, gradients, strict=True):
        weight.grad = gradient
