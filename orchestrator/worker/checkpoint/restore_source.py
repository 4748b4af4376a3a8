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
from kgorch.checkpoint.manifest import MANIFEST_NAME, Manifest, parse_manifest, shard_names
from kgorch.checkpoint.safetensors_header import Span
from kgorch.checkpoint.sharding import (
    SHARDING_NAME,
    Region,
    ShardedTensor,
    Sharding,
    collect,
    read_sharding,
    whole,
)
from kgorch.errors import CannotRestore, CheckpointBroken
from kgorch.protocol.snapshot_messages import STAMP_BYTES, SnapshotInfo
from kgorch.worker.checkpoint.sharded_tensors import TensorReader
from kgorch.worker.tagged_json import DTYPES

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

    def reader(self, rank: int) -> TensorReader:
        """Reads tensors by path, as this rank sees them: its own copy where it has one, else that of the lowest rank."""

    def is_readable(self) -> bool:
        """Whether it is still there: retention deletes folders, and later snapshots fill the buffers."""


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


class PieceReader:
    """Reads tensors out of shards. A TensorReader; a subclass says how a file is read.

    Args:
        files: name of the shard that a plain tensor is read from, by path.
        sharding: pieces of the sharded ones.
    """

    def __init__(self, files: Mapping[str, str], sharding: Sharding) -> None:
        self._files, self._sharding = files, sharding

    def sharded(self, path: str) -> ShardedTensor | None:
        return self._sharding.tensors.get(path)

    def shape_of(self, path: str) -> tuple[int, ...]:
        saved = self.sharded(path)
        return saved.shape if saved else self._shape(self._file_of(path), path)

    def fetch(self, path: str) -> torch.Tensor:
        if self.sharded(path):
            return self.fetch_region(path, whole(self.shape_of(path)))
        return self._read(self._file_of(path), path, None)

    def fetch_region(self, path: str, region: Region) -> torch.Tensor:
        if not (saved := self.sharded(path)):
            return self._read(self._file_of(path), path, region)
        pieces = self._sharding.pieces[path]
        found = [(piece, part) for piece in pieces if (part := piece.region.overlap(region))]
        if [part for _, part in found] == [region]:
            [(piece, _)] = found
            return self._read(piece.file, path, _inside(region, piece.region))
        result = torch.empty(region.shape, dtype=_DTYPES[saved.dtype])
        for piece, part in found:
            result[part.relative_to(region).slices] = self._read(piece.file, path, _inside(part, piece.region))
        return result

    def _file_of(self, path: str) -> str:
        if path not in self._files:
            raise CannotRestore(f"the checkpoint's shards lack the tensor {path!r:.200}")
        return self._files[path]

    def _shape(self, file: str, path: str) -> tuple[int, ...]:
        raise NotImplementedError

    def _read(self, file: str, path: str, region: Region | None) -> torch.Tensor:
        """A part of the tensor in that file; all of it when None. The result may be a view of the file (see tagged_json.kept)."""
        raise NotImplementedError


def _inside(part: Region, piece: Region) -> Region | None:
    """The part, counted from the piece's first element; None for all of the piece, which is read faster."""
    return None if part == piece else part.relative_to(piece)


class ShardReader(PieceReader):
    """Reads the tensors of a checkpoint folder as one rank sees them: its own copy where it has one, else rank 0's.

    Raises:
        CheckpointBroken: a shard is malformed.
        CheckpointUnreadable: a shard cannot be read at the moment.
    """

    def __init__(self, folder: Path, manifest: Manifest, rank: int) -> None:
        self._folder = folder
        self._shards: dict[str, Any] = {}
        self._spans: dict[str, dict[str, Span]] = {}
        files: dict[str, str] = {}
        order = shard_names(manifest)
        for name in dict.fromkeys([name for name in order if name == f"rank{rank}.safetensors"] + order):
            try:
                with untrusted_io.open_file(folder, name) as file:
                    self._spans[name] = safetensors_header.read_open(file, folder / name)
                    # By descriptor, so that the file that is read is the one whose header was checked.
                    self._shards[name] = safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt")
            except OSError as error:
                raise untrusted_io.checkpoint_error(error, f"{folder / name} cannot be read", str(error)) from None
            except SafetensorError as error:
                raise CheckpointBroken(f"{folder / name} is not a shard", str(error)[:300]) from None
            for path in self._spans[name]:
                files.setdefault(path, name)
        super().__init__(files, read_sharding(folder, manifest, self._spans))

    def _shape(self, file: str, path: str) -> tuple[int, ...]:
        return self._spans[file][path].shape

    def _read(self, file: str, path: str, region: Region | None) -> torch.Tensor:
        shard = self._shards[file]
        tensor: torch.Tensor = shard.get_tensor(path) if region is None else shard.get_slice(path)[region.slices]
        # A bool of another byte is undefined behaviour in PyTorch's kernels.
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise CheckpointBroken(f"{path!r:.200} in {self._folder} holds bytes that are neither true nor false")
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

    def reader(self, rank: int) -> TensorReader:
        return ShardReader(self._folder, self.manifest, rank)

    def is_readable(self) -> bool:
        return (self._folder / MANIFEST_NAME).exists()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies in a mapped snapshot buffer; `start` in bytes."""

    image: mmap.mmap
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def copied(self, region: Region | None) -> torch.Tensor:
        """A copy of a part of it, because the buffer is filled again while the restored tensor lives on."""
        count = int(torch.Size(self.shape).numel())
        if not count:
            return torch.empty(region.shape if region else self.shape, dtype=self.dtype)
        view = torch.frombuffer(self.image, dtype=self.dtype, count=count, offset=self.start).view(self.shape)
        return (view[region.slices] if region else view).clone(memory_format=torch.contiguous_format)


class _ImageReader(PieceReader):
    """Reads the tensors of a snapshot."""

    def __init__(self, shards: Mapping[str, Mapping[str, _Tensor]], sharding: Sharding) -> None:
        self._shards = shards
        # The first shard that has a tensor counts, as in a folder.
        super().__init__({path: name for name in reversed(list(shards)) for path in shards[name]}, sharding)

    def _shape(self, file: str, path: str) -> tuple[int, ...]:
        return self._shards[file][path].shape

    def _read(self, file: str, path: str, region: Region | None) -> torch.Tensor:
        return self._shards[file][path].copied(region)


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
        self._images, self._number = images, held.number
        for number, files in enumerate(held.shares):
            self._files |= {name: (number, start, size) for name, (start, size) in files.items()}
        self.manifest = parse_manifest(self._bytes("described"))
        self.tree = self._json("state.json")

    def own(self, rank: int) -> dict[str, Any]:
        return self._json(f"rank{rank if rank < self.manifest.world_size else 0}.json")

    def reader(self, rank: int) -> TensorReader:
        names = sorted(
            (name for name in self._files if name.endswith(".safetensors")),
            key=lambda name: (name != f"rank{rank}.safetensors", int(name[4:].split(".")[0])),
        )
        sharding = Sharding()
        if self.manifest.sharded:
            documents = {name: self._json(name.replace(".safetensors", ".json")) for name in names}
            sharding = collect(self._json(SHARDING_NAME), documents)
        return _ImageReader({name: self._shard(name) for name in names}, sharding)

    def is_readable(self) -> bool:
        # A rank clears the stamp before it fills the buffer.
        return all(
            struct.unpack_from("<q", image, len(image) - STAMP_BYTES)[0] == self._number for image in self._images
        )

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
