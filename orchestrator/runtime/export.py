"""A checkpoint folder as one file. As safetensors it is put together from the shards' bytes: no tensor is made, PyTorch
not needed; what torch.save writes, a process of its own writes, which loads PyTorch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import foreign, manifest, shard
from orchestrator.errors import CheckpointBroken, KgorchError
from orchestrator.shard import Span


class Part(NamedTuple):
    """A tensor's bytes, and the shard that they lie in."""

    shard: str
    span: Span


def export(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name` under the names of its state_dict, or everything under its paths.

    Wider types first, then by name: equal states give equal bytes, however many ranks wrote them. Returns the tensors.

    Raises: KgorchError when nothing was tracked under that name; CheckpointBroken.
    """
    described = manifest.read(folder)
    parts = _parts(folder, described)
    if name is not None:
        tree = manifest.document(folder, described, "state.json")
        if name not in tree:
            raise KgorchError(
                f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
            )
        parts = _chosen(folder, tree[name], parts)
    order = sorted(parts, key=lambda path: (-shard.WIDTHS[parts[path].span.dtype], path))
    aside = out.with_name(out.name + ".part")
    try:
        with open(aside, "wb") as file:
            _write(file, folder, [(path, parts[path]) for path in order])
        aside.rename(out)
    except OSError as error:
        raise KgorchError(f"{out} cannot be written", str(error)) from None
    finally:
        aside.unlink(missing_ok=True)
    return len(order)


def export_for_torch(folder: Path, out: Path, name: str | None) -> int:
    """The same as a file of torch.save that loads with `weights_only`; everything is nested under the tracked names.

    Raises: KgorchError.
    """
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "orchestrator.worker.checkpoint.torch_export",
                str(folder),
                str(out),
                *([name] if name else []),
            ],
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


def _parts(folder: Path, described: manifest.Manifest) -> dict[str, Part]:
    """Every tensor of the checkpoint; of one that each rank keeps for itself, rank 0's."""
    found: dict[str, Part] = {}
    for name in manifest.shards(described):
        for path, span in shard.read(folder, name).items():
            found.setdefault(path, Part(name, span))
    return found


def _chosen(folder: Path, tree: Any, parts: dict[str, Part]) -> dict[str, Part]:
    """What a part of the state tree names, under the names that it gives them."""
    found: dict[str, Part] = {}
    for path, target in _tensors(tree):
        if (wrong := shard.misnamed(path)) or path in found or len(found) >= shard.MAX_TENSORS:
            raise CheckpointBroken(
                f"{folder} cannot be exported",
                f"the tensor {path!r:.200} {wrong or 'is one of too many, or stands twice'}",
            )
        if not isinstance(target, str) or target not in parts:
            raise CheckpointBroken(f"{folder} cannot be exported", f"its shards lack the tensor {target!r:.200}")
        found[path] = parts[target]
    return found


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name in the state_dict, path in the shards) of each tensor below a part of the state tree."""
    if isinstance(value, dict):
        if set(value) == {"$tensor"}:
            yield path, value["$tensor"]
        else:
            for key, item in value.items():
                yield from _tensors(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}" if path else str(index))


def _write(file: Any, folder: Path, items: list[tuple[str, Part]]) -> None:
    header, at = {}, 0
    for path, (_, span) in items:
        header[path] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [at, at + span.size]}
        at += span.size
    if at > (free := shutil.disk_usage(Path(file.name).parent).free):
        raise OSError(errno.ENOSPC, f"no room for {at} bytes (free: {free})")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    file.flush()
    for _, (name, span) in items:
        with foreign.open_file(folder, name) as source:
            start, left = span.start, span.size
            while left:
                sent = os.sendfile(file.fileno(), source.fileno(), start, left)
                if not sent:
                    raise CheckpointBroken(f"{folder / name} is shorter than its header says")
                start, left = start + sent, left - sent
    os.fsync(file.fileno())
