"""A second place for verified checkpoints, local or remote (fsspec): `MIRROR/NAME-RUNID/STAGE/step-…`.

A thread of its own compares that place with the database whenever it is woken: it copies the verified checkpoints that are
missing there, newest first, and removes those that retention has deleted, once the newest is copied. There is no queue of copies,
so a failure, a restart or a kill loses nothing: the next comparison sends the rest. Only the end of a session waits for it, END_S
at most.

A folder is complete once it has a manifest, which is written last. Until then it holds a copy of the manifest under another name,
so that files of an older checkpoint of the same step are not taken for files of this one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Engine

from kgorch import untrusted_io
from kgorch.checkpoint import store
from kgorch.checkpoint.folder import CHUNK_BYTES, MAX_MANIFEST_BYTES, read_checkpoint, read_manifest
from kgorch.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME, Manifest, parse_manifest
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.core.backoff import Backoff
from kgorch.core.codes import CheckpointState, EventKind, Note
from kgorch.db import checkpoints as rows
from kgorch.db.rows import CheckpointInfo, RunInfo
from kgorch.errors import CheckpointBroken, KgorchError, PlanError, nearest
from kgorch.plan import Plan
from kgorch.system import files, redaction

RETRIES = Backoff(first_s=5.0, longest_s=600.0)
END_S = 60.0
"""Seconds that the end of a session waits for the mirror at most."""

UNDER_WAY = MANIFEST_NAME + ".part"
"""Name of the manifest's copy in a folder that is not complete."""


def check(plan: Plan) -> None:
    """Check that fsspec supports the URL of the plan's mirror; nothing is connected.

    Raises: PlanError naming the protocol that is unknown or the package to install.
    """
    if plan.checkpoint.mirror is None:
        return
    from fsspec.registry import get_filesystem_class, known_implementations
    from fsspec.utils import get_protocol

    for part in plan.checkpoint.mirror.split("::"):  # fsspec's chained URLs, each part with a protocol of its own
        protocol = get_protocol(part)
        try:
            get_filesystem_class(protocol)
        except ValueError:
            raise PlanError(
                f"checkpoint.mirror: fsspec knows no {protocol!r}{nearest(protocol, known_implementations)}",
                next_step='give a folder, or a URL such as "s3://bucket/folder"',
            ) from None
        except ImportError as error:
            known = known_implementations[protocol]
            package = known["class"].partition(".")[0]
            is_fsspecs = package == "fsspec"  # it needs another package, which only the words of `err` name
            raise PlanError(
                f"checkpoint.mirror: {protocol}:// needs {'another package' if is_fsspecs else f'the package {package}'}",
                str(error),
                next_step="install it, then the same again" if is_fsspecs else f"pip install {package}",
                error_code="KG902",
            ) from None


def of(engine: Engine, run: RunInfo, plan: Plan, note: Note) -> Mirror | None:
    """The mirror of a run, started; None without one in the plan."""
    section = plan.checkpoint
    return Mirror(engine, run, section.mirror, section.mirror_options, note) if section.mirror else None


