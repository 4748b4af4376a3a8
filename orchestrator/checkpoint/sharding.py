"""Sharded tensors of a checkpoint: which piece of each lies in which file. Nothing that a file says is trusted.

    sharding.json     meshes; of each sharded tensor the type, global shape, mesh and placements (written by rank 0)
    rankK.json        `pieces`: offset and shape of each piece that lies in rankK.safetensors, by the tensor's path

A piece is a box of the global tensor. The pieces of a tensor must cover it exactly: one that overlaps another, leaves a hole
or exceeds the global shape is refused with the tensor's name. A reader needs nothing else: mesh and placements are for people, and
for tensors whose layout the training does not determine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.checkpoint import safetensors_header
from kgorch.checkpoint.folder import read_json_file
from kgorch.checkpoint.json_values import count, json_list, json_table, text_line
from kgorch.checkpoint.manifest import MAX_WORLD_SIZE, Manifest, shard_names
from kgorch.checkpoint.safetensors_header import Span
from kgorch.errors import CheckpointBroken

SHARDING_NAME = "sharding.json"
MAX_MESH_DIMENSIONS = 16
PLACEMENT_PATTERN = re.compile(r"R|_?S\((\d{1,2})(, [1-9]\d{0,5})?\)")
"""Replicate, Shard(dimension), and _StridedShard(dimension, factor): FSDP2 over tensor parallelism on the same dimension."""


class Region(NamedTuple):
    """A box of a tensor: first index and size, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """The part that both have; None where that is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = [
            min(one + size, two + extent)
            for one, size, two, extent in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, other: Region) -> Region:
        """The same box, counted from the first element of the other one."""
        return Region(tuple(one - two for one, two in zip(self.offset, other.offset, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Region:
    """The region of a whole tensor."""
    return Region((0,) * len(shape), tuple(shape))


class Piece(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        file: name of the shard that holds it under the tensor's path.
        region: what it is of the global tensor.
    """

    file: str
    region: Region


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A device mesh of the saved run.

    Attributes:
        shape: by dimension.
        names: of the dimensions.
        ranks: row by row.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def describe(self) -> str:
        """As "2x4 (dp, tp)"."""
        return "x".join(map(str, self.shape)) + (f" ({', '.join(self.names)})" if any(self.names) else "")


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A tensor that lies in pieces.

    Attributes:
        dtype: a key of safetensors_header.ELEMENT_BYTES.
        shape: of the whole tensor.
        mesh: index of its mesh.
        placements: one a dimension of the mesh, as PLACEMENT_PATTERN has them.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh: int
    placements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharded tensors of a checkpoint.

    Attributes:
        meshes: of the saved run.
        tensors: by path.
        pieces: of each tensor by path, which cover it exactly; filled by `with_pieces`.
    """

    meshes: tuple[MeshRecord, ...] = ()
    tensors: Mapping[str, ShardedTensor] = field(default_factory=dict)
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)

    def describe(self) -> str:
        """The meshes in words."""
        return ", ".join(dict.fromkeys(mesh.describe() for mesh in self.meshes))


def parse_sharding(document: Any) -> Sharding:
    """The content of sharding.json, without pieces. Raises: ValueError, which names the tensor."""
    table = json_table(document)
    meshes = tuple(_mesh(item) for item in json_list(table.get("meshes")))
    tensors = json_table(table.get("tensors"))
    return Sharding(meshes, {path: _tensor(path, entry, meshes) for path, entry in tensors.items()})


def parse_pieces(rank_document: Mapping[str, Any]) -> dict[str, Region]:
    """The pieces that a rankK.json lists, by path; none in one without sharded tensors. Raises: ValueError."""
    pieces = {}
    for path, entry in json_table(rank_document.get("pieces", {})).items():
        if len(json_list(entry)) != 2 or not all(safetensors_header.is_shape(part) for part in entry):
            raise ValueError(f"{path!r:.80}: not a piece: {entry!r:.80}")
        pieces[path] = Region(tuple(entry[0]), tuple(entry[1]))
    return pieces


def with_pieces(sharding: Sharding, by_file: Mapping[str, Mapping[str, Region]]) -> Sharding:
    """The same with the pieces of all files.

    Args:
        by_file: `parse_pieces` of each rank, by the name of its shard.

    Raises:
        ValueError: names a tensor whose pieces do not cover it exactly.
    """
    pieces: dict[str, list[Piece]] = {path: [] for path in sharding.tensors}
    for file, regions in by_file.items():
        for path, region in regions.items():
            if path not in pieces:
                raise ValueError(f"{file} has a piece of {path!r:.80}, which is no sharded tensor")
            pieces[path].append(Piece(file, region))
    for path, parts in pieces.items():
        try:
            check_cover(sharding.tensors[path].shape, [part.region for part in parts])
        except ValueError as error:
            raise ValueError(f"the tensor {path!r:.200}: {error}") from None
    return Sharding(sharding.meshes, sharding.tensors, pieces)


def check_spans(sharding: Sharding, spans: Mapping[str, Mapping[str, Span]]) -> None:
    """Compare the pieces with the headers of the shards.

    Raises:
        ValueError: a shard lacks a piece, holds it in another shape or type, or holds one that its rank does not list.
    """
    listed = {(piece.file, path) for path, pieces in sharding.pieces.items() for piece in pieces}
    for file, tensors in spans.items():
        if stray := next((path for path in tensors if path in sharding.tensors and (file, path) not in listed), None):
            raise ValueError(f"{file} holds {stray!r:.200}, and its rank lists no such piece")
    for path, pieces in sharding.pieces.items():
        for file, region in pieces:
            span = spans.get(file, {}).get(path)
            expected = (sharding.tensors[path].dtype, region.shape)
            if span is None or (span.dtype, span.shape) != expected:
                found = "nothing" if span is None else f"{span.dtype} {list(span.shape)}"
                raise ValueError(
                    f"the tensor {path!r:.200}: expected {expected[0]} {list(region.shape)} in {file}, found {found}"
                )


def check_cover(shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Check that boxes cover a tensor exactly.

    The pieces of a mesh can be separated by straight cuts: along one dimension, then each part along another. So this takes
    N log N per dimension, where comparing all pairs would let a file with 65,536 pieces cost minutes.

    Raises:
        ValueError: says what is wrong.
    """
    for region in regions:
        is_inside = len(region.shape) == len(region.offset) == len(shape) and all(
            size and start + size <= extent
            for start, size, extent in zip(region.offset, region.shape, shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"the piece {_place(region)} is empty, or exceeds the shape {list(shape)}")
    if math.prod(shape):
        _check_tiles(list(regions), whole(shape), len(shape))


def _check_tiles(tiles: list[Region], box: Region, levels: int) -> None:
    if len(tiles) == 1 and tiles[0] == box:
        return
    for dimension in range(len(box.shape)) if levels and tiles else ():
        groups = _cut(tiles, dimension)
        at = box.offset[dimension]
        end = at + box.shape[dimension]
        # One group that is shorter than the box is a hole at an end; of full length it is cut along another dimension.
        if len(groups) == 1 and (groups[0][0], groups[0][1]) == (at, end):
            continue
        for first, last, group in [*groups, (end, end, [])]:
            if first != at:
                raise ValueError(f"no piece covers index {at} of dimension {dimension}")
            if group:
                _check_tiles(group, _narrowed(box, dimension, first, last), levels - 1)
            at = last
        return
    if not tiles:
        raise ValueError("it has no piece")
    raise ValueError(f"the pieces {', '.join(_place(tile) for tile in sorted(tiles)[:2])} overlap")


def _cut(tiles: list[Region], dimension: int) -> list[tuple[int, int, list[Region]]]:
    """Groups of boxes that no cut across the dimension can divide further: start, end, boxes."""
    groups: list[tuple[int, int, list[Region]]] = []
    for tile in sorted(tiles, key=lambda tile: tile.offset[dimension]):
        start, end = tile.offset[dimension], tile.offset[dimension] + tile.shape[dimension]
        if groups and start < groups[-1][1]:
            first, last, group = groups[-1]
            group.append(tile)
            groups[-1] = (first, max(last, end), group)
        else:
            groups.append((start, end, [tile]))
    return groups


def _narrowed(box: Region, dimension: int, start: int, end: int) -> Region:
    before, after = slice(0, dimension), slice(dimension + 1, None)
    return Region(
        (*box.offset[before], start, *box.offset[after]), (*box.shape[before], end - start, *box.shape[after])
    )


def _place(region: Region) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in region.slices[:8]) + "]"


