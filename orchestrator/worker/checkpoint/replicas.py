"""Whether all ranks hold the same weights. A checkpoint holds each tensor once, some of them from each rank.

A model that is not wrapped, and whose gradients nobody averages, is another one on each rank: its checkpoint would be a mixture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

TENSORS, VALUES = 64, 64
"""Weights that are looked at, spread over all of them, and values of each: ranks that train apart differ in nearly all."""

COMPARISONS = 3
"""Saves of an attempt before which the ranks are compared."""

DIFFER = (
    "{}: the weights differ between the ranks, and a checkpoint holds some of each. Either the model is not wrapped in"
    " DistributedDataParallel (wrap it, or average gradients or weights in the script, and begin a copy of it behind the wrapper),"
    " or the script averages weights only every few steps (local SGD: average at each step, or give the stage `ranks = 1`)"
)
"""What `exactness` says, with the names of the tracked objects."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def differing(things: Mapping[str, Any], vote: Callable[[int], int]) -> list[str]:
    """Names of the tracked modules that are not the same on all ranks. All call it together.

    Args:
        vote: the highest number (0 to 255) of all ranks.
    """
    modules = {name: thing for name, thing in things.items() if isinstance(thing, nn.Module) and not _is_unused(thing)}
    return [name for name, module in modules.items() if not is_same(digest(module.parameters()), vote)]


def digest(weights: Iterable[torch.Tensor]) -> bytes:
    """Two bytes that depend on a sample of the weights' values: of those that are trained, if any are."""
    usable = [
        weight
        for weight in weights
        # another type (a DTensor, a quantised weight, a lazy one) may be a piece of a tensor, or do without indexing
        if type(weight) in (torch.Tensor, nn.Parameter)
        and not weight.is_meta
        and weight.layout is torch.strided
        and weight.dtype in DTYPES
        and weight.numel()
    ]
    usable = [weight for weight in usable if weight.requires_grad] or usable
    hashed = hashlib.blake2b(digest_size=2)
    for weight in usable[:: -(-len(usable) // TENSORS) or 1]:
        # of a row in the middle: a flat view of a weight in another memory format would be a copy of all of it
        row = weight.detach()[tuple(size // 2 for size in weight.shape[:-1])].reshape(-1)[:VALUES]
        hashed.update(row.to("cpu", torch.float64).numpy().tobytes())
    return hashed.digest()


def is_same(mine: bytes, vote: Callable[[int], int]) -> bool:
    """Whether all ranks have these bytes. All call it together, and see the same votes, so all end at the same one."""
    return all(vote(byte) == 255 - vote(255 - byte) for byte in mine)


def _is_unused(module: nn.Module) -> bool:
    """An average of weights that has not begun: its first update overwrites what each rank has built."""
    return isinstance(module, AveragedModel) and not int(module.n_averaged)
