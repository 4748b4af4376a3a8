"""Weights that were pruned in the course of a training, by `torch.nn.utils.prune` or what uses it."""

from __future__ import annotations

from collections.abc import Set

from torch import nn
from torch.nn.utils import prune


def prune_as(module: nn.Module, names: Set[str]) -> None:
    """Give weights the form of pruned ones where a checkpoint has them so: `weight_orig` and `weight_mask` for `weight`.

    A module that is built anew has not been pruned yet. Optimizers keep their weights, which get another name.

    Args:
        names: of the checkpoint's tensors of the module. Its masks are to be loaded afterwards.
    """
    for name in names:
        whole = name.removesuffix("_orig")
        if whole == name or f"{whole}_mask" not in names or whole in names:
            continue
        path, _, weight = whole.rpartition(".")
        owner = next((part for at, part in module.named_modules() if at == path), None)
        if owner is not None and owner._parameters.get(weight) is not None and not hasattr(owner, f"{weight}_orig"):
            prune.identity(owner, weight)  # type: ignore[no-untyped-call]
