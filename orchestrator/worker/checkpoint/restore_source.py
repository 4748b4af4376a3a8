"""The two places that a rank resumes from: a checkpoint folder, or the newest snapshot in the keeper's memory."""

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
from safetensors import SafetensorError, safe_open

from kgorch import untrusted_io
from kgorch.checkpoint import safetensors_header
from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.checkpoint.manifest import Manifest, parse_manifest, shard_names
from kgorch.errors import CannotRestore, CheckpointBroken
from kgorch.protocol.snapshot_messages import SnapshotInfo
from kgorch.worker.tagged_json import DTYPES, Fetch

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class SnapshotGone(RuntimeError):
    """The keeper died or holds a newer snapshot than the launch file names: the next attempt starts from disk."""


class RestoreSource(Protocol):
    """A saved state.

    Attributes:
        manifest: of the checkpoint; its `world_size` is the number of (virtual) ranks.
        tree: state.json.
    """

    manifest: Manifest
    tree: dict[str, Any]

    def own(self, rank: int) -> dict[str, Any]:
        """rankK.json; rank 0's for a rank that the saved run did not have."""

    def fetcher(self, rank: int) -> Fetch:
        """Reads tensors by path, as this rank sees them: its own copy where it has one, else that of the lowest rank."""


def find(
    folder: str | None, snapshot: int | None, fetch: Callable[[], tuple[SnapshotInfo, list[int]]]
) -> RestoreSource | None:
    """What an attempt continues from; None where the stage begins.

    Args:
        folder: the launch file's checkpoint.
        snapshot: number of the launch file's snapshot, which takes the place of the folder; None where it names none.
        fetch: gets the newest snapshot from the keeper.

    Raises:
        CheckpointBroken: the checkpoint cannot be read.
        SnapshotGone: the keeper holds another snapshot, or none.
    """
    if snapshot is None:
        return FolderSource(Path(folder)) if folder else None
    try:
        newest, descriptors = fetch()
    except OSError as error:
        raise SnapshotGone(f"the keeper cannot be asked: {error}") from None
    if newest.number != snapshot:
        raise SnapshotGone(f"expected snapshot {snapshot}, found {newest.number}")
    return SnapshotSource(newest, descriptors)


class ShardReader:
    """Reads the tensors of a checkpoint folder as one rank sees them: its own copy where it has one, else rank 0's.

    Raises:
        CheckpointBroken: a shard is malformed.
        CheckpointUnreadable: a shard cannot be read at the moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        order = shard_names(manifest)
        for name in [name for name in order if name == f"rank{rank}.safetensors"] + order:
            try:
                with untrusted_io.open_file(folder, name) as file:
                    safetensors_header.read_open(file, folder / name)
                    # By descriptor, so that the file that is read is the one whose header was checked.
                    shard: Any = safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")
            except OSError as error:
                raise untrusted_io.checkpoint_error(error, f"{folder / name} cannot be read", str(error)) from None
            except SafetensorError as error:
                raise CheckpointBroken(f"{folder / name} is not a shard", str(error)[:300]) from None
            for tensor in shard.keys():  # noqa: SIM118  (no dict)
                self._files.setdefault(tensor, shard)

    def fetch(self, name: str) -> torch.Tensor:
        """The tensor of that path. Raises: CannotRestore, CheckpointBroken."""
        if name not in self._files:
            raise CannotRestore(f"the checkpoint's shards lack the tensor {name!r:.200}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        # A bool of another byte is undefined behaviour in PyTorch's kernels.
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CheckpointBroken(f"{name!r:.200} in {self._folder} holds bytes that are neither true nor false")
        return tensor


class FolderSource:
    """A checkpoint folder, as a RestoreSource."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_checkpoint(folder)
        self.tree = read_json_file(folder, self.manifest, "state.json")
        self._folder = folder

    def own(self, rank: int) -> dict[str, Any]:
        number = rank if rank < self.manifest.world_size else 0
        return read_json_file(self._folder, self.manifest, f"rank{number}.json")

    def fetcher(self, rank: int) -> Fetch:
        return ShardReader(self._folder, self.manifest, rank).fetch


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in a mapped snapshot buffer; `start` in bytes."""

    image: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def copied(self) -> torch.Tensor:
        """A copy, because the buffer is filled again while the restored tensor lives on."""
        count = int(torch.Size(self.shape).numel())
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.image, dtype=self.dtype, count=count, offset=self.start).view(self.shape).clone()


class SnapshotSource:
    """A snapshot in the keeper's memory, as a RestoreSource.

    Args:
        held: the keeper's description of the snapshot.
        descriptors: of the buffers, one per process of the saved attempt; closed here.
    """

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
        self.manifest = parse_manifest(self._bytes("described"))
        self.tree = self._json("state.json")

    def own(self, rank: int) -> dict[str, Any]:
        return self._json(f"rank{rank if rank < self.manifest.world_size else 0}.json")

    def fetcher(self, rank: int) -> Fetch:
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
        document: dict[str, Any] = json.loads(self._bytes(name))
        return document

    def _bytes(self, name: str) -> bytes:
        number, start, size = self._files[name]
        return self._images[number][start : start + size]
