"""The header of a safetensors file, parsed strictly: it is compared with the file before any of it is used.

The format (https://github.com/huggingface/safetensors): eight bytes of header length, a JSON header, then the tensors. Of what
it allows, only files without gaps are accepted, of the types that kgorch writes.
"""

from __future__ import annotations

import math
import os
import struct
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from kgorch import untrusted_io
from kgorch.errors import CheckpointBroken

ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
          "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
"""Bytes of one element, by the format's name of its type."""

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17
MAX_NAME_LENGTH = 1024
MAX_DIMENSIONS = 64
METADATA = "__metadata__"


class Span(NamedTuple):
    """A tensor's bytes in the file.

    Attributes:
        dtype: a key of ELEMENT_BYTES.
        shape: of the tensor.
        start: first byte, from the beginning of the file.
        size: bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read(folder: Path, name: str) -> dict[str, Span]:
    """The tensors of a shard, by name.

    Raises: CheckpointBroken, with the file and what is wrong; CheckpointUnreadable.
    """
    try:
        with untrusted_io.open_file(folder, name) as file:
            return read_open(file, folder / name)
    except OSError as error:
        raise untrusted_io.checkpoint_error(error, f"{folder / name} cannot be read", str(error)) from None


def read_open(file: FileIO, path: Path) -> dict[str, Span]:
    """The tensors of an open shard, by name; `path` is for the message. Raises: as `read`."""
    size = os.fstat(file.fileno()).st_size
    prefix = untrusted_io.read_at(file, 0, 8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    try:
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        return parse_header(untrusted_io.read_at(file, 8, length), 8 + length, size)
    except ValueError as error:
        raise CheckpointBroken(f"{path} is not a shard", str(error)[:300]) from None


def parse_header(text: bytes, start: int, end: int) -> dict[str, Span]:
    """The tensors that a header describes, which must fill the file from `start` to `end`.

    Raises: ValueError.
    """
    table = untrusted_io.parse_json(text)
    if not isinstance(table, dict) or not text.startswith(b"{"):
        raise ValueError("the header is no table")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is no table of texts")
    if len(table) > MAX_TENSORS:
        raise ValueError(f"{len(table)} tensors, more than {MAX_TENSORS}")
    tensors = {name: _span(name, entry, start) for name, entry in table.items()}
    for name, span in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != start:
            raise ValueError(f"{name!r:.80} begins at byte {span.start}, expected {start}")
        start += span.size
    if start != end:
        raise ValueError(f"the tensors end at byte {start}, the file at {end}")
    return tensors


def name_error(name: Any) -> str:
    """What is wrong with a tensor's name, as the end of a sentence; empty for a valid name."""
    if not isinstance(name, str) or not name or name == METADATA:
        return "is no name for a tensor"
    if len(name) > MAX_NAME_LENGTH:
        return f"is longer than {MAX_NAME_LENGTH} characters"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is no Unicode"
    return ""


def _span(name: str, entry: Any, start: int) -> Span:
    if wrong := name_error(name):
        raise ValueError(f"{name!r:.80} {wrong}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.80}: expected dtype, shape and data_offsets, found {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise ValueError(f"{name!r:.80}: unknown dtype {dtype!r:.80}")
    if not is_shape(shape):
        raise ValueError(f"{name!r:.80}: not a shape: {shape!r:.80}")
    is_pair = isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets)
    if not is_pair or not 0 <= offsets[0] <= offsets[1]:
        raise ValueError(f"{name!r:.80}: not a span: {offsets!r:.80}")
    size = offsets[1] - offsets[0]
    if math.prod(shape) * ELEMENT_BYTES[dtype] != size:
        raise ValueError(f"{name!r:.80}: {dtype} {shape!r:.80} in {size} bytes")
    return Span(dtype, tuple(shape), start + offsets[0], size)


def is_shape(value: Any) -> bool:
    """Whether this is a list of whole numbers from 0 whose product, zeros left out, fits every library's 64 bits."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and item >= 0 for item in value)
        and math.prod(item or 1 for item in value) < 1 << 59
    )