class Mirror:
    """Copies the verified checkpoints of a run to another place, in a thread of its own.

    Args:
        url: of the place, or a path that is relative to the run's folder.
        options: fsspec's, for the protocol of the URL; they may hold credentials.
        note: takes entries for the journal from any thread: `mirroring` at the start, `mirrored`, `mirror_failed` once a cause.
    """

    def __init__(self, engine: Engine, run: RunInfo, url: str, options: dict[str, Any], note: Note) -> None:
        self._enter = note
        self._engine, self._run, self._options = engine, run, options
        credentials = (*redaction.url_credentials(url), *_texts(options))
        # shorter values, as those of flags among the options, would mask parts of words
        self._secrets = {text for text in credentials if len(text) > 3}
        self._url = url if "://" in url else str(Path(run.workdir, url))
        self._guard, self._stopping = threading.Condition(), threading.Event()
        self._wakes = self._handled_wakes = 0
        self._is_hurried, self._has_news = False, True
        self._cause: Any = None  # of the newest failure
        self._newest = ""  # stage and step of the newest checkpoint that is complete there
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._note(EventKind.MIRRORING, to=redaction.without_credentials(self._url))
        self._thread.start()
        self.wake()

    def wake(self, *, now: bool = False) -> None:
        """There may be something to copy.

        Args:
            now: also end the pause after a failure.
        """
        with self._guard:
            self._wakes, self._is_hurried = self._wakes + 1, self._is_hurried or now
            self._guard.notify()

    @property
    def is_busy(self) -> bool:
        """Whether it has not handled the newest call of `wake` yet."""
        return self._handled_wakes < self._wakes

    def stop(self) -> None:
        """End the thread. A call that hangs is abandoned after a second: it must not delay the supervisor's end."""
        self._stopping.set()
        self.wake(now=True)
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        failures = 0
        while wakes := self._next(RETRIES.after(failures)):
            try:
                self._synchronize(wakes)
                self._cause, failures = None, 0
            except _Stopped:
                return
            except Exception as error:  # each fsspec library raises its own
                failures += 1
                self._record_failure(error)
            self._handled_wakes = wakes

    def _next(self, pause_s: float) -> int:
        """Wait for a wake, or after a failure for the pause. Returns how many wakes there were until now; 0 to end."""
        with self._guard:
            if pause_s:
                self._guard.wait_for(lambda: self._is_hurried, timeout=pause_s)
            else:
                self._guard.wait_for(lambda: self._wakes > self._handled_wakes)
            self._is_hurried = False
            return 0 if self._stopping.is_set() else self._wakes

    def _synchronize(self, wakes: int) -> None:
        """Copy what is missing and remove what retention has deleted; ends early when it is woken again after `wakes`."""
        verified = rows.of_run(self._engine, self._run.id, CheckpointState.VERIFIED)
        on_disk = {_name(row): row for row in verified if Path(row.path).is_dir()}
        place = _RemoteFolder(self._url, self._options, f"{self._run.name}-{self._run.id}", self._stopping)
        for index, (name, row) in enumerate(reversed(on_disk.items())):
            try:
                self._send(place, name, row, is_newest=index == 0)
            except (FileNotFoundError, CheckpointBroken):
                if Path(row.path).is_dir():
                    raise
                continue  # retention has deleted it meanwhile
            if index == 0:
                # not before: until the newest is there, an older one may be all that the mirror has
                place.remove(self._deleted_by_retention(place.names({row.stage for row in verified}) - on_disk.keys()))
            if self._wakes > wakes:
                return  # there may be a newer checkpoint, which goes first

    def _deleted_by_retention(self, names: set[str]) -> set[str]:
        """Those of these folders whose checkpoints retention has deleted. Others there are not ours to remove.

        The database is asked for the steps of these folders: a long run has thousands of such rows, a mirror a few folders.
        """
        matches = (FOLDER_PATTERN.fullmatch(name.partition("/")[2]) for name in names)
        steps = {int(match[0].split("-")[1]) for match in matches if match}
        return names & {_name(row) for row in rows.dropped_at_steps(self._engine, self._run.id, steps)}

    def _send(self, place: _RemoteFolder, name: str, row: CheckpointInfo, *, is_newest: bool) -> None:
        began_s, sent_bytes = time.monotonic(), place.upload(Path(row.path), name)
        if is_newest:
            self._newest = f"{row.stage} {row.step}"
        # also where nothing was missing: at the start, and after a failure, the journal says that all is well
        if sent_bytes or self._has_news:
            took_s = round(time.monotonic() - began_s, 3)
            self._note(EventKind.MIRRORED, stage=row.stage, step=row.step, bytes=sent_bytes, took_s=took_s)
            self._has_news = False

    def _record_failure(self, error: Exception) -> None:
        why = redaction.replace_values(f"{type(error).__name__}: {error}", self._secrets, mask="…")
        cause = (
            type(error),
            getattr(error, "errno", None) or why,
        )  # by errno: the text may name another file each time
        if cause != self._cause:
            self._note(EventKind.MIRROR_FAILED, why=why[:500])
            self._cause, self._has_news = cause, True

    def _note(self, kind: str, **facts: Any) -> None:
        self._enter(kind, facts | {"holds": self._newest})