# Reading a folder


def read_sharding(folder: Path, manifest: Manifest, spans: Mapping[str, Mapping[str, Span]] | None = None) -> Sharding:
    """The sharded tensors of a checkpoint folder; none where it has none.

    Args:
        spans: headers of all its shards by name; read here when None.

    Raises:
        CheckpointBroken: names the tensor whose pieces are wrong; CheckpointUnreadable.
    """
    if not manifest.sharded:
        return Sharding()
    if spans is None:
        spans = {name: safetensors_header.read(folder, name) for name in shard_names(manifest)}
    document = read_json_file(folder, manifest, SHARDING_NAME)
    documents = {name: read_json_file(folder, manifest, name.replace(".safetensors", ".json")) for name in spans}
    try:
        sharding = collect(document, documents)
        check_spans(sharding, spans)
    except ValueError as error:
        raise CheckpointBroken(f"{folder} has an invalid sharding.json", str(error)[:300]) from None
    return sharding


def collect(document: Any, rank_documents: Mapping[str, Mapping[str, Any]]) -> Sharding:
    """The sharding with the pieces of all ranks' documents, given by the names of their shards. Raises: ValueError."""
    return with_pieces(
        parse_sharding(document), {name: parse_pieces(content) for name, content in rank_documents.items()}
    )


