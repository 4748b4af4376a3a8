"""Safe reading of untrusted files and JSON: bounded size and depth, no links followed, no code run.

For checkpoints, databases and plans that may come from another machine or person. Standard library alone; sizes are checked
before memory is allocated.
"""

from __future__ import annotations

import contextlib
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

from kgorch.errors import CheckpointBroken, CheckpointUnreadable

MAX_JSON_BYTES = 64 << 20
MAX_VALUES = 4 << 20
"""Of one document. A value takes about 70 bytes of memory, so a document takes a few hundred megabytes at most."""

MAX_DEPTH = 100
"""Of nested tables and lists; Python's own parser fails at about 1000."""

MAX_TOML_LENGTH = 256 << 10
"""Characters."""

MAX_TOML_DOTS = 1_000_000
"""Sum over the lines of the square of their dots; each takes about 100 bytes when it is parsed."""

COPY_BYTES = 1 << 20
"""Of one read while a file is copied: the budget is asked before each."""

JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(")(?:[^"\\]++|\\.)*+\\?\Z', re.DOTALL)
"""A string, or one that is not closed and takes the rest of the document (its quote is the group). Without the second part each
quote in the rest would be tried anew, which takes time with the square of its length."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)
"""These say something about the file; any other error says something about the disk or network (see checkpoint_error)."""


class BudgetExceeded(Exception):
    """Reading would take more time or more bytes than the Budget allows."""


class Budget:
    """Bounds time and bytes that are spent on untrusted files, over all of them together.

    A bound for each file would not be enough: a folder may hold any number of files.

    Args:
        seconds: from now.
        size: bytes.
    """

    def __init__(self, seconds: float, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until_s, self._seconds = clock, clock() + seconds, seconds
        self._left, self._size = size, size

    @property
    def is_spent(self) -> bool:
        return self._left < 0 or self._clock() > self._until_s

    def spend(self, count: int) -> None:
        """To be called before `count` bytes are read. Raises: BudgetExceeded."""
        self._left -= count
        if self._left < 0:
            raise BudgetExceeded(f"more than {self._size >> 20} MiB were to be read")
        if self._clock() > self._until_s:
            raise BudgetExceeded(f"it took longer than {self._seconds:g} s")


class SourceUnreadable(OSError):
    """The file to be copied cannot be read; an error of the copy is a plain OSError."""


def copy_file(
    source: Path, target: Path, read: Callable[[int], None], most: int | None = None, *, durable: bool = False
) -> None:
    """Copy a regular file with its holes into a new file `target`: of a sparse file only the data is read.

    Args:
        read: called with the number of bytes before each read; an exception of it ends the copying.
        most: largest size, bytes, holes included; None for no bound.
        durable: flush the copy to disk.
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
    """Offset and bytes of each piece of data; last the file's size and no bytes, which makes a hole at the end."""
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


def allocated_bytes(path: Path) -> int:
    """Bytes of a regular file without its holes, over its first 10,000 extents; its size where the file system knows no holes.

    Raises: OSError.
    """
    with open_file(path.parent, path.name) as file:
        pieces = _extents(file.fileno(), os.fstat(file.fileno()).st_size)
        return sum(end - start for start, end in islice(pieces, 10_000))


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each part of a file that is not a hole; all of it where the file system knows no holes."""
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


def walk(top: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder, a folder before what is in it. No link is followed, what cannot be read is left out, and the depth
    does not matter: os.walk and shutil.rmtree fail at about 1,000.
    """
    folders = [os.fspath(top)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def open_file(folder: Path, name: str) -> FileIO:
    """Open a regular file of this folder for reading. No link, pipe or device: opening those may block or have effects.

    Raises: OSError.
    """
    path = folder / name
    _check_regular(path, path.lstat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # it may have been replaced since lstat
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_at(file: FileIO, start: int, size: int) -> bytes:
    """The bytes from `start`, fewer than `size` only where the file ends.

    `size` is trusted and allocated: compare it with the file's size first.
    """
    content = bytearray()
    while len(content) < size and (part := os.pread(file.fileno(), size - len(content), start + len(content))):
        content += part
    return bytes(content)


def read_all(folder: Path, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file of this folder. Raises: OSError; ValueError when it is larger than `limit` bytes."""
    with open_file(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{size} bytes, larger than any such file ({limit})")
        return read_at(file, 0, size)


def parse_json(content: bytes) -> Any:
    """The value of a JSON document in UTF-8 that passes `check_json` and names no key of a table twice.

    Raises: ValueError.
    """
    check_json(content)
    return json.loads(content.decode(), object_pairs_hook=_unique_keys)


def check_json(content: bytes) -> None:
    """Refuse JSON that is too large or too deep, before it is parsed. Also called by writers: what they write can be read.

    Brackets and commas outside of strings are counted, which takes no memory in proportion to the number of values.

    Raises: ValueError.
    """
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{len(content)} bytes of JSON, more than {MAX_JSON_BYTES}")
    bare = JSON_STRING.sub(b"", content)
    if (values := bare.count(b",") + bare.count(b"[") + bare.count(b"{")) > MAX_VALUES:
        raise ValueError(f"{values} values in one document, more than {MAX_VALUES}")
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in bare.translate(None, _NO_BRACKETS))
    if any(depth > MAX_DEPTH for depth in depths):
        raise ValueError(f"nested deeper than {MAX_DEPTH}")


def check_toml(text: str) -> None:
    """Refuse TOML that is too large, before it is parsed: tomllib takes memory with the square of a dotted key's parts.

    Raises: ValueError.
    """
    if len(text) > MAX_TOML_LENGTH:
        raise ValueError(f"{len(text)} letters of TOML, more than {MAX_TOML_LENGTH}")
    if sum(line.count(".") ** 2 for line in text.splitlines()) > MAX_TOML_DOTS:
        raise ValueError("TOML with keys of very many parts")


def checkpoint_error(error: OSError, what: str, fact: str) -> CheckpointBroken | CheckpointUnreadable:
    """The error for a checkpoint's file that could not be opened or read.

    A file that does not exist, or is a link or a folder, proves that the checkpoint is broken. A disk or network that fails
    proves nothing: the checkpoint may be whole.
    """
    return (CheckpointBroken if error.errno in NO_FILE else CheckpointUnreadable)(what, fact)


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "a link", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key stands twice: {max(names, key=names.count)!r:.80}")
    return table
