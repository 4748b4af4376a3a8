"""A copy of a tensor in host memory that nobody waits for until it is needed."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A tensor on its way from its device to host memory, as it is when this is made.

    On CUDA the copy is queued behind the work of the current stream. Use it on the thread that computes: a device that never comes
    to an end would hold any other thread up as well, and a call of CUDA breaks a graph that the script captures meanwhile.

    Attributes:
        values: in pinned memory for CUDA; whole once `is_complete`, or after `wait`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.values.copy_(tensor, non_blocking=True)
        self._event: Any = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()

    def is_complete(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event:
            self._event.synchronize()
