"""Sharded tensors (DTensor, as FSDP2 and tensor parallelism make them): this rank's pieces to save, and pieces to load.

A rank saves the piece that it holds, and nothing is gathered. Of replicas one is saved: by turns each rank that holds one. A rank
loads what its own placement needs, out of the pieces that the saved run has left, so no rank waits for another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from kgorch.checkpoint.sharding import Region, ShardedTensor
from kgorch.errors import CannotRestore
from kgorch.worker.local_tensors import aligned, is_sharded
from kgorch.worker.tagged_json import DTYPES, Fetch


class TensorReader(Protocol):
    """Reads the tensors of a saved state by path, as one rank sees them (restore_source.py)."""

    def fetch(self, path: str) -> torch.Tensor:
        """The whole tensor, put together from its pieces where it is sharded. Raises: CannotRestore, CheckpointBroken."""

    def fetch_region(self, path: str, region: Region) -> torch.Tensor:
        """A part of the tensor; only that is read. Raises: as `fetch`."""

    def shape_of(self, path: str) -> tuple[int, ...]:
        """Of the whole tensor. Raises: as `fetch`."""

    def sharded(self, path: str) -> ShardedTensor | None:
        """How the saved run had sharded it; None where it had not."""


class Layout(NamedTuple):
    """How a tensor is spread over ranks.

    Attributes:
        mesh: the DeviceMesh.
        placements: one a dimension of the mesh.
        shape: of the whole tensor.
        device: of the local piece.
        is_exact: false for an optimizer's state, whose tensors may have another shape than the parameter that this is of.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    device: torch.device
    is_exact: bool = True


def layout_of(tensor: Any) -> Layout:
    """The layout of a DTensor."""
    return Layout(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.device)


