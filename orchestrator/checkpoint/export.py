"""Export of a checkpoint folder into one file.

A safetensors file is put together from the bytes of the shards, without tensors and without PyTorch. A file of torch.save is
written by a process of its own (worker/checkpoint/torch_export.py), because the command line never loads PyTorch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from kgorch import untrusted_io
from kgorch.checkpoint import assembly, foreign_contents, safetensors_header
from kgorch.checkpoint.folder import read_checkpoint, read_json_file
from kgorch.checkpoint.manifest import Manifest, shard_names
from kgorch.checkpoint.safetensors_header import Span
from kgorch.checkpoint.sharding import Piece, ShardedTensor, read_sharding
from kgorch.errors import CheckpointBroken, KgorchError
from kgorch.system import files


class ExportTensor(NamedTuple):
    """A tensor of the checkpoint.

    Attributes:
        dtype: a key of safetensors_header.ELEMENT_BYTES.
        shape: of the whole tensor.
        spans: where its bytes lie, by the name of the shard: one, or one for each of its pieces.
        sharded: its type and shape where it lies in pieces, else None.
        pieces: which they are.
    """

    dtype: str
    shape: tuple[int, ...]
    spans: Mapping[str, Span]
    sharded: ShardedTensor | None = None
    pieces: Sequence[Piece] = ()

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * safetensors_header.ELEMENT_BYTES[self.dtype]


def export_safetensors(folder: Path, out: Path, name: str | None) -> int:
    """Write what was tracked as `name` under the names of its state_dict, or everything under its paths. Of what each rank has its
    own of, rank 0's is written.

    Wider types first, then by name: equal states give equal bytes, however many ranks wrote them. Sharded tensors are put
    together on the way, in bands of rows (assembly.py).

    Returns the number of tensors.
    Raises: KgorchError when nothing was tracked under that name; CheckpointBroken.
    """
    manifest = read_checkpoint(folder)
    tensors = _tensors(folder, manifest)
    if name is not None:
        tree = read_json_file(folder, manifest, "state.json")
        if name not in tree and "rank0.json" in manifest.files:
            own = read_json_file(folder, manifest, "rank0.json").get("own")
            tree |= own if isinstance(own, dict) else {}
        if name not in tree:
            raise KgorchError(
                f"{folder} holds nothing under {name!r}", next_step=f"give --only one of: {', '.join(sorted(tree))}"
            )
        tensors = _selected(folder, tree[name], tensors)
    order = sorted(tensors, key=lambda path: (-safetensors_header.ELEMENT_BYTES[tensors[path].dtype], path))
    try:
        with files.replacement(out, durable=True) as file:
            _write(file, folder, [(path, tensors[path]) for path in order])
    except OSError as error:
        raise KgorchError(
            f"{out} cannot be written", str(error), next_step="name another file or folder", error_code="KG503"
        ) from None
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
        raise KgorchError(
            f"{out} cannot be written",
            process.stderr.strip() or f"exit status {process.returncode}",
            error_code="KG503",
        )
    return int(process.stdout)


def name_of_export(folder: Path) -> str:
    """What the file or folder of an exported checkpoint may be called: of a foreign program as it calls it."""
    try:
        return Path(foreign_contents.read_contents(folder, None)[1].path).name
    except (KgorchError, OSError):
        return "model.safetensors"


def export_foreign(folder: Path, out: Path) -> int:
    """Write a foreign program's own checkpoint, a file or a folder, to `out`, which must not exist.

    Returns its bytes.
    Raises: KgorchError; CheckpointBroken.
    """
    manifest, contents = foreign_contents.read_contents(folder, None)
    if os.path.lexists(out):
        raise KgorchError(f"{out} exists", next_step="name a file or folder that does not exist", error_code="KG503")
    temporary = out.with_name(f"{out.name}.part")
    try:
        _remove(temporary)  # of one that was killed
        foreign_contents.unpack(folder, contents, temporary)
        temporary.rename(out)
    except OSError as error:
        _remove(temporary)
        raise KgorchError(
            f"{out} cannot be written", str(error), next_step="name another file or folder", error_code="KG503"
        ) from None
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


def _tensors(folder: Path, manifest: Manifest) -> dict[str, ExportTensor]:
    """Every tensor of the checkpoint, by its path; rank 0's of one that each rank has its own of."""
    spans = {name: safetensors_header.read(folder, name) for name in shard_names(manifest)}
    sharding = read_sharding(folder, manifest, spans)
    tensors = {
        path: ExportTensor(
            saved.dtype, saved.shape, {piece.file: spans[piece.file][path] for piece in sharding.pieces[path]}, saved,
            sharding.pieces[path],
        )
        for path, saved in sharding.tensors.items()
    }  # fmt: skip
    for name, found in spans.items():
        for path, span in found.items():
            tensors.setdefault(path, ExportTensor(span.dtype, span.shape, {name: span}))
    return tensors


def _selected(folder: Path, tree: Any, tensors: dict[str, ExportTensor]) -> dict[str, ExportTensor]:
    """The tensors that a part of the state tree names, under the names that it gives them."""
    selected: dict[str, ExportTensor] = {}
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


def _write(file: Any, folder: Path, items: list[tuple[str, ExportTensor]]) -> None:
    """Header and tensors. Bytes of whole tensors never come into this process. Raises: OSError, CheckpointBroken."""
    header, at = {}, 0
    for path, tensor in items:
        header[path] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.size]}
        at += tensor.size
    if at > (free := shutil.disk_usage(Path(file.name).parent).free):
        raise OSError(errno.ENOSPC, f"no room for {at} bytes (free: {free})")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    for _, tensor in items:
        with contextlib.ExitStack() as stack:
            files_of = {name: stack.enter_context(untrusted_io.open_file(folder, name)) for name in tensor.spans}
            if tensor.sharded:
                for band in assembly.bands(tensor.sharded, tensor.pieces, tensor.spans, files_of):
                    file.write(band)
            else:
                [(name, span)] = tensor.spans.items()
                file.flush()
                _send(file, files_of[name], folder / name, span)
    file.flush()


def _send(file: Any, source: FileIO, path: Path, span: Span) -> None:
    """By sendfile. Raises: OSError, CheckpointBroken."""
    start, remaining = span.start, span.size
    while remaining:
        sent = os.sendfile(file.fileno(), source.fileno(), start, remaining)
        if not sent:
            raise CheckpointBroken(f"{path} is shorter than its header says")
        start, remaining = start + sent, remaining - sent
