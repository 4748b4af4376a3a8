"""ddp.py with guards of its own, as a careful script has them: nothing but PyTorch, and no process starts anew.

Memory that runs out (PyTorch's FAQ: go on outside of the except block, whose error keeps the tensors): each rank computes its
gradients without a collective (no_sync), then all agree, and halve the microbatch and repeat the step where it did not fit on any;
then one all-reduce of all gradients. DDP's own, which overlaps with the backward pass, would not do: a forward pass that is given
up leaves it waiting for a backward pass, and the next one sends in spite of no_sync. In the optimizer's step: the same, and all
load the last save, for ranks that could do theirs are ahead. A loss that is not finite on any rank: all skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bounded import training
from bounded.training import BATCH, ENDLESS, EPOCH, marks

T = TypeVar("T")


def fitting(work: Callable[[], T]) -> T | None:
    """What it gives; None where memory ran out."""
    try:
        return work()
    except RuntimeError as error:  # torch.OutOfMemoryError is one; that of the CPU's allocator has no class of its own
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
    return None


def any_of(*flags: bool) -> list[bool]:
    """Of each flag: is it set on any rank?"""
    told = torch.tensor(flags, dtype=torch.float32)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return [bool(flag) for flag in told]


def main() -> None:
    parser = training.options()
    parser.add_argument("--timeout", type=float, default=1800, help="seconds until a collective fails")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    model = DistributedDataParallel(training.network(options.size))
    optimizer = training.optimizer_of(model)
    saved, parts = options.folder / "saved.pt", 1

    def save() -> None:
        if dist.get_rank() == 0:
            aside = saved.with_suffix(".tmp")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": marks.step}
            torch.save(state, aside)
            aside.rename(saved)

    def load() -> int:
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def gradients(words: torch.Tensor, classes: torch.Tensor) -> float:
        """This rank's, in parts; gives the loss."""
        total = 0.0
        with model.no_sync():
            for part in zip(words.chunk(parts), classes.chunk(parts), strict=True):
                loss = training.loss_of(model, *part) / parts
                loss.backward()
                total += loss.item()
        return total

    def backward(words: torch.Tensor, classes: torch.Tensor) -> float | None:
        """The loss, NaN where it is on any rank, with the gradients of all; None where it did not fit on any."""
        loss = fitting(partial(gradients, words, classes))
        too_much, bad = any_of(loss is None, loss is not None and not math.isfinite(loss))
        if loss is None or too_much:
            return None
        if bad:
            return math.nan
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, mean in zip(
            grads, (flat / dist.get_world_size()).split([grad.numel() for grad in grads]), strict=True
        ):
            grad.copy_(mean.view_as(grad))
        return loss

    def halve() -> None:
        nonlocal parts
        parts *= 2
        if BATCH % parts:
            raise MemoryError("the smallest microbatch does not fit")
        optimizer.zero_grad()

    first = load() if saved.exists() else 0
    marks.begin(first)
    loader = training.loader_of(training.samples(), dist.get_rank(), dist.get_world_size())
    for epoch in range(first // EPOCH, ENDLESS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            while (loss := backward(*batch)) is None:
                halve()
            if math.isnan(loss):
                optimizer.zero_grad()
            elif any_of(fitting(lambda: training.step_of(optimizer) or True) is None)[0]:  # type: ignore[func-returns-value]
                halve()
                marks.begin(load())
                continue
            marks.done(loss=loss)
            if marks.step % options.every == 0:
                save()


if __name__ == "__main__":
    main()
