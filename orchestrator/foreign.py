"""What may come from elsewhere, opened and taken apart without trusting it: files of a checkpoint, and the JSON in them.

Standard library alone. Sizes are looked at before memory is taken; nothing here follows a link or runs code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

from orchestrator.errors import CheckpointBroken, CheckpointUnreadable

MAX_JSON_BYTES = 64 << 20
MAX_VALUES = 4 << 20
"""Values in one document: each takes some 70 bytes of memory, so a document takes at most some hundred megabytes."""
MAX_DEPTH = 100

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PROOF = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG)


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
