"""A snapshot in memory becomes a checkpoint on disk: sendfile from the images, hash over their mapping, manifest last.

The keeper calls this, beside the training and without PyTorch. A kill at any moment leaves a folder under another name,
which nobody reads; nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from orchestrator import untrusted_io
from orchestrator.checkpoint.folder import CHUNK_BYTES, write_manifest
from orchestrator.checkpoint.manifest import (
    FILE_PATTERN,
    LEFTOVER_PATTERN,
    MANIFEST_NAME,
    FileEntry,
    checkpoint_folder_name,
    parse_manifest,
)
from orchestrator.system import files

WRITERS = 4
SPARE_BYTES = 1 << 20
DESCRIBED, TENSORS = "described", "tensors"
"""The parts of rank 0's image that are no files of their own: the manifest without its files, and the names of all tensors."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has put into its image. `files`: name → (offset, bytes)."""

    descriptor: int
    files: Mapping[str, tuple[int, int]]

    def read(self, name: str) -> bytes:
        start, size = self.files[name]
        return os.pread(self.descriptor, size, start)


def persist(shares: list[Share], root: Path, attempt: str, is_whole: Callable[[], bool]) -> tuple[Path, int]:
    """Write what the ranks' images hold as one checkpoint below `root`. Returns its place and its bytes.

    Args:
        is_whole: asked when all is written: whether the images were still those that were begun with.
    Raises: OSError; what was written is cleared away then.
    """
    found = parse_manifest(shares[0].read(DESCRIBED))
    place = root / checkpoint_folder_name(found.step, final=found.final)
    aside = place.with_name(f"{place.name}.tmp-{attempt}")
    root.mkdir(parents=True, exist_ok=True)
    try:
        _check(shares, root)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        with ThreadPoolExecutor(min(len(shares), WRITERS)) as pool:
            written = list(pool.map(lambda share: _write(share, aside), shares))
        if not is_whole():
            raise OSError(errno.ESTALE, "an image was filled anew while it was written")
        entries = {name: entry for part in written for name, entry in part.items()}
        write_manifest(aside, replace(found, files=entries))
        files.sync_folder(aside)
        if place.exists():  # an earlier attempt put the same step there and died before it told; ours says nothing new
            shutil.rmtree(aside)
        else:
            aside.rename(place)
        files.sync_folder(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return place, sum(entry.bytes for entry in entries.values())


def clear_leftovers(root: Path) -> None:
    """Remove what killed saves and deletions left. For the keeper alone, who alone writes there."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(root):
            if LEFTOVER_PATTERN.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)


def _check(shares: list[Share], root: Path) -> None:
    missing = set(json.loads(shares[0].read(TENSORS)))
    for share in shares:
        for name in share.files:
            if name.endswith(".json") and name.startswith("rank"):
                missing -= set(json.loads(share.read(name))["tensors"])
    if missing:  # ranks whose tensors differ have split them differently
        raise OSError(errno.EINVAL, f"no rank has written {min(missing)}: the ranks track different tensors")
    need = sum(size for share in shares for _, size in share.files.values()) + SPARE_BYTES
    room = os.statvfs(root)
    if (free := room.f_bavail * room.f_frsize) < need:
        raise OSError(errno.ENOSPC, f"no room for {need} bytes (free: {free})", str(root))


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
            with open(folder / name, "xb", buffering=0) as file:
                _send(share.descriptor, file.fileno(), start, size)
                os.fsync(file.fileno())
            entries[name] = FileEntry(size, digest)
    return entries


def _check_json(name: str, content: bytes) -> None:
    """What nobody could read again is not saved."""
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
