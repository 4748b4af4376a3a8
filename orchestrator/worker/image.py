"""A rank's share of the state as one safetensors file image in host memory, laid out once and filled at each save.

The file format (https://github.com/huggingface/safetensors): eight bytes of header length, a JSON header, then the
tensors without a gap. Wider types come first, so each lies at a multiple of its own size and a view can be made of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import torch

from orchestrator.worker.state import DTYPES

Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def layout_of(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """The order of the tensors in the image; equal layouts can share one buffer."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return tuple((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in order)


class Image:
    """Attributes: content: uint8 [bytes of the whole file], pinned where the state lies on a GPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout_of(tensors)
        header, offset, spans = {}, 0, []
        for name, dtype, shape in self.layout:
            size = tensors[name].numel() * tensors[name].element_size()
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            spans.append((name, offset, size, dtype, shape))
            offset += size
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        head = struct.pack("<Q", len(text)) + text
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        self.content = torch.empty(
            len(head) + offset, dtype=torch.uint8, pin_memory=pinned
        ).zero_()  # touched before it is needed
        self.content[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._views = {
            name: self.content[len(head) + start : len(head) + start + size].view(dtype).view(shape)
            for name, start, size, dtype, shape in spans
        }

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in; when it returns, training may change them."""
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name], non_blocking=True)
        if self.content.is_pinned():
            torch.cuda.synchronize()

    def __len__(self) -> int:
        return self.content.numel()


def share(tensors: Mapping[str, torch.Tensor], own: set[str], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """What this rank writes: its part of the replicated tensors, largest first to the least laden, and all of its own.

    Every rank comes to the same split without a word between them.
    """
    laden, mine = [0] * world_size, {}
    for name in sorted(tensors.keys() - own, key=lambda name: (-tensors[name].nbytes, name)):
        least = laden.index(min(laden))
        laden[least] += tensors[name].nbytes
        if least == rank:
            mine[name] = tensors[name]
    return mine | {name: tensors[name] for name in own}