@functools.lru_cache(maxsize=1 << 14)
def _region(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Region | None:
    from torch.distributed.tensor import _utils as utils  # what torch.distributed.checkpoint uses

    if mesh.get_coordinate() is None:
        return None
    size, offset = utils.compute_local_shape_and_global_offset(shape, mesh, placements)
    return Region(tuple(offset), tuple(size))


def region_of(layout: Layout) -> Region | None:
    """This rank's piece; None where it has no part in the mesh."""
    return _region(layout.mesh, layout.placements, layout.shape)


# Saving


def pieces_to_save(tensors: Mapping[str, torch.Tensor]) -> dict[str, Region]:
    """The pieces that this rank saves, by path: no empty ones, and of replicas one.

    Every rank computes the same division, without communication: the replicas of a tensor take turns, from large to small ones. A
    mesh that is a part of another one (`mesh["tp"]`) does not know that the ranks beside it hold the same: then the ranks of
    the mesh with rank 0 save it.

    Raises:
        CannotRestore: a tensor is a sum that is still to be made (Partial).
    """
    sharded = {path: tensor for path, tensor in tensors.items() if is_sharded(tensor)}
    pieces = {}
    for turn, path in enumerate(sorted(sharded, key=lambda path: (-sharded[path].numel(), path))):
        layout = layout_of(sharded[path])
        if any(placement.is_partial() for placement in layout.placements):
            raise CannotRestore(
                f"{path} is a DTensor with a Partial placement, whose ranks hold terms of a sum",
                next_step="redistribute it to Shard or Replicate before it is saved",
                error_code="KG204",
            )
        region = region_of(layout)
        if region and math.prod(region.shape) and _has_turn(layout, turn):
            pieces[path] = region
    return pieces


def _has_turn(layout: Layout, turn: int) -> bool:
    replica = replicas = 0
    coordinate = layout.mesh.get_coordinate()
    for at, size, placement in zip(coordinate, layout.mesh.shape, layout.placements, strict=True):
        if placement.is_replicate():
            replica, replicas = replica * size + at, max(replicas, 1) * size
    return replica == turn % max(replicas, 1) and _has_rank_0(layout.mesh)


@functools.lru_cache(maxsize=64)
def _has_rank_0(mesh: Any) -> bool:
    return 0 in mesh.mesh.flatten().tolist()


def rank_entry(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The entry of rankK.json that says where this rank's pieces lie; empty where there are none."""
    pieces = {path: [list(part) for part in region] for path, region in pieces_to_save(tensors).items()}
    return {"pieces": pieces} if pieces else {}


def document_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The content of sharding.json (checkpoint/sharding.py); empty where no tensor is sharded."""
    meshes: dict[Any, int] = {}
    entries = {}
    for path, tensor in tensors.items():
        if is_sharded(tensor):
            layout = layout_of(tensor)
            entries[path] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(layout.shape),
                "mesh": meshes.setdefault(layout.mesh, len(meshes)),
                "placements": [_name(placement) for placement in layout.placements],
            }
    return {"meshes": [_mesh_entry(mesh) for mesh in meshes], "tensors": entries} if entries else {}


def _mesh_entry(mesh: Any) -> dict[str, Any]:
    ranks = mesh.mesh
    names = list(mesh.mesh_dim_names or [""] * ranks.ndim)
    return {"shape": list(ranks.shape), "names": names, "ranks": ranks.flatten().tolist()}


def _name(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    factor = getattr(placement, "split_factor", None)
    return f"S({placement.dim})" if factor is None else f"_S({placement.dim}, {factor})"


def describe(tensors: Iterable[Any]) -> str:
    """The meshes of the sharded tensors, as "2x4 (dp, tp)"; empty where none is sharded."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if is_sharded(tensor))
    names = [
        "x".join(map(str, mesh.shape)) + (f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else "")
        for mesh in meshes
    ]
    return ", ".join(dict.fromkeys(names))


# Loading


def fetch_for(layouts: Mapping[str, Layout], reader: TensorReader) -> Fetch:
    """A function that fetches tensors as this rank's training has them: those with a layout as DTensors, others whole.

    Raises, when it is called:
        CannotRestore: the tensor has another shape in the checkpoint, or no layout is known for it.
    """

    def fetch(path: str) -> torch.Tensor:
        layout = layouts.get(path)
        if layout is None:
            return reader.fetch(path)
        if reader.shape_of(path) != layout.shape:
            if layout.is_exact or reader.sharded(path) is None:
                return reader.fetch(path)  # which its object refuses, or an optimizer's counter of steps
            layout = _of_saved(path, layout, reader)
        return placed(layout, functools.partial(reader.fetch_region, path))

    return fetch


def placed(layout: Layout, read: Callable[[Region], torch.Tensor]) -> torch.Tensor:
    """A DTensor of this layout. It never communicates.

    Args:
        read: returns a part of the whole tensor.
    """
    from torch.distributed.tensor import DTensor

    region = region_of(layout) or Region((0,) * len(layout.shape), (0,) * len(layout.shape))
    piece = read(region).to(layout.device)
    tensor: torch.Tensor = DTensor.from_local(
        aligned(piece), layout.mesh, layout.placements, run_check=False,
        shape=torch.Size(layout.shape), stride=_contiguous(layout.shape),
    )  # fmt: skip
    return tensor


def like(value: torch.Tensor, own: Any) -> torch.Tensor:
    """A whole tensor as one of the layout of `own`, for weights from a file; as it is where `own` is no DTensor."""
    if not is_sharded(own) or is_sharded(value) or value.shape != own.shape:
        return value
    return placed(layout_of(own), lambda region: value[region.slices].clone())


def _of_saved(path: str, layout: Layout, reader: TensorReader) -> Layout:
    """The layout of an optimizer's tensor that has another shape than its parameter: as it was saved, on the parameter's mesh."""
    saved, shape = reader.sharded(path), reader.shape_of(path)
    if saved is None or len(saved.placements) != layout.mesh.ndim:
        raise CannotRestore(
            f"{path} has the shape {list(shape)}, its parameter {list(layout.shape)}, and the mesh is another one:"
            " how this optimizer shards it cannot be known",
            next_step="resume on the mesh that it was saved on, or begin a new run with `kgorch start PLAN --fresh`",
        )
    return layout._replace(placements=tuple(map(_placement, saved.placements)), shape=shape)


def _placement(name: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard, placement_types

    if name == "R":
        return Replicate()
    kind, _, numbers = name.rstrip(")").partition("(")
    values = [int(number) for number in numbers.split(",")]
    strided: Any = placement_types._StridedShard
    return Shard(values[0]) if kind == "S" else strided(values[0], split_factor=values[1])


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[index + 1 :]) for index in range(len(shape)))
