"""A checkpoint folder as one file. As safetensors it is put together from the shards' bytes: no tensor is made, PyTorch
not needed; what torch.save writes, a process of its own writes, which loads PyTorch."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import manifest
from orchestrator.errors import CheckpointBroken, KgorchError

MAX_HEADER_BYTES = 100 << 20
_WIDTH = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Span:
    """A tensor's bytes in a shard."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def export(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name` under the names of its state_dict, or everything under its paths.

    Wider types first, then by name: equal states give equal bytes, however many ranks wrote them. Returns the tensors.

    Raises: KgorchError when nothing was tracked under that name; CheckpointBroken.
    """
    spans = _spans(folder)
    if name is not None:
        tree = json.loads((folder / "state.json").read_bytes())
        if name not in tree:
            raise KgorchError(
                f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
            )
        spans = {path: spans[target] for path, target in _tensors(tree[name]) if target in spans}
    order = sorted(spans, key=lambda path: (-_WIDTH.get(spans[path].dtype, 1), path))
    aside = out.with_name(out.name + ".part")
    try:
        with open(aside, "wb") as file:
            _write(file, [(path, spans[path]) for path in order])
        aside.rename(out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise KgorchError(f"{out} cannot be written", str(error)) from None
    return len(order)


def export_for_torch(folder: Path, out: Path, name: str | None) -> int:
    """The same as a file of torch.save that loads with `weights_only`; everything is nested under the tracked names.

    Raises: KgorchError.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.worker.convert", str(folder), str(out), *([name] if name else [])],
            capture_output=True,
            text=True,
        )
    finally:
        out.with_name(out.name + ".part").unlink(missing_ok=True)  # of one that was killed
    if done.returncode:
        raise KgorchError(f"{out} cannot be written", done.stderr.strip() or f"exit status {done.returncode}")
    return int(done.stdout)


def writer_of(out: Path) -> Callable[[Path, Path, str | None], int]:
    """How a file of this name is written.

    Raises: KgorchError.
    """
    writers = {".safetensors": export, ".pt": export_for_torch, ".pth": export_for_torch}
    if out.suffix not in writers:
        raise KgorchError(
            f"{out}: what shall it be? Its name ends in none of {', '.join(writers)}",
            next_step=f"name it {out.with_suffix('.safetensors').name}, say",
        )
    return writers[out.suffix]


def _spans(folder: Path) -> dict[str, Span]:
    """Every tensor of the checkpoint; of one that each rank keeps for itself, rank 0's."""
    found: dict[str, Span] = {}
    for shard in manifest.shards(manifest.read(folder)):
        for path, span in _header(folder / shard):
            found.setdefault(path, span)
    return found


def _header(shard: Path) -> Iterator[tuple[str, Span]]:
    with open(shard, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(MAX_HEADER_BYTES, shard.stat().st_size - 8):
            raise CheckpointBroken(f"{shard} has a header longer than itself")
        header: dict[str, Any] = json.loads(file.read(length))
    for path, entry in header.items():
        if path != "__metadata__":
            first, end = entry["data_offsets"]
            yield path, Span(shard, entry["dtype"], tuple(entry["shape"]), 8 + length + first, end - first)


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(name in the state_dict, path in the shards) of each tensor below a part of the state tree."""
    if isinstance(value, Mapping):
        if set(value) == {"$tensor"}:
            yield path, value["$tensor"]
        else:
            for key, item in value.items():
                yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}" if path else str(index))


def _write(file: Any, items: list[tuple[str, Span]]) -> None:
    header, at = {}, 0
    for path, span in items:
        header[path] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [at, at + span.size]}
        at += span.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    file.flush()
    for _, span in items:
        with open(span.shard, "rb") as shard:
            start, left = span.start, span.size
            while left:
                sent = os.sendfile(file.fileno(), shard.fileno(), start, left)
                if not sent:
                    raise CheckpointBroken(f"{span.shard} is shorter than its header says")
                start, left = start + sent, left - sent
    os.fsync(file.fileno())
