"""Size limit for the logs of an attempt: a training that prints without end must not fill the disk of its checkpoints.

Ranks, their child processes and torchrun print into files that they hold open in append mode. No file is renamed under them:
its older part is copied to `NAME.1` and removed from the file's beginning, and every writer goes on at its end. A rank could
not do this itself: its child processes would go on writing into the renamed file, and code that prints from C, in a loop, lets
no Python thread run. The beginning of a log is kept, too, in `NAME.first`.

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
"""Limit of a log, and of its older part. What is printed between two checks comes on top until the second one."""

FIRST_BYTES = 1 << 20
CHECK_S = 0.5
BLOCK_BYTES = 1 << 20
FALLOC_FL_COLLAPSE_RANGE = 0x08

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class LogRotator:
    """Rotates files from a thread of its own until the process ends."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        threading.Thread(target=self._watch, name="logs", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(CHECK_S)
            for path in self._paths:
                with contextlib.suppress(OSError):  # it does not exist yet, or the disk cannot be written now
                    rotate(path)


def older_part(path: Path) -> Path:
    """Path of the older part of a log."""
    return path.with_name(f"{path.name}.1")


def first_part(path: Path) -> Path:
    """Path of the beginning of a log, once it was cut."""
    return path.with_name(f"{path.name}.first")


def rotate(path: Path, limit: int = LOG_BYTES) -> bool:
    """Cut a log that is larger than `limit` bytes; the last `limit` bytes that are cut are kept. False if it is not larger.

    No byte is lost on file systems that can remove a file's beginning (ext4, XFS); elsewhere those that are written between
    the last read and the cut are lost. Raises: OSError.
    """
    log = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(log).st_size
        if size <= limit:
            return False
        end = (size - 1) // (block := os.fstatvfs(log).f_bsize or 4096) * block  # the cut must leave something
        with contextlib.suppress(OSError):  # a full disk: the older part goes all the same, and makes room
            if not first_part(path).exists():
                _copy(log, first_part(path), 0, min(FIRST_BYTES, limit))
        older_part(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            _copy(log, older_part(path), max(0, end - limit), end)
        if not _collapse_start(log, end):
            with contextlib.suppress(OSError), open(older_part(path), "ab") as target:
                _append(log, target.fileno(), end, None)
            os.ftruncate(log, 0)
        return True
    finally:
        os.close(log)


def _collapse_start(log: int, size: int) -> bool:
    """Remove the first `size` bytes of a file in one step; False where its file system cannot."""
    return int(_fallocate(log, FALLOC_FL_COLLAPSE_RANGE, 0, size)) == 0


def _copy(source: int, path: Path, start: int, end: int) -> None:
    """Raises: OSError, with the copy removed."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _append(source, target, start, end)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(target)


def _append(source: int, target: int, start: int, end: int | None) -> None:
    """Copy from `start` to `end`, or to the end of the file."""
    while end is None or start < end:
        size = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - start)
        if not (block := os.pread(source, size, start)):
            return
        start += len(block)
        while block:
            block = block[os.write(target, block) :]
