"""Atomic replacement of files, removal of folders of any depth, and closing files that a fork has inherited.

Standard library only, and nothing of this project: ranks use it, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacement(
    path: Path, *, suffix: str = ".part", durable: bool = False, sync_parent: bool = False, mode: int | None = None
) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, or is removed when the block raises.

    Always: a reader sees the former content or the whole new one, also if this process is killed. A killed one leaves the
    temporary file behind, which the next writer overwrites. A symbolic link under the temporary name is an error and is not
    followed; one at `path` is replaced. Two writers of one path at a time need different suffixes.

    Args:
        suffix: of the temporary file beside `path`; its name is the file's `name`.
        durable: the content is on disk before the rename, so after a power cut the file is the former or the whole new one.
            Without it, such a file may come out empty.
        sync_parent: the rename itself is on disk, too, when this returns. Without it, a power cut may bring the former back.
        mode: permissions of the file; None for what the umask leaves of 0666.
    Raises: OSError, with `path` as it was.
    """
    # in the same folder: a rename is atomic within one file system only
    temporary = path.with_name(path.name + suffix)
    file = open(temporary, "wb", opener=_open_no_follow)
    try:
        with file:
            yield file
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync_parent:
        sync_folder(path.parent)


def write(
    path: Path,
    content: bytes,
    *,
    suffix: str = ".part",
    durable: bool = False,
    sync_parent: bool = False,
    mode: int | None = None,
) -> None:
    """Write a whole file atomically, with the arguments and guarantees of `replacement`. Raises: OSError."""
    with replacement(path, suffix=suffix, durable=durable, sync_parent=sync_parent, mode=mode) as file:
        file.write(content)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk: new names, renames and deletions. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: Path) -> None:
    """Delete a folder as far as that is possible. A link that appears in it meanwhile is not followed."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def close_inherited(keep: Container[int] = ()) -> None:
    """Close every descriptor but the standard streams and those in `keep`. For a process that was just forked.

    The open ones are listed, because a container's limit may be a billion, and a Python that was built for an old C library
    (conda's) closes a range one by one.
    """
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in keep:
            with contextlib.suppress(OSError):  # the list's own
                os.close(number)


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
