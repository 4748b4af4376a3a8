"""Modules inside wrappers of PyTorch."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrapped(value: Any) -> Any:
    """The module inside DistributedDataParallel and torch.compile, so that names do not depend on these wrappers."""
    while isinstance(value, nn.Module):
        inner = getattr(value, "_orig_mod", None) or (
            value.module if isinstance(value, nn.parallel.DistributedDataParallel) else None
        )
        if inner is None:
            return value
        value = inner
    return value
