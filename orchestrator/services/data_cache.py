"""Copies of mounted data on a local disk, made beside the training: `python -m orchestrator.services.data_cache ORDER`.

A process of its own with the lowest claim on cores and disk; it ends with the supervisor that started it, and tells it, in a
line of JSON each, what has happened. INTO/HASH/ is one source's cache:

lock           held by the process that serves it, of whatever run
copied.jsonl   a line for every file that was copied: path, bytes, mtime_ns, xxh3_128 of what was read
NAME           the copy, of the source's own name
whole.json     written last: every file of the source; while it is there, the copy may be read instead

A file is copied under another name, flushed, read back from the disk, compared by its hash with what was read, and renamed.
A new session trusts nothing it finds: `whole.json` is put away, every copied file is hashed again, and what does not fit is
copied again; so a kill at any moment costs one file, and a disk that forgets is found out. Then the source is listed
again and again: when a file was added, taken away or changed there, `whole.json` goes first.

A copy that follows links would differ from one that does not, and a pipe has no end: a source with such entries is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from orchestrator.core import bottlenecks
from orchestrator.core.codes import EventKind
from orchestrator.plan import DataSection
from orchestrator.protocol.run_files import CACHE_COMPLETE_FILE
from orchestrator.protocol.values import escape_surrogates
from orchestrator.system import files, hashing

CHUNK_BYTES = 1 << 20
LOOK_S, LOOKING_SHARE = 60.0, 0.02
"""A source is listed again once a minute, or as seldom as listing takes a fiftieth of the time."""

AUTO_AFTER = 60
"""Samples, one a second, by which a training must be seen to wait before its data are copied unasked."""

WAIT_S = 1.0
"""Between two looks at a cache that another run's process serves."""

Tell = Callable[[str, dict[str, str]], None]


class Entry(NamedTuple):
    """A file as it is known by: another size or time is another file."""

    bytes: int
    mtime_ns: int


class Refused(Exception):
    """A source that cannot be cached, or not now: why."""


class DataCache:
    """The supervisor's hand on the process.

    Attributes:
        notes: for the journal: `data_cached`, `data_cache_failed`, `data_cache_stale`, with their facts.
        caches: the folder of each source's cache, by the source.
    """

    def __init__(self, part: DataSection, workdir: Path, stages: Iterable[Mapping[str, Any]] = ()) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        into = workdir / part.into if part.into else Path(tempfile.gettempdir(), "kgorch-cache")
        told = _elsewhere(stages, workdir, into) if part.cache == "auto" else part.cache
        sources = dict.fromkeys(os.path.normpath(workdir / source) for source in told)
        self.caches = {source: str(place_of(source, into)) for source in sources}
        self._whole: set[str] = set()
        self._process: subprocess.Popen[str] | None = None
        self._order = {"caches": self.caches, "reserve": part.reserve}
        self._seen: deque[Mapping[str, float]] = deque(maxlen=AUTO_AFTER)
        self._is_due = bool(sources)
        if part.cache != "auto":
            self._begin()

    def consider(self, sample: Mapping[str, float]) -> None:
        """With `auto`, given each new sample: begin once they say that the training waits for its data."""
        if not self._is_due or (self._seen and sample == self._seen[-1]):
            return
        self._seen.append(sample)
        if len(self._seen) == AUTO_AFTER and "waiting_for_data" in _causes(self._seen):
            self._begin()

    def args(self, args: Mapping[str, Any], *, workdir: str) -> dict[str, Any]:
        """A stage's arguments, with the copy for each that is a source whose copy is known to be whole."""
        copies = {source: str(copy_of(source, self.caches[source])) for source in self._whole}
        return {
            name: copies.get(os.path.normpath(Path(workdir, value)), value)
            if isinstance(value, str) and value
            else value
            for name, value in args.items()
        }

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def _begin(self) -> None:
        if self._is_due:
            self._is_due = False
            try:
                self._start(self._order)
            except OSError as error:  # no room for another process: training goes on with the originals
                self.notes.put((EventKind.DATA_CACHE_FAILED, {"source": ", ".join(self.caches), "why": str(error)}))

    def _start(self, order: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.services.data_cache", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._hear, args=(self._process,), name="datacache", daemon=True).start()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            kind, facts = json.loads(line)
            # a new set: the loop may be going through the old one
            source = {facts["source"]}
            self._whole = self._whole | source if kind == EventKind.DATA_CACHED else self._whole - source
            self.notes.put((kind, facts))


def _causes(seen: Iterable[Mapping[str, float]]) -> set[str]:
    return {finding.cause for finding in bottlenecks.advise(list(seen)).findings}


def _elsewhere(stages: Iterable[Mapping[str, Any]], workdir: Path, into: Path) -> Iterator[str]:
    """What the stages' args name that is there, does not lie on the cache's disk, and does not hold the plan's folder."""
    here = next(folder for folder in (into, *into.parents) if folder.is_dir()).stat().st_dev
    for value in (value for args in stages for value in args.values()):
        if isinstance(value, str) and value:
            with contextlib.suppress(OSError, ValueError):
                path = Path(workdir, value)
                if path.stat().st_dev != here and not workdir.is_relative_to(path):
                    yield value


def place_of(source: str, into: Path) -> Path:
    return into / hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]


