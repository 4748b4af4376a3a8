"""Export of a checkpoint folder into one file.

A safetensors file is put together from the bytes of the shards, without tensors and without PyTorch. A file of torch.save is
written by a process of its own (worker/checkpoint/torch_export.py), because the command line never loads PyTorch.
"""

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

from kgorch import untrusted_io
from kgorch.checkpoint import foreign_contents, safetensors_header
from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.checkpoint.manifest import Manifest, shard_names
from kgorch.checkpoint.safetensors_header import Span
from kgorch.errors import CheckpointBroken, KgorchError
from kgorch.system import files


class ShardTensor(NamedTuple):
    """A tensor's bytes, and the name of the shard that holds them."""

    shard: str
    span: Span


def export_safetensors(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name` under the names of its state_dict, or everything under its paths.

    Wider types first, then by name: equal states give equal bytes, however many ranks wrote them.

    Returns the number of tensors.
    Raises: KgorchError when nothing was tracked under that name; CheckpointBroken.
    """
    manifest = read_checkpoint(folder)
    tensors = _tensors(folder, manifest)
    if name is not None:
        tree = read_json_file(folder, manifest, "state.json")
        if name not in tree:
            raise KgorchError(
                f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
            )
        tensors = _selected(folder, tree[name], tensors)
    order = sorted(tensors, key=lambda path: (-safetensors_header.ELEMENT_BYTES[tensors[path].span.dtype], path))
    try:
        with files.replacement(out, durable=True) as file:
            _write(file, folder, [(path, tensors[path]) for path in order])
    except OSError as error:
        raise KgorchError(f"{out} cannot be written", str(error)) from None
    return len(order)


def export_torch(folder: Path, out: Path, name: str | None) -> int:
    """The same as a file of torch.save that loads with `weights_only`; everything is nested under the tracked names.

    Raises: KgorchError.
    """
    try:
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "kgorch.worker.checkpoint.torch_export",
                str(folder),
                str(out),
                *([name] if name else []),
            ],
            capture_output=True,
            text=True,
        )
    finally:
        out.with_name(out.name + ".part").unlink(missing_ok=True)  # of one that was killed
    if process.returncode:
        raise KgorchError(f"{out} cannot be written", process.stderr.strip() or f"exit status {process.returncode}")
    return int(process.stdout)


def export_foreign(folder: Path, out: Path) -> int:
    """Write a foreign program's own checkpoint, a file or a folder, to `out`, which must not exist.

    Returns its bytes.
    Raises: KgorchError; CheckpointBroken.
    """
    manifest, contents = foreign_contents.read_contents(folder, None)
    if os.path.lexists(out):
        raise KgorchError(f"{out} exists", next_step="name a file or folder that does not exist")
    temporary = out.with_name(f"{out.name}.part")
    try:
        _remove(temporary)  # of one that was killed
        foreign_contents.unpack(folder, contents, temporary)
        temporary.rename(out)
    except OSError as error:
        _remove(temporary)
        raise KgorchError(f"{out} cannot be written", str(error)) from None
    return sum(manifest.files[name].bytes for name in contents.files)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def exporter_for(out: Path) -> Callable[[Path, Path, str | None], int]:
    """The function that writes a file of this name, chosen by its suffix.

    Raises: KgorchError for another suffix.
    """
    writers = {".safetensors": export_safetensors, ".pt": export_torch, ".pth": export_torch}
    if out.suffix not in writers:
        raise KgorchError(
            f"{out}: unsupported export format, expected a file name that ends in one of {', '.join(writers)}",
            next_step=f"name it {out.with_suffix('.safetensors').name}, for example",
        )
    return writers[out.suffix]


def _tensors(folder: Path, manifest: Manifest) -> dict[str, ShardTensor]:
    """Every tensor of the checkpoint, by its path; rank 0's of one that each rank has its own of."""
    tensors: dict[str, ShardTensor] = {}
    for name in shard_names(manifest):
        for path, span in safetensors_header.read(folder, name).items():
            tensors.setdefault(path, ShardTensor(name, span))
    return tensors


def _selected(folder: Path, tree: Any, tensors: dict[str, ShardTensor]) -> dict[str, ShardTensor]:
    """The tensors that a part of the state tree names, under the names that it gives them."""
    selected: dict[str, ShardTensor] = {}
    for path, target in _references(tree):
        wrong = safetensors_header.name_error(path)
        if wrong or path in selected or len(selected) >= safetensors_header.MAX_TENSORS:
            raise CheckpointBroken(
                f"{folder} cannot be exported",
                f"the tensor {path!r:.200} {wrong or 'is one of too many, or stands twice'}",
            )
        if not isinstance(target, str) or target not in tensors:
            raise CheckpointBroken(f"{folder} cannot be exported", f"its shards lack the tensor {target!r:.200}")
        selected[path] = tensors[target]
    return selected


def _references(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(name in the state_dict, path in the shards) of each tensor below a part of the state tree."""
    if isinstance(value, dict):
        if set(value) == {"$tensor"}:
            yield path, value["$tensor"]
        else:
            for key, item in value.items():
                yield from _references(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _references(item, f"{path}.{index}" if path else str(index))


def _write(file: Any, folder: Path, items: list[tuple[str, ShardTensor]]) -> None:
    """Header and tensors, by sendfile: the bytes never come into this process. Raises: OSError, CheckpointBroken."""
    header, at = {}, 0
    for path, (_, span) in items:
        header[path] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [at, at + span.size]}
        at += span.size
    if at > (free := shutil.disk_usage(Path(file.name).parent).free):
        raise OSError(errno.ENOSPC, f"no room for {at} bytes (free: {free})")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    file.flush()
    for _, (name, span) in items:
        with untrusted_io.open_file(folder, name) as source:
            start, remaining = span.start, span.size
            while remaining:
                sent = os.sendfile(file.fileno(), source.fileno(), start, remaining)
                if not sent:
                    raise CheckpointBroken(f"{folder / name} is shorter than its header says")
                start, remaining = start + sent, remaining - sent
