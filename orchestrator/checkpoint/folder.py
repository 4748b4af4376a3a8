"""The files of a checkpoint folder: read without trust, written so that a kill leaves them whole or not there, listed.

Three levels of trust return a Manifest: `read_manifest` checks its form, `read_checkpoint` also the sizes of the files, and
`verify.verify_checkpoint` every byte. Nothing here runs code from the folder, follows a link, or opens a name outside of it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from kgorch import untrusted_io
from kgorch.checkpoint.manifest import (
    FOLDER_PATTERN,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    manifest_document,
    parse_manifest,
)
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.system import files

MAX_MANIFEST_BYTES = 4 << 20
CHUNK_BYTES = 8 << 20
"""Of one read or write while a file is copied."""


# Reading


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest, its form checked; no other file is looked at.

    Raises: CheckpointBroken; CheckpointUnreadable when that is not proven.
    """
    try:
        return parse_manifest(untrusted_io.read_all(folder, MANIFEST_NAME, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise untrusted_io.checkpoint_error(error, f"{folder} has no readable manifest", str(error)) from None
    except ValueError as error:
        raise CheckpointBroken(f"{folder / MANIFEST_NAME} is not a manifest", str(error)[:300]) from None


def read_checkpoint(folder: Path) -> Manifest:
    """The folder's manifest, its form and the sizes of its files checked; their contents are not read.

    Raises: CheckpointBroken; CheckpointUnreadable when that is not proven.
    """
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise untrusted_io.checkpoint_error(error, f"{folder} lacks {name}", str(error)) from None
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.bytes:
            raise CheckpointBroken(
                f"{folder} does not match its manifest", f"{name}: expected {entry.bytes} bytes, found {status.st_size}"
            )
    return manifest


def read_json_file(folder: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint: a table, compared with the manifest before it is parsed.

    Raises: CheckpointBroken, CheckpointUnreadable.
    """
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointBroken(f"the manifest of {folder} lists no {name}")
    try:
        content = untrusted_io.read_all(folder, name)
        if len(content) != entry.bytes or xxhash.xxh3_128(content).hexdigest() != entry.xxh3_128:
            raise ValueError("it does not match the manifest")
        document = untrusted_io.parse_json(content)
        if not isinstance(document, dict):
            raise ValueError("it holds no table")
    except OSError as error:
        raise untrusted_io.checkpoint_error(error, f"{folder / name} cannot be read", str(error)) from None
    except ValueError as error:
        raise CheckpointBroken(f"{folder / name} is broken", str(error)[:300]) from None
    return document


# Writing


def write_durably(path: Path, content: bytes) -> FileEntry:
    """Write a JSON file, flushed to disk before it takes its name: after a kill or a power cut it is whole or not there.

    Raises: OSError, also for content that `untrusted_io.parse_json` would refuse.
    """
    try:
        untrusted_io.check_json(content)
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from None
    files.write(path, content, durable=True)
    return FileEntry(len(content), xxhash.xxh3_128(content).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, without its metrics where they make it too large to be read: a good checkpoint is worth more.

    Raises: OSError, also for a manifest that `read_manifest` would refuse.
    """
    content, path = _content(manifest), folder / MANIFEST_NAME
    if len(content) > MAX_MANIFEST_BYTES and manifest.metrics:
        content = _content(replace(manifest, metrics={}))
    if len(content) > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, f"a manifest of {len(content)} bytes, more than is read again", str(path))
    try:
        parse_manifest(content)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"not a manifest that could be read again: {error}", str(path)) from None
    write_durably(path, content)


def _content(manifest: Manifest) -> bytes:
    return json.dumps(manifest_document(manifest), indent=1, sort_keys=True).encode()


# Listing


def list_checkpoints(root: Path) -> list[Path]:
    """Folders named as checkpoints, newest first; a final one stands before a plain one of the same step."""
    try:
        names = [
            entry.name
            for entry in os.scandir(root)
            if FOLDER_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    except FileNotFoundError:
        return []
    return [root / name for name in sorted(names, key=lambda name: (int(name.split("-")[1]), name), reverse=True)]


def readable_checkpoints(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """Newest first, the checkpoints whose manifests can be read and whose files have the right sizes."""
    for folder in list_checkpoints(root):
        try:
            yield folder, read_checkpoint(folder)
        except (CheckpointBroken, CheckpointUnreadable):
            continue
