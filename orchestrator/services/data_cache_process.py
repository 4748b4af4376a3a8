"""The process that copies mounted data to a local disk: `python -m kgorch.services.data_cache_process ORDER`.

It has the lowest priority for cores and disk, ends with the supervisor that started it (services/data_cache.py), and reports each
change to it as a line of JSON. INTO/HASH/ is the cache of one source:

lock           held by the process that serves the cache, of whatever run
copied.jsonl   a line for every copied file: path, bytes, mtime_ns, xxh3_128 of what was read
NAME           the copy, under the source's own name
whole.json     written last: every file of the source; while it exists, the copy may be read instead of the source

A file is copied under another name, flushed, read back from the disk, compared with what was read by its hash, and renamed.
A new session trusts nothing that it finds: it removes `whole.json`, hashes every copied file again, and copies again what does
not match. So a kill at any moment costs one file, and a disk that loses data is detected. Then the source is listed repeatedly:
when a file was added, removed or changed there, `whole.json` is removed before anything else.

A source with symbolic links or pipes is refused: a copy that follows links would differ from one that does not, and a pipe has
no end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kgorch.core.codes import EventKind
from kgorch.errors import NO_ROOM
from kgorch.protocol.run_files import CACHE_COMPLETE_FILE
from kgorch.protocol.values import escape_surrogates
from kgorch.system import file_hash, files, priority

CHUNK_BYTES = 1 << 20

LIST_EVERY_S, LISTING_SHARE = 60.0, 0.02
"""A source is listed again after a minute, or less often where listing would take more than a fiftieth of the time."""

WAIT_S = 1.0
"""Seconds between two looks at a cache that the process of another run serves."""

Report = Callable[[str, dict[str, str]], None]


class FileVersion(NamedTuple):
    """What tells whether a file has changed: another size or time is another version."""

    bytes: int
    mtime_ns: int


class NotCacheable(Exception):
    """A source that cannot be cached, or not now; the text says why."""


def copy_path(source: str, cache: str | Path) -> Path:
    """The copy of a source within its cache; it keeps the source's name."""
    return Path(cache, Path(source).name)


