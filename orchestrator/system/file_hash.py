"""Hashes of files, and copies that are hashed on the way (XXH3-128, as checkpoints' manifests have it)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import xxhash

BUFFER_BYTES = 256 << 10
"""Stays in a core's cache between the kernel's copy and the hash."""


def chunks_of(file: BinaryIO, buffer_bytes: int = BUFFER_BYTES) -> Iterator[memoryview]:
    """The bytes of a file up to its end; each chunk overwrites the one before. Raises: OSError."""
    buffer = memoryview(bytearray(buffer_bytes))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


def hash_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """Hexadecimal XXH3-128 of the chunks."""
    digest = xxhash.xxh3_128()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def copy_and_hash(
    chunks: Iterable[bytes | memoryview],
    target: BinaryIO,
    *,
    max_bytes: int | None = None,
    on_chunk: Callable[[int], None] = lambda _: None,
) -> tuple[str, int]:
    """Write the chunks to `target`; the hash and the number of bytes of what was read.

    Args:
        max_bytes: a source with more is not read to its end; the number of bytes is then larger than this.
        on_chunk: called with the bytes of each chunk that was written; its exceptions end the copy.
    Raises: OSError.
    """
    digest, count = xxhash.xxh3_128(), 0
    for chunk in chunks:
        count += len(chunk)
        if max_bytes is not None and count > max_bytes:
            break
        digest.update(chunk)
        target.write(chunk)
        on_chunk(len(chunk))
    return digest.hexdigest(), count
