"""Bounds the logs of an attempt. A training that prints without end must not fill the disk that its checkpoints need.

Ranks, what they start, and torchrun print into files that they hold open, in append mode. No file is renamed under them: its
older part is moved into `NAME.1` and cut off at its beginning, and every writer goes on at its end. A rank could not do this
itself: processes that it has started would go on writing into the file that was renamed, and code that prints from C, in a loop,
lets no thread of Python's run. How a log began is kept, too, in `NAME.first`.

Standard library only: this runs in the shim, which lives as long as the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

LOG_BYTES = 64 << 20
"""Of a log, and of its older part. With more than one is held in the time between two looks, for as long."""

FIRST_BYTES = 1 << 20
LOOK_S = 0.5
BLOCK_BYTES = 1 << 20
FALLOC_FL_COLLAPSE_RANGE = 0x08

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Rotation:
    """Watches files from a thread of its own, until the process ends."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        threading.Thread(target=self._watch, name="logs", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            for path in self._paths:
                with contextlib.suppress(OSError):  # not there yet, or on a disk that takes nothing now
                    rotate(path)


def older(path: Path) -> Path:
    """Where the part of a log lies that is before it."""
    return path.with_name(f"{path.name}.1")


def first(path: Path) -> Path:
    """Where the beginning of a log lies once it has been cut."""
    return path.with_name(f"{path.name}.first")


def rotate(path: Path, limit: int = LOG_BYTES) -> bool:
    """Cut a log that has grown beyond `limit` bytes; the last `limit` of what is cut off are kept. False where it has not.

    No byte is lost on file systems that can cut off a file's beginning (ext4, XFS); elsewhere those that come in the moment
    between the last look and the cut are. Raises: OSError.
    """
    log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(log).st_size
        if size <= limit:
            return False
        end = (size - 1) // (block := os.fstatvfs(log).f_bsize or 4096) * block  # the cut must leave something
        with contextlib.suppress(OSError):  # a full disk: what is older goes all the same, and makes room
            if not first(path).exists():
                _copy(log, first(path), 0, min(FIRST_BYTES, limit))
        older(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            _copy(log, older(path), max(0, end - limit), end)
        if not _cut_off(log, end):
            with contextlib.suppress(OSError), open(older(path), "ab") as target:
                _append(log, target.fileno(), end, None)
            os.ftruncate(log, 0)
        return True
    finally:
        os.close(log)


def _cut_off(log: int, size: int) -> bool:
    """The first `size` bytes of a file, in one step; False where its file system cannot."""
    return int(_fallocate(log, FALLOC_FL_COLLAPSE_RANGE, 0, size)) == 0


def _copy(source: int, place: Path, start: int, end: int) -> None:
    """Raises: OSError, with what was copied taken away."""
    target = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _append(source, target, start, end)
    except OSError:
        place.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)


def _append(source: int, target: int, start: int, end: int | None) -> None:
    """Up to `end`, or as far as it goes."""
    while end is None or start < end:
        size = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - start)
        if not (block := os.pread(source, size, start)):
            return
        start += len(block)
        while block:
            block = block[os.write(target, block) :]
