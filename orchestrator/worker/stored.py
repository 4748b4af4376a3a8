"""What a rank goes on from: a checkpoint folder, or the newest snapshot in the keeper's memory. Both are read the same way."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from orchestrator.checkpoint.folder import read_checkpoint, read_json_file
from orchestrator.checkpoint.manifest import Manifest, parse_manifest
from orchestrator.errors import CannotRestore
from orchestrator.protocol.snapshot_messages import SnapshotInfo
from orchestrator.worker import state

_DTYPES = {name: dtype for dtype, name in state.DTYPES.items()}


class SnapshotGone(RuntimeError):
    """The keeper died, or another snapshot took the place of the one that was promised: to be launched from disk."""


class Stored(Protocol):
    """Attributes: described: its `world_size` is the number of (virtual) ranks. tree: state.json."""

    described: Manifest
    tree: dict[str, Any]

    def own(self, rank: int) -> dict[str, Any]:
        """rankK.json, of rank 0 for a rank that there was not."""

    def fetcher(self, rank: int) -> Callable[[str], torch.Tensor]:
        """Takes a tensor's path, gives it as this rank sees it."""


class Folder:
    def __init__(self, folder: Path) -> None:
        self.described = read_checkpoint(folder)
        self.tree = read_json_file(folder, self.described, "state.json")
        self._folder = folder

    def own(self, rank: int) -> dict[str, Any]:
        number = rank if rank < self.described.world_size else 0
        return read_json_file(self._folder, self.described, f"rank{number}.json")

    def fetcher(self, rank: int) -> Callable[[str], torch.Tensor]:
        return state.Shards(self._folder, self.described, rank).fetch


@dataclass(frozen=True, slots=True)
class _Tensor:
    image: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def copied(self) -> torch.Tensor:
        """A copy: the image is filled anew while what was restored lives on."""
        count = int(torch.Size(self.shape).numel())
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.image, dtype=self.dtype, count=count, offset=self.start).view(self.shape).clone()


class InMemory:
    def __init__(self, held: SnapshotInfo, descriptors: list[int]) -> None:
        self._files: dict[str, tuple[int, int, int]] = {}
        try:
            images = [mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._images = images
        for number, files in enumerate(held.shares):
            self._files |= {name: (number, start, size) for name, (start, size) in files.items()}
        self.described = parse_manifest(self._bytes("described"))
        self.tree = self._json("state.json")

    def own(self, rank: int) -> dict[str, Any]:
        return self._json(f"rank{rank if rank < self.described.world_size else 0}.json")

    def fetcher(self, rank: int) -> Callable[[str], torch.Tensor]:
        tensors: dict[str, _Tensor] = {}
        shards = sorted(
            (name for name in self._files if name.endswith(".safetensors")),
            key=lambda name: (name != f"rank{rank}.safetensors", int(name[4:].split(".")[0])),
        )
        for name in shards:
            for path, tensor in self._shard(name).items():
                tensors.setdefault(path, tensor)

        def fetch(path: str) -> torch.Tensor:
            if path not in tensors:
                raise CannotRestore(f"the snapshot's shards lack the tensor {path}")
            return tensors[path].copied()

        return fetch

    def _shard(self, name: str) -> Mapping[str, _Tensor]:
        number, start, _ = self._files[name]
        image = self._images[number]
        (length,) = struct.unpack_from("<Q", image, start)
        begin = start + 8 + length
        header = json.loads(image[start + 8 : begin])
        return {
            path: _Tensor(image, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + entry["data_offsets"][0])
            for path, entry in header.items()
        }

    def _json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._bytes(name))
        return found

    def _bytes(self, name: str) -> bytes:
        number, start, size = self._files[name]
        return self._images[number][start : start + size]
