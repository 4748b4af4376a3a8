"""A path to data that becomes the local copy once that is whole (services/data_cache.py).

A rank looks at the end of each epoch and writes down in the attempt's folder what it found; the path asks for that file
whenever it is used, so loading processes that were forked or given a pickled path epochs ago go over, too. That costs
two looks at a local disk, less than a microsecond. The bytes are the same, so ranks need not go over together.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.run_files import CACHE_COMPLETE_FILE


class DataPath(os.PathLike[str]):
    """The original, or the copy; which of them is found out at each use: keep this, not the text that it gives."""

    def __init__(self, original: str, copy: str, flag: str) -> None:
        self._original, self._copy, self._flag = original, copy, flag

    def __fspath__(self) -> str:
        return self._copy if _is_there(self._flag) and _is_there(self._copy) else self._original

    def __truediv__(self, name: str) -> DataPath:
        return DataPath(os.path.join(self._original, name), os.path.join(self._copy, name), self._flag)

    def __str__(self) -> str:
        return self.__fspath__()

    def __repr__(self) -> str:
        return f"DataPath({self._original!r})"


class Data:
    """A rank's view of the caches that its launch names."""

    def __init__(self, launch: LaunchSpec | None, rank: int) -> None:
        self._caches = dict(launch.data) if launch else {}
        self._flags = {
            source: Path(launch.folder, f"rank{rank}.data{number}") if launch else Path()
            for number, source in enumerate(self._caches)
        }

    def path(self, path: str | os.PathLike[str]) -> os.PathLike[str]:
        """The path itself where it is not a cached source, or below one."""
        given = os.path.normpath(Path.cwd() / path)
        for source, cache in self._caches.items():
            if given == source or given.startswith(source.rstrip("/") + "/"):
                copy = os.path.join(cache, Path(source).name) + given[len(source.rstrip("/")) :]
                return DataPath(os.fspath(path), copy, str(self._flags[source]))
        return Path(path)

    def look(self) -> None:
        """At the end of an epoch: which copies are whole from here on, or are so no longer."""
        for source, cache in self._caches.items():
            with contextlib.suppress(OSError):  # a full disk: then it stays as it is
                if _is_there(os.path.join(cache, CACHE_COMPLETE_FILE)):
                    self._flags[source].touch()
                else:
                    self._flags[source].unlink(missing_ok=True)


def _is_there(path: str) -> bool:
    return os.access(path, os.F_OK)  # a third of what Path.exists() takes, at every sample
