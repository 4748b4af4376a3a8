"""Snapshot buffer: a rank's share of the state as the image of a safetensors file in memory that it shares with the keeper.

    [safetensors: header, tensors][JSON files …]        … room to grow … [stamp]

The file format (https://github.com/huggingface/safetensors) is eight bytes of header length, a JSON header, and the tensors without
gaps, here in such an order that each is aligned to its element size, so that a view can be made of it. The stamp is the number
of the snapshot, and 0 while the buffer is being filled: a buffer with a number is complete.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from kgorch.protocol.snapshot_messages import STAMP_BYTES
from kgorch.worker import local_tensors
from kgorch.worker.checkpoint import sharded_tensors
from kgorch.worker.tagged_json import DTYPES

Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, type and shape of each tensor, in the order of the file."""

Span = tuple[int, int]
"""Offset and length in bytes."""


class BufferTooSmall(Exception):
    """The buffer is too small.

    Attributes:
        need: bytes that it would have to hold.
    """

    def __init__(self, need: int) -> None:
        super().__init__(need)
        self.need = need


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The order of the tensors in the buffer; equal layouts have equal headers.

    Tensors that fill whole cache lines come first: behind an optimizer's counters of four bytes each, all others would be
    misaligned to the lines, and copying them took a third longer.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % 64 > 0, -tensors[name].element_size(), name))
    return tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order)


class SnapshotBuffer:
    """A mapped buffer.

    Args:
        descriptor: of a file of `capacity` bytes and a stamp; closed here. It is mapped and touched at once.
        pinned: register the memory with CUDA, so that the device copies into it directly. For a state on a GPU, and a buffer in
            memory: pages of a file on disk cannot be pinned on new kernels, and could not be written out on old ones.
    """

    def __init__(self, descriptor: int, capacity: int, *, pinned: bool = False) -> None:
        self._map = mmap.mmap(
            descriptor, capacity + STAMP_BYTES, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        )
        os.close(descriptor)
        self.capacity = capacity
        self._content = torch.frombuffer(self._map, dtype=torch.uint8, count=capacity)
        self._layout: Layout | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._end = 0
        self._stream = _pin(self._content) if pinned else None
        if self._stream:
            # Not at the exit of the process: unregistering waits for the device, which may hang.
            weakref.finalize(self, _unpin, self._content.data_ptr()).atexit = False

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA has registered the memory."""
        return self._stream is not None

    def fill(self, tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes], number: int) -> dict[str, Span]:
        """Copy the tensors and files into the buffer. When it returns, the training may change the tensors.

        Args:
            number: of the snapshot.

        Returns:
            The span of each file by name, and of the safetensors file under "".

        Raises:
            BufferTooSmall: nothing was changed.
        """
        layout = layout_of(tensors)
        if layout != self._layout:
            head, end = header_of(layout)
        else:
            head, end = b"", self._end
        need = end + sum(len(content) for content in files.values())
        if need > self.capacity:
            raise BufferTooSmall(need)
        self._stamp(0)
        if head:
            self._lay_out(layout, head, end)
        self._copy(tensors)
        spans, at = {"": (0, end)}, end
        for name, content in files.items():
            self._map[at : at + len(content)] = content
            spans[name] = (at, len(content))
            at += len(content)
        self._stamp(number)
        return spans

    def _lay_out(self, layout: Layout, head: bytes, end: int) -> None:
        self._map[: len(head)] = head
        self._layout, self._end, self._views = layout, end, {}
        at = len(head)
        for name, dtype, shape in layout:
            size = dtype.itemsize * int(torch.Size(shape).numel())
            self._views[name] = self._content[at : at + size].view(dtype).view(shape)
            at += size

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            if self._stream is None:
                for name, view in self._views.items():
                    view.copy_(tensors[name])
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            elsewhere: dict[torch.device, None] = {}
            with torch.cuda.stream(self._stream):
                for name, view in self._views.items():
                    tensor = tensors[name]
                    # A tensor that is not contiguous (channels_last) would be made so on the GPU, in memory that training needs.
                    view.copy_(tensor if tensor.is_contiguous() else tensor.to("cpu"), non_blocking=True)
                    if tensor.is_cuda and tensor.device != self._stream.device:
                        elsewhere[tensor.device] = None
            self._stream.synchronize()
            for device in elsewhere:  # copied on that device's own stream
                torch.cuda.synchronize(device)

    def _stamp(self, number: int) -> None:
        struct.pack_into("<q", self._map, self.capacity, number)


def header_of(layout: Layout) -> tuple[bytes, int]:
    """The header of a safetensors file of this layout as bytes, and the size of the whole file."""
    header, at = {}, 0
    for name, dtype, shape in layout:
        size = dtype.itemsize * int(torch.Size(shape).numel())
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + at


def _pin(content: torch.Tensor) -> torch.cuda.Stream | None:
    """Register mapped memory with CUDA; without that a copy goes through the driver's own buffers.

    Returns:
        A stream for the copies; None where CUDA refuses.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(content.data_ptr(), content.numel(), 0)) == 0:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]
    _forget_error()
    return None


def _forget_error() -> None:
    """Clear the error that CUDA keeps of a failed call: PyTorch would raise it at the next kernel, whatever that computes."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)  # PyTorch's check after a kernel raises the error and clears it


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(address)


def share(tensors: Mapping[str, torch.Tensor], own: set[str], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The tensors that this rank writes: its part of the replicated ones, all of its own, and its pieces of sharded ones.

    Every rank computes the same split, without communication.

    Args:
        own: names of the tensors that each rank keeps for itself.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not local_tensors.is_sharded(tensor)}
    mine = split({name: plain[name].nbytes for name in plain.keys() - own}, world_size)[rank]
    pieces = sharded_tensors.pieces_to_save(tensors)
    return {name: plain[name] for name in (*mine, *own)} | {name: local_tensors.local(tensors[name]) for name in pieces}


def split(sizes: Mapping[str, int], world_size: int) -> list[list[str]]:
    """Names of tensors by rank: the largest first, each to the rank with the fewest bytes so far.

    The bytes of a rank depend on the sizes alone, not on the names.
    """
    laden = [0] * world_size
    shares: list[list[str]] = [[] for _ in range(world_size)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = laden.index(min(laden))
        laden[least] += sizes[name]
        shares[least].append(name)
    return shares