class MirrorReader:
    """Reads checkpoints of a run back from its mirror: another machine has put them there.

    All methods raise the errors of fsspec's library; OSError for a local folder.
    """

    def __init__(self, run: RunInfo, url: str, options: dict[str, Any]) -> None:
        self._run_id = run.id
        place = url if "://" in url else str(Path(run.workdir, url))
        self._folder = _RemoteFolder(place, options, f"{run.name}-{run.id}", threading.Event())

    def holds(self, row: CheckpointInfo) -> bool:
        """Whether the mirror has the whole checkpoint."""
        return self._folder.is_complete(_name(row))

    def fetch(self, row: CheckpointInfo, root: Path) -> None:
        """Copy a checkpoint to its path on this machine, unless it is there.

        Args:
            root: of the run's checkpoints.
        Raises: CheckpointBroken where its bytes do not match its manifest, or it is one of another run.
        """
        target = Path(row.path)
        if target.exists():
            if self._folder.has_same_manifest(_name(row), target):
                return
            store.quarantine(target, root)  # this machine went on by itself from an earlier one
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.tmp-mirror")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            self._folder.download(_name(row), part)
            if verify_checkpoint(part).run_id != self._run_id:
                raise CheckpointBroken(f"{_name(row)} of the mirror is a checkpoint of another run")
            part.rename(target)
            files.sync_folder(target.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


class _Stopped(Exception):
    """The mirror was stopped in the middle of a file."""


class _RemoteFolder:
    """The run's folder in a mirror. All methods raise the errors of fsspec's library; OSError for a local folder."""

    def __init__(self, url: str, options: dict[str, Any], name: str, stopping: threading.Event) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self._fs, root = url_to_fs(url, **options)
        self._is_local, self._stopping = isinstance(self._fs, LocalFileSystem), stopping
        # a missing folder may be one that is not mounted: making it would fill the wrong disk
        if self._is_local and not Path(root).is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder to mirror into", root)
        self._fs.invalidate_cache()  # fsspec shares instances, with listings of an earlier look
        self._root = f"{root.rstrip('/')}/{name}"

    def upload(self, folder: Path, name: str) -> int:
        """Make the copy of a checkpoint complete.

        Returns: bytes sent; 0 if it was complete.
        Raises: CheckpointBroken, FileNotFoundError for the checkpoint itself; _Stopped.
        """
        manifest, content = read_checkpoint(folder), (folder / MANIFEST_NAME).read_bytes()
        copy = f"{self._root}/{name}"
        if (there := self._read(f"{copy}/{MANIFEST_NAME}")) == content:
            return 0
        if there is not None and _has_files_of(there, manifest):
            # its metrics are new, its files are not: the copy stays complete
            self._write_manifest(content, f"{copy}/{MANIFEST_NAME}")
            return len(content)
        # files of the right size are not sent again, but only those of this very checkpoint
        if self._read(f"{copy}/{UNDER_WAY}") != content:
            self._delete(copy)
            self._fs.makedirs(copy, exist_ok=True)
            self._write_manifest(content, f"{copy}/{UNDER_WAY}")
        present, sent_bytes = self._sizes(copy), len(content)
        for file, entry in manifest.files.items():
            if present.get(file) != entry.bytes:
                with open(folder / file, "rb") as source:
                    self._write(source, f"{copy}/{file}")
                sent_bytes += entry.bytes
        self._write_manifest(content, f"{copy}/{MANIFEST_NAME}")
        self._fs.rm_file(f"{copy}/{UNDER_WAY}")
        return sent_bytes

    def is_complete(self, name: str) -> bool:
        return self._read(f"{self._root}/{name}/{MANIFEST_NAME}") is not None

    def has_same_manifest(self, name: str, folder: Path) -> bool:
        """Whether a checkpoint on this machine is the one in the mirror."""
        try:
            return (folder / MANIFEST_NAME).read_bytes() == self._read(f"{self._root}/{name}/{MANIFEST_NAME}")
        except OSError:
            return False

    def download(self, name: str, target: Path) -> None:
        """Copy a checkpoint into an empty folder; its manifest names the files and bounds their sizes.

        Raises: CheckpointBroken, CheckpointUnreadable for a manifest that is none.
        """
        content = self._read(f"{self._root}/{name}/{MANIFEST_NAME}")
        if content is None:
            raise CheckpointBroken(f"the mirror has no complete {name}")
        files.write(target / MANIFEST_NAME, content, durable=True)
        for file, entry in read_manifest(target).files.items():
            left = entry.bytes + 1  # one more than there may be, so that a longer file is noticed
            with self._fs.open(f"{self._root}/{name}/{file}", "rb") as source, open(target / file, "xb") as sink:
                while left > 0 and (piece := source.read(min(CHUNK_BYTES, left))):
                    left -= len(piece)
                    sink.write(piece)
                sink.flush()
                os.fsync(sink.fileno())

    def names(self, stages: Iterable[str]) -> set[str]:
        """The entries of these stages' folders, as STAGE/FOLDER."""
        return {f"{stage}/{name}" for stage in stages for name in self._sizes(f"{self._root}/{stage}")}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._delete(f"{self._root}/{name}")

    def _delete(self, path: str) -> None:
        """Delete a folder, its manifest first: if this is interrupted, what remains is no checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{path}/{MANIFEST_NAME}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(path, recursive=True)

    def _read(self, path: str) -> bytes | None:
        """The content of a manifest; None if it does not exist, is empty as an upload that was cut may leave it, is larger than any
        manifest, or no file at all.
        """
        try:
            if self._is_local:
                return untrusted_io.read_all(Path(path).parent, Path(path).name, MAX_MANIFEST_BYTES) or None
            with self._fs.open(path, "rb") as file:
                content: bytes = file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            if error.errno in untrusted_io.NO_FILE or isinstance(error, FileNotFoundError):
                return None
            raise
        except ValueError:
            return None
        return content if 0 < len(content) <= MAX_MANIFEST_BYTES else None

    def _sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each entry of a folder by its name; none if there is no such folder."""
        try:
            return {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._fs.ls(folder, detail=True)}
        except FileNotFoundError:
            return {}

    def _write_manifest(self, content: bytes, path: str) -> None:
        """Write a manifest whole or not at all. Raises: _Stopped."""
        if self._stopping.is_set():
            raise _Stopped
        if self._is_local:
            files.write(Path(path), content, suffix=".tmp", durable=True, sync_parent=True)  # ".part" ends UNDER_WAY
        else:  # leaving a file that is open for writing would upload what it has, also after an error
            self._fs.pipe_file(path, content)

    def _write(self, source: BinaryIO, path: str) -> None:
        """Write a file. On a local disk it gets its name only once it is durable. Raises: _Stopped."""
        # In pieces, because fsspec's put_file cannot be stopped at the wall.
        local = files.replacement(Path(path), suffix=".tmp", durable=True, sync_parent=True) if self._is_local else None
        with local or self._fs.open(path, "wb") as sink:
            while piece := source.read(CHUNK_BYTES):
                if self._stopping.is_set():
                    raise _Stopped
                sink.write(piece)


def _has_files_of(content: bytes, manifest: Manifest) -> bool:
    """Whether a manifest in the mirror, which may hold anything, lists the very files of this one, of the same run."""
    try:
        there = parse_manifest(content)
    except (ValueError, KgorchError):
        return False
    return (there.run_id, dict(there.files)) == (manifest.run_id, dict(manifest.files))


def _name(row: CheckpointInfo) -> str:
    return f"{row.stage}/{Path(row.path).name}"


def _texts(value: Any) -> Iterator[str]:
    """Every value of nested options as text: which of them are secret depends on the protocol."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    else:
        yield str(value)
