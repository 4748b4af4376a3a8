"""Verification of a checkpoint: every byte is read back from disk and hashed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kgorch import untrusted_io
from kgorch.checkpoint.folder import read_checkpoint
from kgorch.checkpoint.manifest import Manifest
from kgorch.checkpoint.sharding import read_sharding
from kgorch.errors import CheckpointBroken
from kgorch.system import file_hash

READERS = 4
"""Files that are hashed at a time; xxhash releases the GIL."""


def verify_checkpoint(folder: Path) -> Manifest:
    """The folder's manifest, after every byte that it lists was read back and hashed, and the pieces of sharded tensors compared.

    Raises: CheckpointBroken, with the file, what was expected and what was found; CheckpointUnreadable.
    """
    from concurrent.futures import ThreadPoolExecutor  # a rank that verifies nothing need not load it

    manifest = read_checkpoint(folder)
    pool = ThreadPoolExecutor(max_workers=READERS)
    try:
        hashes = pool.map(lambda name: hash_file(folder, name), manifest.files)
        for (name, entry), digits in zip(manifest.files.items(), hashes, strict=True):
            if digits != entry.xxh3_128:
                raise CheckpointBroken(
                    f"{folder} does not match its manifest",
                    f"{name}: expected xxh3 {entry.xxh3_128[:12]}…, found {digits[:12]}…",
                )
    finally:
        pool.shutdown(cancel_futures=True)
    read_sharding(folder, manifest)
    return manifest


def hash_file(folder: Path, name: str) -> str:
    """The xxh3_128 of a regular file of the folder, as 32 hexadecimal digits.

    Raises: CheckpointBroken; CheckpointUnreadable.
    """
    return file_hash.hash_chunks(read_chunks(folder, name))


def read_chunks(folder: Path, name: str) -> Iterator[memoryview]:
    """The bytes of a regular file of the folder, each piece in the memory of the one before.

    Raises: CheckpointBroken; CheckpointUnreadable.
    """
    buffer = memoryview(bytearray(file_hash.BUFFER_BYTES))
    try:
        with untrusted_io.open_file(folder, name) as file:
            remaining = os.fstat(
                file.fileno()
            ).st_size  # not until its end: a file that grows while it is read has none
            while remaining > 0 and (size := file.readinto(buffer)):
                yield buffer[:size]
                remaining -= size
    except OSError as error:
        raise untrusted_io.checkpoint_error(error, f"{folder} cannot be read back", f"{name}: {error}") from None
