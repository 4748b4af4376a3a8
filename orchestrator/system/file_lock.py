"""Locks that live as long as their holder, by flock(2): the kernel releases them when the process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from kgorch.errors import StateUnusable


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock at `path`; works on a read-only disk, too."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_held = False
        except BlockingIOError:
            is_held = True
        is_current = is_file_at(descriptor, path)
        os.close(descriptor)
        if is_current:  # else it was replaced meanwhile, and the file that is there now decides
            return is_held


def is_file_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path`: a lock on any other file excludes nobody."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class FileLock:
    """An exclusive lock on a file.

    People delete lock files that they take for stale. So a lock counts only on the file that is at its path, and the holder
    calls `refresh` regularly.
    """

    PROBE_S = 0.1
    """Seconds for which processes that only test the lock may hold it (`is_locked`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: list[int] = []  # the newest last; older ones are of a folder that was moved

    def acquire(self) -> bool:
        """True when the lock is ours now; False when a living process holds it. Raises: StateUnusable."""
        try:
            return self._acquire(self.PROBE_S)
        except OSError as error:
            raise StateUnusable(
                f"{self.path} cannot be written",
                str(error),
                next_step="point KGORCH_HOME at a folder that can be written",
            ) from None

    def refresh(self) -> bool:
        """Whether the lock is still ours; acquired again where its file was deleted or replaced and nobody else has it.

        In a folder that was moved the lock stays on the moved file: nothing is created at the former path.
        """
        if any(is_file_at(descriptor, self.path) for descriptor in self._descriptors):
            return True
        exists = any(os.fstat(descriptor).st_nlink for descriptor in self._descriptors)
        if exists and not self.path.parent.exists():
            return True
        try:
            return self._acquire(0.0)
        except OSError:  # a disk that is full or read-only just now: the next call tries again
            return False

    def release(self) -> None:
        """Release the lock; its file stays."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _acquire(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_file_at(descriptor, self.path):
                    break
            except BlockingIOError:
                if is_file_at(descriptor, self.path) and time.monotonic() >= until:
                    os.close(descriptor)
                    return False
                # held by a process that only tests it, or the file was replaced between open and flock
                time.sleep(0.005)
            os.close(descriptor)
        # files of the path that were deleted protect nothing; those of a moved folder are kept
        for old in [old for old in self._descriptors if os.fstat(old).st_nlink == 0]:
            self._descriptors.remove(old)
            os.close(old)
        self._descriptors.append(descriptor)
        return True
