"""The header of a safetensors file, read strictly: what it says is compared with the file before anybody acts on it.

The format (https://github.com/huggingface/safetensors): eight bytes of header length, a JSON header, then the tensors.
Of what that allows, only files without gaps, of the types that kgorch writes.
"""

from __future__ import annotations

import math
import os
import struct
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import untrusted_io as foreign
from orchestrator.errors import CheckpointBroken

WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
          "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
"""Bytes of one element."""
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 1 << 17
MAX_NAME = 1024
MAX_DIMENSIONS = 64
METADATA = "__metadata__"


class Span(NamedTuple):
    """A tensor's bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read(folder: Path, name: str) -> dict[str, Span]:
    """The tensors of a shard, by name.

    Raises: CheckpointBroken, with the file and what is wrong; CheckpointUnreadable.
    """
    try:
        with foreign.open_file(folder, name) as file:
            return header(file, folder / name)
    except OSError as error:
        raise foreign.verdict(error, f"{folder / name} cannot be read", str(error)) from None


def header(file: FileIO, path: Path) -> dict[str, Span]:
    """The same of an open file; `path` is for the message."""
    size = os.fstat(file.fileno()).st_size
    begin = foreign.read_at(file, 0, 8)
    length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
    try:
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        return spans(foreign.read_at(file, 8, length), 8 + length, size)
    except ValueError as error:
        raise CheckpointBroken(f"{path} is not a shard", str(error)[:300]) from None


def spans(text: bytes, start: int, end: int) -> dict[str, Span]:
    """The tensors that a header describes, which must fill the file from `start` to `end`.

    Raises: ValueError.
    """
    table = foreign.parse(text)
    if not isinstance(table, dict) or not text.startswith(b"{"):
        raise ValueError("the header is no table")
    notes = table.pop(METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise ValueError(f"{METADATA} is no table of texts")
    if len(table) > MAX_TENSORS:
        raise ValueError(f"{len(table)} tensors, more than {MAX_TENSORS}")
    found = {name: _span(name, entry, start) for name, entry in table.items()}
    for name, span in sorted(found.items(), key=lambda item: (item[1].start, item[1].size)):
        if span.start != start:
            raise ValueError(f"{name!r:.80} begins at byte {span.start}, expected {start}")
        start += span.size
    if start != end:
        raise ValueError(f"the tensors end at byte {start}, the file at {end}")
    return found


def misnamed(name: Any) -> str:
    """What is wrong with a tensor's name; empty when it is fit."""
    if not isinstance(name, str) or not name or name == METADATA:
        return "is no name for a tensor"
    if len(name) > MAX_NAME:
        return f"is longer than {MAX_NAME} characters"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is no Unicode"
    return ""


def _span(name: str, entry: Any, start: int) -> Span:
    if wrong := misnamed(name):
        raise ValueError(f"{name!r:.80} {wrong}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.80}: expected dtype, shape and data_offsets, found {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise ValueError(f"{name!r:.80}: unknown dtype {dtype!r:.80}")
    if not is_shape(shape):
        raise ValueError(f"{name!r:.80}: not a shape: {shape!r:.80}")
    if not is_shape(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ValueError(f"{name!r:.80}: not a span: {offsets!r:.80}")
    size = offsets[1] - offsets[0]
    if math.prod(shape) * WIDTHS[dtype] != size:
        raise ValueError(f"{name!r:.80}: {dtype} {shape!r:.80} in {size} bytes")
    return Span(dtype, tuple(shape), start + offsets[0], size)


def is_shape(value: Any) -> bool:
    """A list of whole numbers from 0 whose product, zeros left out, any library can hold."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and item >= 0 for item in value)
        and math.prod(item or 1 for item in value) < 1 << 59
    )
