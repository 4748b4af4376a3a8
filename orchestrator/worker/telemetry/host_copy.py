"""Asynchronous copies of tensors to host memory."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """A tensor's values at this moment, on their way from its device to host memory.

    On CUDA the copy is queued behind the work of the current stream. Use it only on the thread that computes: a device that hangs
    would block any other thread as well, and a CUDA call breaks a graph that the script captures meanwhile.

    Attributes:
        values: same shape and type, in pinned memory for CUDA; complete once `is_complete` is true, or after `wait`.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.values.copy_(tensor, non_blocking=True)
        self._event: Any = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._event:
            self._event.record()

    def is_complete(self) -> bool:
        """Whether the copy has arrived; does not wait."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the copy has arrived."""
        if self._event:
            self._event.synchronize()
