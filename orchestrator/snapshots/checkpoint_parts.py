"""A checkpoint whose ranks are on several nodes: each node's keeper writes a part, and the supervisor makes one of them.

All parts lie in one temporary folder on the file system that the nodes share: the files of the node's ranks, flushed, and then
partN.json, which lists them. The supervisor completes the checkpoint once it has been told of all parts: it compares the files
with the lists, writes the manifest, and gives the folder its name. A kill at any moment leaves a folder with a temporary name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kgorch import untrusted_io
from kgorch.checkpoint import sharding
from kgorch.checkpoint.manifest import FILE_PATTERN, MANIFEST_NAME, FileEntry, checkpoint_folder_name, parse_manifest
from kgorch.snapshots import checkpoint_writer
from kgorch.snapshots.checkpoint_writer import DESCRIBED, TENSORS, Share
from kgorch.system import files


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """Which checkpoint is written. `root`: folder of the stage's checkpoints; `attempt`: its name."""

    root: Path
    attempt: str
    step: int
    final: bool

    @property
    def place(self) -> Path:
        return self.root / checkpoint_folder_name(self.step, final=self.final)

    @property
    def temporary(self) -> Path:
        return self.place.with_name(f"{self.place.name}.tmp-{self.attempt}")


def write_part(shares: list[Share], target: CheckpointTarget, node: int, is_complete: Callable[[], bool]) -> None:
    """Write the images of one node's ranks. `is_complete`: as in checkpoint_writer.persist.

    Raises: OSError; the node's files are removed then.
    """
    try:
        _write_part(shares, target, node, is_complete)
    except BaseException:
        remove_part(shares, target, node)
        raise


def remove_part(shares: list[Share], target: CheckpointTarget, node: int) -> None:
    """Remove what a node has written of a checkpoint that will not be completed; the folder too once it is empty."""
    folder = target.temporary
    names = [name for share in shares for name in share.files if FILE_PATTERN.fullmatch(name)]
    with contextlib.suppress(OSError):
        for name in [_part_name(node), *names]:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _write_part(shares: list[Share], target: CheckpointTarget, node: int, is_complete: Callable[[], bool]) -> None:
    folder = target.temporary
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint_writer.check_room(shares, target.root)
    entries = checkpoint_writer.write_shares(shares, folder, is_complete)
    part: dict[str, Any] = {
        "files": {name: [entry.bytes, entry.xxh3_128] for name, entry in entries.items()},
        "tensors": sorted(checkpoint_writer.tensors_of(shares)),
    }
    if first := next((share for share in shares if DESCRIBED in share.files), None):  # rank 0's
        part |= {"manifest": json.loads(first.read(DESCRIBED)), "expected": json.loads(first.read(TENSORS))}
    files.write(folder / _part_name(node), json.dumps(part).encode(), durable=True)
    files.sync_folder(folder)


def complete(target: CheckpointTarget, nodes: Iterable[int]) -> tuple[Path, int]:
    """Make a checkpoint of the parts. Returns its folder and its size in bytes.

    Raises: OSError; the temporary folder is removed then.
    """
    folder = target.temporary
    try:
        parts = [_read_part(folder, node) for node in nodes]
        described = [part["manifest"] for part in parts if "manifest" in part]
        expected = [part["expected"] for part in parts if "expected" in part]
        if len(described) != 1 or len(expected) != 1:
            raise OSError(errno.EINVAL, f"{len(described)} parts of the checkpoint are rank 0's")
        checkpoint_writer.check_tensors(expected[0], (name for part in parts for name in part["tensors"]))
        manifest = parse_manifest(json.dumps(described[0]).encode())
        if (manifest.step, manifest.final) != (target.step, target.final):
            raise OSError(errno.EINVAL, f"rank 0's part is of step {manifest.step}, the others' of step {target.step}")
        entries = _entries_of(folder, parts)
        if manifest.sharded:
            documents = {name: _read(folder, name) for name in entries if checkpoint_writer.is_rank_document(name)}
            checkpoint_writer.check_pieces(_read(folder, sharding.SHARDING_NAME), documents)
        for node in nodes:
            (folder / _part_name(node)).unlink()
        checkpoint_writer.publish(folder, target.place, replace(manifest, files=entries))
    except (ValueError, KeyError, TypeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errno.EINVAL, f"a part of the checkpoint is none: {type(error).__name__}: {error}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target.place, sum(entry.bytes for entry in entries.values())


def _part_name(node: int) -> str:
    return f"part{node}.json"


def _read(folder: Path, name: str) -> Any:
    return untrusted_io.parse_json(untrusted_io.read_all(folder, name))


def _read_part(folder: Path, node: int) -> dict[str, Any]:
    part = _read(folder, _part_name(node))
    if not isinstance(part, dict):
        raise ValueError("no table")
    return part


def _entries_of(folder: Path, parts: list[dict[str, Any]]) -> dict[str, FileEntry]:
    """The files of all parts, whose sizes are as listed: what a node wrote is there to be read on this one."""
    entries: dict[str, FileEntry] = {}
    for part in parts:
        for name, (size, digest) in part["files"].items():
            if not FILE_PATTERN.fullmatch(name) or name == MANIFEST_NAME or name in entries:
                raise OSError(errno.EINVAL, f"not a file of one node: {name!r:.100}")
            found = (folder / name).lstat().st_size
            if found != size:
                raise OSError(errno.EIO, f"{name}: {size} bytes were written, {found} are seen here", str(folder))
            entries[name] = FileEntry(size, digest)
    return entries
