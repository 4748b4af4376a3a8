"""Assembly of a sharded tensor out of its pieces, in bands of rows: its bytes in order, in memory that does not grow with it.

A band is a contiguous part of the whole tensor: some rows of one dimension, with all dimensions before it fixed. Of each
piece the part in the band is read at once, and copied to its place run by run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO

from kgorch import untrusted_io
from kgorch.checkpoint.safetensors_header import ELEMENT_BYTES, Span
from kgorch.checkpoint.sharding import Piece, Region, ShardedTensor
from kgorch.errors import CheckpointBroken

BAND_BYTES = 4 << 20
"""Most bytes of a band, and of the part of a piece that is read for it."""


def bands(
    tensor: ShardedTensor, pieces: Sequence[Piece], spans: Mapping[str, Span], files: Mapping[str, FileIO]
) -> Iterator[memoryview]:
    """The bytes of the whole tensor, in order; each piece in the memory of the one before.

    Args:
        pieces: which cover the tensor exactly.
        spans: of each piece in its file, by the file's name.
        files: open for reading, by name.

    Raises:
        CheckpointBroken: a file is shorter than its header says.
    """
    size = ELEMENT_BYTES[tensor.dtype]
    for band in _regions(tensor.shape, max(1, BAND_BYTES // size)):
        content = memoryview(bytearray(math.prod(band.shape) * size))
        for piece in pieces:
            if part := piece.region.overlap(band):
                source = _read(files[piece.file], piece, spans[piece.file], part, size)
                _copy(source, content, part.relative_to(band), band.shape, size)
        yield content


def _regions(shape: Sequence[int], most: int) -> Iterator[Region]:
    """Regions of at most `most` elements that follow each other in a tensor without gaps."""
    if not shape:
        yield Region((), ())
        return
    if not math.prod(shape):
        return
    inner = next(at for at in range(len(shape)) if math.prod(shape[at + 1 :]) <= most)
    rows = max(1, most // math.prod(shape[inner + 1 :]))
    rest = tuple(shape[inner + 1 :])
    for outer in itertools.product(*map(range, shape[:inner])):
        for start in range(0, shape[inner], rows):
            extent = (*((1,) * inner), min(rows, shape[inner] - start), *rest)
            yield Region((*outer, start, *((0,) * len(rest))), extent)


def _read(file: FileIO, piece: Piece, span: Span, part: Region, size: int) -> memoryview:
    """A part of a piece: contiguous there, too, for it has all of the piece's inner dimensions."""
    inside = part.relative_to(piece.region)
    start = sum(index * math.prod(piece.region.shape[at + 1 :]) for at, index in enumerate(inside.offset))
    length = math.prod(part.shape) * size
    content = untrusted_io.read_at(file, span.start + start * size, length)
    if len(content) != length:
        raise CheckpointBroken(f"{piece.file} is shorter than its header says")
    return memoryview(content)


def _copy(source: memoryview, target: memoryview, place: Region, shape: Sequence[int], size: int) -> None:
    """Copy a box, given row by row, to its place in a larger one of this shape."""
    dimensions = len(shape)
    strides = [math.prod(shape[at + 1 :]) * size for at in range(dimensions)]
    # The inner dimensions that the box has all of are one run.
    split = dimensions
    while split and place.shape[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    run = math.prod(place.shape[split:]) * size
    starts = [
        range(first * stride, (first + count) * stride, stride)
        for first, count, stride in zip(place.offset, place.shape, strides, strict=True)
    ]
    inner = sum(first * stride for first, stride in zip(place.offset[split:], strides[split:], strict=True))
    at = 0
    for outer in itertools.product(*starts[:split]):
        to = sum(outer) + inner
        target[to : to + run] = source[at : at + run]
        at += run
