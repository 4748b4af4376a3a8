"""Writes a snapshot to disk as a checkpoint: sendfile from the images, hashes over their mapping, the manifest last.

The keeper calls this, beside the training and without PyTorch. A kill at any moment leaves a folder with a temporary name, which
nobody reads; a checkpoint that exists is never overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from kgorch import untrusted_io
from kgorch.checkpoint import sharding
from kgorch.checkpoint.folder import CHUNK_BYTES, write_manifest
from kgorch.checkpoint.manifest import (
    FILE_PATTERN,
    LEFTOVER_PATTERN,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    checkpoint_folder_name,
    parse_manifest,
)
from kgorch.system import files

WRITERS = 4
"""Ranks whose shares are written side by side."""

SPARE_BYTES = 1 << 20
"""Free bytes required besides the files: for folders and the manifest."""

DESCRIBED, TENSORS = "described", "tensors"
"""Parts of rank 0's image that are no files of the checkpoint: the manifest without its files, and the names of all tensors."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's image.

    Attributes:
        descriptor: of the memfd or file.
        files: what it holds: name → (offset, bytes).
    """

    descriptor: int
    files: Mapping[str, tuple[int, int]]

    def read(self, name: str) -> bytes:
        """The content of one file."""
        start, size = self.files[name]
        return os.pread(self.descriptor, size, start)


def persist(shares: list[Share], root: Path, attempt: str, is_complete: Callable[[], bool]) -> tuple[Path, int]:
    """Write the ranks' images as one checkpoint below `root`. Returns its folder and its size in bytes.

    Args:
        attempt: its name, for that of the temporary folder.
        is_complete: called when all is written: whether no image was filled again meanwhile.
    Raises: OSError; the temporary folder is removed then.
    """
    manifest = parse_manifest(shares[0].read(DESCRIBED))
    place = root / checkpoint_folder_name(manifest.step, final=manifest.final)
    temporary = place.with_name(f"{place.name}.tmp-{attempt}")
    root.mkdir(parents=True, exist_ok=True)
    try:
        check_tensors(json.loads(shares[0].read(TENSORS)), tensors_of(shares))
        check_room(shares, root)
        if manifest.sharded:
            documents = {
                name: json.loads(share.read(name)) for share in shares for name in share.files if is_rank_document(name)
            }
            check_pieces(json.loads(shares[0].read(sharding.SHARDING_NAME)), documents)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        entries = write_shares(shares, temporary, is_complete)
        publish(temporary, place, replace(manifest, files=entries))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return place, sum(entry.bytes for entry in entries.values())


def write_shares(shares: list[Share], folder: Path, is_complete: Callable[[], bool]) -> dict[str, FileEntry]:
    """Write the files of the images into `folder`, flushed. Args: is_complete: as in `persist`. Raises: OSError."""
    with ThreadPoolExecutor(min(len(shares), WRITERS)) as pool:
        parts = list(pool.map(lambda share: _write(share, folder), shares))
    # a rank may fill an image while it is read: what was written may be of two snapshots
    if not is_complete():
        raise OSError(errno.ESTALE, "an image was filled anew while it was written")
    return {name: entry for part in parts for name, entry in part.items()}


def publish(temporary: Path, place: Path, manifest: Manifest) -> None:
    """Write the manifest, and give the folder its name. Raises: OSError."""
    write_manifest(temporary, manifest)
    files.sync_folder(temporary)
    # an earlier attempt may have written the same step and died before it reported that: the same steps give the same state
    if place.exists():
        shutil.rmtree(temporary)
    else:
        temporary.rename(place)
    files.sync_folder(place.parent)


def tensors_of(shares: list[Share]) -> set[str]:
    """Names of the tensors that the images hold, by the documents of their ranks."""
    return {
        tensor
        for share in shares
        for name in share.files
        if is_rank_document(name)
        for tensor in json.loads(share.read(name))["tensors"]
    }


def check_tensors(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raises: OSError when a tensor is in no rank's share."""
    if missing := set(expected) - set(found):
        # ranks divide the tensors among them by their names: with different names some are nobody's
        raise OSError(errno.EINVAL, f"no rank has written {min(missing)}: the ranks track different tensors")


def check_room(shares: list[Share], root: Path) -> None:
    """Raises: OSError when the disk has no room."""
    need = sum(size for share in shares for _, size in share.files.values()) + SPARE_BYTES
    room = os.statvfs(root)
    if (free := room.f_bavail * room.f_frsize) < need:
        raise OSError(errno.ENOSPC, f"no room for {need} bytes (free: {free})", str(root))


def clear_leftovers(root: Path) -> None:
    """Remove what killed saves and deletions left. For the keeper alone: nobody else writes there."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root):
            if LEFTOVER_PATTERN.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)


def is_rank_document(name: str) -> bool:
    """Whether a file is one of those that list the tensors of a rank's share."""
    return name.endswith(".json") and name.startswith("rank")


def check_pieces(description: Any, documents: Mapping[str, Any]) -> None:
    """Check that a checkpoint of sharded tensors can be restored.

    Args:
        description: content of SHARDING_NAME. documents: of the ranks, by the names of their files.
    Raises: OSError when the ranks' pieces of a tensor do not cover it.
    """
    try:
        shards = {name.replace(".json", ".safetensors"): document for name, document in documents.items()}
        sharding.collect(description, shards)
    except (KeyError, ValueError) as error:
        raise OSError(errno.EINVAL, f"the ranks' pieces do not fit together: {error}") from None


def _write(share: Share, folder: Path) -> dict[str, FileEntry]:
    entries = {}
    with mmap.mmap(share.descriptor, 0, prot=mmap.PROT_READ) as image, memoryview(image) as content:
        for name, (start, size) in share.files.items():
            if name in (DESCRIBED, TENSORS):
                continue
            if not FILE_PATTERN.fullmatch(name) or name == MANIFEST_NAME:
                raise OSError(errno.EINVAL, f"not a plain file name: {name!r}")
            with content[start : start + size] as part:
                if name.endswith(".json"):
                    _check_json(name, bytes(part))
                digest = xxhash.xxh3_128(part).hexdigest()
            # a file that is there was left by a part that was given up
            (folder / name).unlink(missing_ok=True)
            with open(folder / name, "xb", buffering=0) as file:
                _send(share.descriptor, file.fileno(), start, size)
                os.fsync(file.fileno())
            entries[name] = FileEntry(size, digest)
    return entries


def _check_json(name: str, content: bytes) -> None:
    """Raises: OSError for JSON that could not be read back: a checkpoint with it could not be restored."""
    try:
        untrusted_io.check_json(content)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"{name} could not be read again: {error}") from None


def _send(source: int, target: int, start: int, size: int) -> None:
    end = start + size
    while start < end:
        sent = os.sendfile(target, source, start, min(end - start, CHUNK_BYTES))
        if not sent:
            raise OSError(errno.EIO, "an image is shorter than its rank said")
        start += sent
