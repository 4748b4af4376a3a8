"""Files in the plan's folder that the scripts wrote over while they were probed.

A probe runs a script as it is, with what it writes by itself: a `torch.save` at its end replaces the result of an earlier
training by the weights of a few steps. kgorch does not put the old files back: another training may be writing them now.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kgorch.launch.verdicts import WARN, CheckLine

MAX_FILES, MAX_NAMED = 10_000, 4


class PlanFolder:
    """What the folder and the folders in it held when this object was made.

    Args:
        home: the state folder, into which kgorch itself writes; left out where it lies in there.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder, self._home = folder, home
        self._before = dict(_files(folder, home))

    def lines(self) -> Iterator[CheckLine]:
        """A warning that names the files that have changed since."""
        now = dict(_files(self._folder, self._home))
        changed = sorted(name for name, state in self._before.items() if name in now and now[name] != state)
        if changed:
            more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
            what = f"written over while the scripts were probed: {', '.join(changed[:MAX_NAMED])}{more}"
            yield CheckLine("files", WARN, what, "let the script write its results `if not session.quick`")


def _files(folder: Path, home: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, and time of change in ns with size in bytes, of MAX_FILES at the most; what cannot be read is left out."""
    left, own = MAX_FILES, home.resolve()
    for top, folders, names in os.walk(folder):
        is_below = Path(top) != folder
        folders[:] = [] if is_below else [name for name in folders if not _is_skipped(Path(top, name), own)]
        for name in names[:left]:
            path = Path(top, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            yield str(path.relative_to(folder)), (status.st_mtime_ns, status.st_size)
        left -= len(names[:left])
        if left <= 0:
            return


def _is_skipped(folder: Path, own: Path) -> bool:
    return folder.name == "__pycache__" or folder.name.startswith(".") or folder.resolve() == own
