"""Looks for the checkpoints of a foreign program on disk, within bounds. No link is followed, and no file is opened."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kgorch.core.checkpoint.foreign_checkpoint import (
    MAX_CANDIDATES,
    MAX_DEPTH,
    MAX_FILES,
    WILDCARDS,
    ForeignCandidate,
    matches,
)

MAX_ENTRIES = 20_000
"""Entries of one folder that are compared with a pattern."""

ASIDE_FOLDER = ".kgorch-aside"
"""Beside the checkpoints: where incomplete ones are moved before an earlier one is handed back."""


class _NotAllowed(Exception):
    """The candidate holds something that is not copied."""


def scan(root: Path, pattern: str) -> list[ForeignCandidate]:
    """The candidates below `root`, newest first; at most MAX_CANDIDATES of them."""
    found = []
    for path in expand(root, pattern):
        try:
            found.append(_candidate(root, path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # renamed or deleted while it was looked at: the next look finds it
        except OSError as error:
            found.append(ForeignCandidate(path, False, (), 0, 0, "", f"cannot be read: {error.strerror}"))
    found.sort(key=lambda candidate: candidate.newest_ns, reverse=True)
    return found[:MAX_CANDIDATES]


def expand(root: Path, pattern: str) -> Iterator[str]:
    """The paths below `root` that match a pattern, relative to it. Links that match are left out."""
    yield from _expand(root, "", pattern.split("/"))


def _expand(root: Path, prefix: str, shapes: list[str]) -> Iterator[str]:
    shape, *rest = shapes
    if not WILDCARDS.search(shape):
        names = [shape]
    else:
        try:
            with os.scandir(root / prefix) as entries:
                names = [entry.name for _, entry in zip(range(MAX_ENTRIES), entries, strict=False)]
        except OSError:
            return
        names = sorted(name for name in names if matches(name, shape))
    for name in names:
        path = f"{prefix}/{name}" if prefix else name
        if rest:
            yield from _expand(root, path, rest)
        elif not (root / path).is_symlink() and os.path.lexists(root / path):
            yield path


def _candidate(root: Path, path: str) -> ForeignCandidate:
    status = (root / path).lstat()
    name = path.rpartition("/")[2]
    digest = hashlib.blake2b(digest_size=16)
    if stat.S_ISREG(status.st_mode):
        digest.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ino}".encode())
        return ForeignCandidate(path, False, (name,), status.st_size, status.st_mtime_ns, digest.hexdigest())
    if not stat.S_ISDIR(status.st_mode):
        return ForeignCandidate(
            path, False, (name,), 0, status.st_mtime_ns, digest.hexdigest(), "is no file and no folder"
        )
    files: dict[str, os.stat_result] = {}
    newest_ns, problem = 0, ""  # of files: the folder of an old checkpoint changes while that is deleted
    try:
        for relative, found in _walk(root / path, "", MAX_DEPTH):
            if stat.S_ISREG(found.st_mode):
                newest_ns = max(newest_ns, found.st_mtime_ns)
                files[relative] = found
                if len(files) > MAX_FILES:
                    raise _NotAllowed(f"holds more than {MAX_FILES} files")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except _NotAllowed as error:
        problem = str(error)
    if problem:  # not all of its files were looked at
        newest_ns = max(newest_ns, status.st_mtime_ns)
        digest.update(f"{status.st_mtime_ns} {status.st_ino}\n".encode())
    for relative, found in sorted(files.items()):
        line = f"{relative}\0{found.st_size} {found.st_mtime_ns} {found.st_ino}\n"
        digest.update(line.encode(errors="surrogateescape"))
    if not files and not problem:
        raise FileNotFoundError(errno.ENOENT, "an empty folder", path)
    total = sum(found.st_size for found in files.values())
    return ForeignCandidate(path, True, tuple(sorted(files)), total, newest_ns, digest.hexdigest(), problem)


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, os.stat_result]]:
    """Relative name and status of all that lies below. Raises: OSError, _NotAllowed."""
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number > MAX_ENTRIES:
                raise _NotAllowed(f"holds a folder of more than {MAX_ENTRIES} entries")
            relative, status = f"{prefix}{entry.name}", entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise _NotAllowed(f"holds the link {relative!r:.200}, which is not followed")
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise _NotAllowed(f"holds {relative!r:.200}, which is no file and no folder")
            if not _is_plain(relative):
                raise _NotAllowed(f"holds {relative!r:.200}, a name that cannot be stored")
            yield relative, status
            if stat.S_ISDIR(status.st_mode):
                if depth == 0:
                    raise _NotAllowed(f"is nested deeper than {MAX_DEPTH} folders")
                yield from _walk(folder / entry.name, f"{relative}/", depth - 1)


def _is_plain(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return len(name) <= 1000 and name.isprintable()