class Cache:
    """The cache of one source, in the process that copies.

    Args:
        folder: of the cache; other runs may use it, too.
        reserve_bytes: of the disk, that stay free.
        report: is called once for every change: an EventKind and its facts.
    """

    def __init__(self, source: str, folder: Path, reserve_bytes: int, report: Report) -> None:
        self._source, self._folder, self._reserve_bytes = Path(source), folder, reserve_bytes
        self._copy, self._marker = copy_path(source, folder), folder / CACHE_COMPLETE_FILE
        self._lock: int | None = None
        self._entries: dict[str, tuple[FileVersion, str]] = {}  # the files of the copy, with their hashes
        self._complete: dict[str, FileVersion] | None = None  # the source as the marker describes it
        self._readable: frozenset[str] = frozenset()  # files of the last complete copy: a training may be reading them
        self._last_report: tuple[str, str] | None = None
        self._report = report

    def attend(self) -> float:
        """Make the copy complete, or report why it is not. Returns the seconds until it is worth another look."""
        began_s = time.monotonic()
        try:
            if self._lock is None and not self._acquire():
                if self._marker.exists():
                    self._report_once(EventKind.DATA_CACHED, by="another run")
                elif self._last_report:
                    why = "the source has changed; another run copies it again"
                    self._report_once(EventKind.DATA_CACHE_STALE, why=why)
                return WAIT_S
            self._update()
        except NotCacheable as error:
            self._report_once(EventKind.DATA_CACHE_FAILED, why=str(error))
        except OSError as error:
            self._report_once(EventKind.DATA_CACHE_FAILED, why=f"{type(error).__name__}: {error}")
        return max(LIST_EVERY_S, (time.monotonic() - began_s) / LISTING_SHARE if self._complete else 0.0)

    def _acquire(self) -> bool:
        """Take the lock and the files of an earlier process whose hashes still match. False while another process has it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # below /tmp another user may have made a folder of this name
        if self._folder.stat().st_uid != os.getuid():
            raise NotCacheable(f"{self._folder} belongs to another user")
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock, was_complete = lock, self._marker.exists()
        # before the hashes are checked: until then nobody may read the copy
        self._marker.unlink(missing_ok=True)
        for name, (version, digest) in self._ledger():
            with contextlib.suppress(OSError):
                path = self._path(self._copy, name)
                if path.lstat().st_size == version.bytes and _hash_of(path) == digest:
                    self._entries[name] = (version, digest)
        self._readable = frozenset(self._entries if was_complete else ())
        return True

    def _update(self) -> None:
        """Copy what is missing, remove what the source no longer has, and write the marker.

        Raises: NotCacheable, OSError.
        """
        began_s, listing = time.monotonic(), self._list_source()
        if listing == self._complete:
            return
        if self._complete is not None:
            self._marker.unlink(missing_ok=True)
            self._complete = None
            self._report_once(EventKind.DATA_CACHE_STALE, why="the source has changed; it is copied again")
        missing = {name: version for name, version in listing.items() if self._entries.get(name, (None,))[0] != version}
        if missing:
            self._check_room(sum(version.bytes for version in missing.values()))
        for name, version in missing.items():
            self._copy_file(name, version)
        self._remove_except(listing)
        # a file that was added meanwhile would be missing from a copy that is called complete
        if self._list_source() != listing:
            raise NotCacheable("the source changes while it is copied")
        entries = {name: [*version, self._entries[name][1]] for name, version in listing.items()}
        files.write(self._marker, json.dumps({"source": str(self._source), "files": entries}).encode(), durable=True)
        self._complete, self._readable = listing, frozenset(listing)
        self._report_once(
            EventKind.DATA_CACHED,
            files=str(len(listing)),
            bytes=str(sum(version.bytes for version in listing.values())),
            copied_bytes=str(sum(version.bytes for version in missing.values())),
            took_s=f"{time.monotonic() - began_s:.3f}",
        )

    def _list_source(self) -> dict[str, FileVersion]:
        """Every file of the source by its path below it; a source that is a file itself has the empty path.

        Raises: NotCacheable for an entry that is neither file nor folder; OSError.
        """
        if self._copy.resolve().is_relative_to(self._source.resolve()):
            raise NotCacheable("the cache would lie inside of its source")
        status = self._source.stat()  # follows a link: the source itself may be one
        if stat.S_ISREG(status.st_mode):
            return {"": FileVersion(status.st_size, status.st_mtime_ns)}
        return dict(self._list_folder(self._source, ""))

    def _list_folder(self, folder: Path, prefix: str) -> Iterator[tuple[str, FileVersion]]:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._list_folder(Path(entry.path), name + "/")
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    yield name, FileVersion(status.st_size, status.st_mtime_ns)
                else:
                    kind = "a symbolic link" if entry.is_symlink() else "no regular file"
                    raise NotCacheable(f"{name} is {kind}: a copy would not be the same; name the folders without it")

    def _check_room(self, need_bytes: int) -> None:
        """Raises: NotCacheable when the disk has no room for so many bytes more; the copy's room is freed before."""
        disk = os.statvfs(self._folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        if need_bytes + self._reserve_bytes > free_bytes:
            self._free_room()
            raise NotCacheable(
                f"{need_bytes} bytes are to be copied, {free_bytes} are free, {self._reserve_bytes} are to stay free"
            )

    def _copy_file(self, name: str, version: FileVersion) -> None:
        """Copy one file. It gets its name only when its hash, read back from the disk, matches.

        Raises: NotCacheable when the file changes meanwhile, or the disk returns something else; OSError.
        """
        source, copy = self._path(self._source, name), self._path(self._copy, name)
        self._check_room(version.bytes)  # again for each file: others fill the disk meanwhile
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = self._folder / "file.part"
        try:
            with open(source, "rb") as reading, open(partial, "wb") as writing:
                digest = copy_durably(reading, writing)
                status = os.fstat(reading.fileno())
            if FileVersion(status.st_size, status.st_mtime_ns) != version:
                raise NotCacheable(f"the source changes while it is copied: {name or source.name}")
            if _hash_of(partial) != digest:
                raise NotCacheable(f"the local disk does not give back what was written: {name or source.name}")
            os.utime(partial, ns=(version.mtime_ns, version.mtime_ns))
            partial.rename(copy)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._free_room()
            raise
        finally:
            partial.unlink(missing_ok=True)
        self._entries[name] = (version, digest)
        with open(self._folder / "copied.jsonl", "a") as ledger:
            ledger.write(json.dumps([name, *version, digest]) + "\n")

    def _ledger(self) -> Iterator[tuple[str, tuple[FileVersion, str]]]:
        """The copied files by copied.jsonl. The last line of a file counts; a line that a kill has cut is skipped."""
        lines: dict[str, tuple[FileVersion, str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self._folder / "copied.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    name, size, mtime_ns, digest = json.loads(line)
                    lines[name] = (FileVersion(size, mtime_ns), digest)
        yield from lines.items()

    def _remove_except(self, names: Collection[str]) -> None:
        """Remove all other files from the copy: a training that lists the folder must find the entries of the source."""
        # in reverse order, so that a folder comes after what is in it
        for path in sorted(self._copy.rglob("*"), reverse=True) if self._copy.is_dir() else ():
            name = path.relative_to(self._copy).as_posix()
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # not empty
                    path.rmdir()
            elif name not in names:
                path.unlink()
        self._entries = {name: copy for name, copy in self._entries.items() if name in names}
        if "" not in names:
            self._copy.mkdir(parents=True, exist_ok=True)

    def _free_room(self) -> None:
        """Delete what nobody can read yet, because the disk is needed for other things, checkpoints above all.

        The files of the last complete copy stay: a training may still be reading them.
        """
        if self._readable:
            self._remove_except(self._readable)
            return
        (self._folder / "copied.jsonl").unlink(missing_ok=True)
        self._entries.clear()
        if self._copy.is_dir():
            shutil.rmtree(self._copy, ignore_errors=True)
        else:
            self._copy.unlink(missing_ok=True)

    def _path(self, root: Path, name: str) -> Path:
        return root / name if name else root

    def _report_once(self, kind: str, **facts: str) -> None:
        """Report a change; the same kind for the same reason is reported once until another one comes between."""
        if self._last_report != (report := (kind, facts.get("why", ""))):
            self._last_report = report
            every = {"source": str(self._source), "copy": str(self._copy)} | facts
            self._report(kind, {key: escape_surrogates(value) for key, value in every.items()})


def copy_durably(reading: BinaryIO, writing: BinaryIO) -> str:
    """Copy a file durably. Returns the xxh3_128 of what was read.

    The copy is dropped from the page cache: reading it back for the comparison shall ask the disk.
    """
    digest, _ = file_hash.copy_and_hash(file_hash.chunks_of(reading, CHUNK_BYTES), writing)
    writing.flush()
    os.fsync(writing.fileno())  # first: only clean pages can be dropped
    os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return file_hash.hash_chunks(file_hash.chunks_of(file, CHUNK_BYTES))


def lower_priority() -> None:
    """Leave cores and disk to the training: the lowest priority, and the disk only when nobody else uses it."""
    import psutil

    priority.lower(19)
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def serve(caches: Sequence[Cache]) -> None:
    """Attend to each cache when it is due; never returns."""
    due_s = [0.0] * len(caches)
    while True:
        for index, cache in enumerate(caches):
            if time.monotonic() >= due_s[index]:
                pause_s = cache.attend()
                due_s[index] = time.monotonic() + pause_s
        time.sleep(max(0.0, min(due_s) - time.monotonic()))


def main(order: dict[str, Any]) -> None:
    """The process: serve the caches of `order` (DataCache) until the supervisor ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:  # the supervisor died before the call
        return
    lower_priority()

    def report(kind: str, facts: dict[str, str]) -> None:
        print(json.dumps([kind, facts]), flush=True)

    serve([Cache(source, Path(folder), order["reserve"], report) for source, folder in order["caches"].items()])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
