"""Checkpoints with sharded tensors, written by hand: arrays, and which box of each is in which rank's file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kgorch.checkpoint.folder import write_manifest
from kgorch.checkpoint.manifest import FileEntry, Manifest, Position
from kgorch.checkpoint.sharding import Region

DTYPES = {"float32": "F32", "int16": "I16", "uint8": "U8", "float64": "F64"}


def grid(shape: Sequence[int], cuts: Sequence[int]) -> list[Region]:
    """A tensor cut along each dimension as DTensor does: even chunks, the last ones smaller or empty (left out)."""
    regions = [Region((), ())]
    for extent, count in zip(shape, cuts, strict=True):
        chunk = max(1, -(-extent // count))
        spans = [(start, min(chunk, extent - start)) for start in range(0, extent, chunk)]
        regions = [
            Region((*region.offset, start), (*region.shape, size)) for region in regions for start, size in spans
        ]
    return regions


def shard(arrays: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for path, array in arrays.items():
        header[path] = {
            "dtype": DTYPES[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    return (
        struct.pack("<Q", len(text))
        + text
        + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    )


def documents(arrays: dict[str, np.ndarray], cut: dict[str, Sequence[int]]) -> dict[str, Any]:
    """Contents by name of file: JSON values, and bytes of shards."""
    ranks = max(len(grid(arrays[path].shape, cuts)) for path, cuts in cut.items())
    tensors, pieces, shards = {}, [{} for _ in range(ranks)], [{} for _ in range(ranks)]
    for path, array in arrays.items():
        if path not in cut:
            shards[0][path] = array
            continue
        tensors[path] = {
            "dtype": DTYPES[str(array.dtype)], "shape": list(array.shape), "mesh": 0,
            "placements": ["S(0)" if array.ndim else "R"],
        }  # fmt: skip
        for number, region in enumerate(grid(array.shape, cut[path])):
            # Not from rank 0 on for all tensors, so that ranks differ in what they hold.
            rank = (number + len(path)) % ranks
            pieces[rank][path] = [list(region.offset), list(region.shape)]
            shards[rank][path] = array[region.slices]
    found: dict[str, Any] = {
        "sharding.json": {
            "meshes": [{"shape": [ranks], "names": ["dp"], "ranks": list(range(ranks))}],
            "tensors": tensors,
        },
        "state.json": {"model": {path.removeprefix("model."): {"$tensor": path} for path in arrays}},
    }
    for rank in range(ranks):
        found[f"rank{rank}.json"] = {"rng": {}, "own": {}, "tensors": sorted(shards[rank]), "pieces": pieces[rank]}
        found[f"rank{rank}.safetensors"] = shard(shards[rank])
    return found


def write(folder: Path, contents: dict[str, Any]) -> Path:
    """The checkpoint of these contents, with a manifest that fits them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, content in contents.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(raw)
        files[name] = FileEntry(len(raw), xxhash.xxh3_128(raw).hexdigest())
    ranks = sum(name.endswith(".safetensors") for name in contents)
    at = "2026-11-20T10:00:00+00:00"
    write_manifest(folder, Manifest("run", "id", "train", Position(), ranks, at, files=files, sharded=True))
    return folder


def array(shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Every element another number."""
    return np.arange(math.prod(shape)).astype(dtype).reshape(shape)


def shard_of_tensors(tensors: dict[str, Any]) -> bytes:
    """The same of PyTorch's tensors."""
    from safetensors.torch import save

    return save({path: tensor.contiguous() for path, tensor in tensors.items()})