def _mesh(value: Any) -> MeshRecord:
    table = json_table(value)
    shape, names, ranks = (json_list(table.get(key)) for key in ("shape", "names", "ranks"))
    if not safetensors_header.is_shape(shape) or not 0 < len(shape) <= MAX_MESH_DIMENSIONS or len(names) != len(shape):
        raise ValueError(f"not a mesh: {value!r:.80}")
    if math.prod(shape) != len(ranks) or not 0 < len(ranks) <= MAX_WORLD_SIZE:
        raise ValueError(f"a mesh of {shape!r:.80} with {len(ranks)} ranks")
    return MeshRecord(tuple(shape), tuple(text_line(name) for name in names), tuple(count(rank) for rank in ranks))


def _tensor(path: str, value: Any, meshes: Sequence[MeshRecord]) -> ShardedTensor:
    table = json_table(value)
    dtype, shape, placements = table.get("dtype"), json_list(table.get("shape")), json_list(table.get("placements"))
    mesh = count(table.get("mesh"))
    if wrong := safetensors_header.name_error(path):
        raise ValueError(f"{path!r:.80} {wrong}")
    if not isinstance(dtype, str) or dtype not in safetensors_header.ELEMENT_BYTES:
        raise ValueError(f"{path!r:.80}: unknown dtype {dtype!r:.80}")
    if not safetensors_header.is_shape(shape):
        raise ValueError(f"{path!r:.80}: not a shape: {shape!r:.80}")
    if mesh >= len(meshes) or len(placements) != len(meshes[mesh].shape):
        raise ValueError(f"{path!r:.80}: {len(placements)} placements on mesh {mesh} of {len(meshes)}")
    if strange := [item for item in placements if not _is_placement(item, len(shape))]:
        raise ValueError(f"{path!r:.80}: not a placement: {strange[0]!r:.80}")
    return ShardedTensor(dtype, tuple(shape), mesh, tuple(placements))


def _is_placement(value: Any, dimensions: int) -> bool:
    match = PLACEMENT_PATTERN.fullmatch(value) if isinstance(value, str) else None
    return match is not None and (match[1] is None or int(match[1]) < dimensions)