def copy_of(source: str, cache: str | Path) -> Path:
    return Path(cache, Path(source).name)


class Cache:
    """One source's. `tell` hears every change once."""

    def __init__(self, source: str, folder: Path, reserve_bytes: int, tell: Tell) -> None:
        self._source, self._folder, self._reserve_bytes = Path(source), folder, reserve_bytes
        self._copy, self._marker = copy_of(source, folder), folder / CACHE_COMPLETE_FILE
        self._lock: int | None = None
        self._copied: dict[str, tuple[Entry, str]] = {}  # what lies there, and its hash
        self._whole: dict[str, Entry] | None = None
        self._read: frozenset[str] = frozenset()  # what was whole when a training may have begun to read it
        self._said: tuple[str, str] | None = None
        self._tell = tell

    def attend(self) -> float:
        """Have it whole, or say why not. Returns seconds until it is worth looking again."""
        began_s = time.monotonic()
        try:
            if self._lock is None and not self._take():
                if self._marker.exists():
                    self._say(EventKind.DATA_CACHED, by="another run")
                elif self._said:
                    self._say(EventKind.DATA_CACHE_STALE, why="the source has changed; another run copies it again")
                return WAIT_S
            self._bring_up_to_date()
        except Refused as error:
            self._say(EventKind.DATA_CACHE_FAILED, why=str(error))
        except OSError as error:
            self._say(EventKind.DATA_CACHE_FAILED, why=f"{type(error).__name__}: {error}")
        return max(LOOK_S, (time.monotonic() - began_s) / LOOKING_SHARE if self._whole else 0.0)

    def _take(self) -> bool:
        """The lock, and what an earlier process has left, as far as it is still what was copied."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.stat().st_uid != os.getuid():
            raise Refused(f"{self._folder} belongs to another user")
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock, was_whole = lock, self._marker.exists()
        self._marker.unlink(missing_ok=True)
        for name, (entry, digest) in self._ledger():
            with contextlib.suppress(OSError):
                path = self._path(self._copy, name)
                if path.lstat().st_size == entry.bytes and _hash_of(path) == digest:
                    self._copied[name] = (entry, digest)
        self._read = frozenset(self._copied if was_whole else ())
        return True

    def _bring_up_to_date(self) -> None:
        began_s, found = time.monotonic(), self._listed()
        if found == self._whole:
            return
        if self._whole is not None:
            self._marker.unlink(missing_ok=True)
            self._whole = None
            self._say(EventKind.DATA_CACHE_STALE, why="the source has changed; it is copied again")
        missing = {name: entry for name, entry in found.items() if self._copied.get(name, (None,))[0] != entry}
        if missing:
            self._check_room(sum(entry.bytes for entry in missing.values()))
        for name, entry in missing.items():
            self._take_in(name, entry)
        self._clear_away(found)
        if self._listed() != found:
            raise Refused("the source changes while it is copied")
        copied = {name: [*entry, self._copied[name][1]] for name, entry in found.items()}
        files.write(self._marker, json.dumps({"source": str(self._source), "files": copied}).encode(), durable=True)
        self._whole, self._read = found, frozenset(found)
        self._say(
            EventKind.DATA_CACHED,
            files=str(len(found)),
            bytes=str(sum(entry.bytes for entry in found.values())),
            copied_bytes=str(sum(entry.bytes for entry in missing.values())),
            took_s=f"{time.monotonic() - began_s:.3f}",
        )

    def _listed(self) -> dict[str, Entry]:
        """Every file of the source, by its path below it; of a source that is a file itself, by the empty name.

        Raises: Refused for what is neither file nor folder; OSError.
        """
        if self._copy.resolve().is_relative_to(self._source.resolve()):
            raise Refused("the cache would lie inside of its source")
        at = self._source.stat()  # the source itself may be named by a link
        if stat.S_ISREG(at.st_mode):
            return {"": Entry(at.st_size, at.st_mtime_ns)}
        return dict(self._below(self._source, ""))

    def _below(self, folder: Path, prefix: str) -> Iterator[tuple[str, Entry]]:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._below(Path(entry.path), name + "/")
                elif entry.is_file(follow_symlinks=False):
                    at = entry.stat(follow_symlinks=False)
                    yield name, Entry(at.st_size, at.st_mtime_ns)
                else:
                    kind = "a symbolic link" if entry.is_symlink() else "no regular file"
                    raise Refused(f"{name} is {kind}: a copy would not be the same; name the folders without it")

    def _check_room(self, need_bytes: int) -> None:
        free = os.statvfs(self._folder)
        free_bytes = free.f_bavail * free.f_frsize
        if need_bytes + self._reserve_bytes > free_bytes:
            self._give_back()
            raise Refused(
                f"{need_bytes} bytes are to be copied, {free_bytes} are free, {self._reserve_bytes} are to stay free"
            )

    def _take_in(self, name: str, entry: Entry) -> None:
        """One file, whole under its name or not there; what was read is compared with what lies on the disk."""
        source, copy = self._path(self._source, name), self._path(self._copy, name)
        self._check_room(entry.bytes)
        copy.parent.mkdir(parents=True, exist_ok=True)
        aside = self._folder / "file.part"
        try:
            with open(source, "rb") as reading, open(aside, "wb") as writing:
                digest = _copied(reading, writing)
                before = os.fstat(reading.fileno())
            if Entry(before.st_size, before.st_mtime_ns) != entry:
                raise Refused(f"the source changes while it is copied: {name or source.name}")
            if _hash_of(aside) != digest:
                raise Refused(f"the local disk does not give back what was written: {name or source.name}")
            os.utime(aside, ns=(entry.mtime_ns, entry.mtime_ns))
            aside.rename(copy)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._give_back()
            raise
        finally:
            aside.unlink(missing_ok=True)
        self._copied[name] = (entry, digest)
        with open(self._folder / "copied.jsonl", "a") as ledger:
            ledger.write(json.dumps([name, *entry, digest]) + "\n")

    def _ledger(self) -> Iterator[tuple[str, tuple[Entry, str]]]:
        """What was copied, the last word on each file; a line that was cut by a kill is none."""
        told: dict[str, tuple[Entry, str]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self._folder / "copied.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    name, size, mtime_ns, digest = json.loads(line)
                    told[name] = (Entry(size, mtime_ns), digest)
        yield from told.items()

    def _clear_away(self, found: Collection[str]) -> None:
        """What is no longer in the source, so that a folder that is listed has the same entries."""
        for path in sorted(self._copy.rglob("*"), reverse=True) if self._copy.is_dir() else ():
            name = path.relative_to(self._copy).as_posix()
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()  # an empty one
            elif name not in found:
                path.unlink()
        self._copied = {name: known for name, known in self._copied.items() if name in found}
        self._copy.mkdir(parents=True, exist_ok=True) if "" not in found else None

    def _give_back(self) -> None:
        """The disk is needed for other things: checkpoints, above all. What was whole stays: somebody may still read it."""
        if self._read:
            self._clear_away(self._read)
            return
        (self._folder / "copied.jsonl").unlink(missing_ok=True)
        self._copied.clear()
        if self._copy.is_dir():
            shutil.rmtree(self._copy, ignore_errors=True)
        else:
            self._copy.unlink(missing_ok=True)

    def _path(self, root: Path, name: str) -> Path:
        return root / name if name else root

    def _say(self, kind: str, **facts: str) -> None:
        """Once, until something else is to be said."""
        if self._said != (what := (kind, facts.get("why", ""))):
            self._said = what
            told = {"source": str(self._source), "copy": str(self._copy)} | facts
            self._tell(kind, {key: escape_surrogates(value) for key, value in told.items()})


def _copied(reading: BinaryIO, writing: BinaryIO) -> str:
    """The xxh3_128 of what was read; what was written is on the disk and out of the page cache, so reading asks the disk."""
    digest, _ = hashing.copy_hashed(hashing.chunks_of(reading, CHUNK_BYTES), writing)
    writing.flush()
    os.fsync(writing.fileno())
    os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashing.hash_chunks(hashing.chunks_of(file, CHUNK_BYTES))


def yield_to_others() -> None:
    """Cores and disk are the training's: the lowest priority, and the disk when nobody else asks for it."""
    import psutil

    os.nice(19)
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def serve(caches: Sequence[Cache]) -> None:
    next_s = [0.0] * len(caches)
    while True:
        for number, cache in enumerate(caches):
            if time.monotonic() >= next_s[number]:
                pause_s = cache.attend()
                next_s[number] = time.monotonic() + pause_s
        time.sleep(max(0.0, min(next_s) - time.monotonic()))


def main(order: dict[str, Any]) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:
        return
    yield_to_others()

    def tell(kind: str, facts: dict[str, str]) -> None:
        print(json.dumps([kind, facts]), flush=True)

    serve([Cache(source, Path(folder), order["reserve"], tell) for source, folder in order["caches"].items()])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
