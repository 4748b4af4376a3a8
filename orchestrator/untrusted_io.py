"""What may come from elsewhere, opened and taken apart without trusting it: files of a checkpoint, and the JSON in them.

Standard library alone. Sizes are looked at before memory is taken; nothing here follows a link or runs code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from io import FileIO
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from orchestrator.errors import CheckpointBroken, CheckpointUnreadable

MAX_JSON_BYTES = 64 << 20
MAX_VALUES = 4 << 20
"""Values in one document: each takes some 70 bytes of memory, so a document takes at most some hundred megabytes."""
MAX_DEPTH = 100
MAX_TOML, MAX_TOML_DOTS = 256 << 10, 1_000_000
"""Letters; and the sum of the squares of the dots in each line, some 100 bytes each when they are parsed."""

COPY_BYTES = 1 << 20

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PROOF = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)


class BudgetSpent(Exception):
    """What was to be read takes more time or more bytes than may be spent on all of it."""


class Budget:
    """Bounds the time and the bytes that are spent on what comes from elsewhere, over all files together.

    One bound for each file would not do: a folder may hold as many of them as it likes.
    """

    def __init__(self, seconds: float, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until_s, self._seconds = clock, clock() + seconds, seconds
        self._left, self._size = size, size

    @property
    def is_spent(self) -> bool:
        return self._left < 0 or self._clock() > self._until_s

    def spend(self, count: int) -> None:
        """Before `count` bytes are read. Raises: BudgetSpent."""
        self._left -= count
        if self._left < 0:
            raise BudgetSpent(f"more than {self._size >> 20} MiB were to be read")
        if self._clock() > self._until_s:
            raise BudgetSpent(f"it took longer than {self._seconds:g} s")


class SourceUnreadable(OSError):
    """It is the file to be copied that cannot be read, not its copy that cannot be written."""


def copy_file(
    source: Path, target: Path, read: Callable[[int], None], most: int | None = None, *, durable: bool = False
) -> None:
    """A new file `target` with the bytes and the holes of a regular file: of a sparse one only what it really holds is copied.

    Args:
        read: is told how many bytes come next; what it raises ends the copying.
        most: the largest size, holes included.
    Raises: SourceUnreadable; OSError of the copy.
    """
    with open(target, "xb") as copy:
        for at, chunk in _pieces(source, read, most):
            copy.seek(at)
            copy.write(chunk)
        copy.truncate(copy.tell())  # a hole at the end
        copy.flush()
        if durable:
            os.fsync(copy.fileno())


def _pieces(source: Path, read: Callable[[int], None], most: int | None) -> Iterator[tuple[int, bytes]]:
    """Where each piece of data stands, and the piece; last where the file ends, and nothing."""
    try:
        with open_file(source.parent, source.name) as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise OSError(errno.EFBIG, f"{size} bytes, more than {most}", str(source))
            for start, end in _extents(file.fileno(), size):
                while start < end and (chunk := os.pread(file.fileno(), min(COPY_BYTES, end - start), start)):
                    read(len(chunk))
                    yield start, chunk
                    start += len(chunk)
                read(0)
            yield size, b""
    except OSError as error:
        raise SourceUnreadable(error.errno, error.strerror, str(source)) from None


def data_bytes(path: Path) -> int:
    """How much of a regular file is no hole, looked up in its first 10,000 pieces; its size where the file system cannot tell.

    Raises: OSError.
    """
    with open_file(path.parent, path.name) as file:
        pieces = _extents(file.fileno(), os.fstat(file.fileno()).st_size)
        return sum(end - start for start, end in islice(pieces, 10_000))


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that are no holes; all of it where the file system does not know of holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            start, at = at, size
        yield start, at


def open_file(folder: Path, name: str) -> FileIO:
    """A regular file of this very folder, to be read: no link, and no pipe or device, whose opening may wait or do something.

    Raises: OSError.
    """
    path = folder / name
    _regular(path, path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular(path, os.fstat(descriptor))  # another may have taken its place since
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_at(file: FileIO, start: int, size: int) -> bytes:
    """Fewer bytes than asked for only where the file ends. `size` is trusted: compare it with the file's first."""
    content = bytearray()
    while len(content) < size and (part := os.pread(file.fileno(), size - len(content), start + len(content))):
        content += part
    return bytes(content)


def read_all(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """Raises: OSError; ValueError when it is larger than `limit`."""
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size} bytes, larger than any such file ({limit})")
        return read_at(file, 0, size)


def parse(content: bytes) -> Any:
    """JSON in UTF-8 that is not too large, not too deep, and names no key of a table twice.

    Raises: ValueError.
    """
    check(content)
    return json.loads(content.decode(), object_pairs_hook=_once)


def check(content: bytes) -> None:
    """What `parse` demands besides being JSON; whoever writes asks too, so that it can be read again.

    Raises: ValueError.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{len(content)} bytes of JSON, more than {MAX_JSON_BYTES}")
    bare = _STRING.sub(b"", content)
    if (values := bare.count(b",") + bare.count(b"[") + bare.count(b"{")) > MAX_VALUES:
        raise ValueError(f"{values} values in one document, more than {MAX_VALUES}")
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in bare.translate(None, _NO_BRACKETS))
    if any(depth > MAX_DEPTH for depth in depths):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def check_toml(text: str) -> None:
    """Before TOML from elsewhere is parsed: tomllib takes memory with the square of a dotted key's parts.

    Raises: ValueError.
    """
    if len(text) > MAX_TOML:
        raise ValueError(f"{len(text)} letters of TOML, more than {MAX_TOML}")
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MAX_TOML_DOTS:
        raise ValueError("TOML with keys of very many parts")


def verdict(error: OSError, what: str, fact: str) -> CheckpointBroken | CheckpointUnreadable:
    """A file that is not there, or is a link or a folder, is proof; a disk or network that fails to read is none."""
    return (CheckpointBroken if error.errno in _PROOF else CheckpointUnreadable)(what, fact)


def _regular(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a link", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key stands twice: {max(names, key=names.count)!r:.80}")
    return table
