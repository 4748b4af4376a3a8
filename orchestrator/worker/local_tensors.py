"""DTensors (FSDP2, tensor parallelism) as this rank sees them. Nothing here communicates.

An operation on a DTensor may be a collective, and hangs where one rank alone calls it. Code that looks at the state of one rank
takes `local` of every tensor first.

PyTorch's module of DTensors takes long to import, so it is used only where the script has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

MODULE = "torch.distributed.tensor"

ALIGNMENT = 64
"""Bytes: PyTorch allocates CPU memory at multiples of it (c10/core/alignment.h)."""


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor, replicated ones included."""
    module = sys.modules.get(MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor, detached; a plain tensor as it is."""
    if not is_sharded(tensor):
        plain: torch.Tensor = tensor
        return plain
    # to_local() is an operation of autograd: 50 µs each, where a snapshot looks at a thousand tensors.
    piece: torch.Tensor = tensor._local_tensor
    if type(piece) is not torch.Tensor:  # the result of a collective that is still under way
        piece = tensor.detach().to_local()
    return piece.detach()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not lie as PyTorch allocates: a sum on a CPU has other bits at another address."""
    return tensor if is_sharded(tensor) or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory: tied weights. A DTensor has no address, and its piece may be empty."""
    if is_sharded(tensor):
        piece = tensor._local_tensor
        place = (piece.untyped_storage()._cdata, piece.storage_offset())
        return (*place, tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh)
    view = (tensor.is_conj(), tensor.is_neg())  # of the same memory, with other values
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device.index, *view)


def is_any_sharded(tensors: Any) -> bool:
    """Whether one of the tensors is a DTensor; without looking at them where no script has imported that module."""
    return MODULE in sys.modules and any(is_sharded(tensor) for tensor in tensors)
