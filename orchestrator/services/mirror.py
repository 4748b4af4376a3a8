"""A second place for verified checkpoints, local or far (fsspec): `MIRROR/NAME-RUNID/STAGE/step-…`.

One thread of its own makes that place like the first whenever it is woken: it asks the database what is verified and
kept, sends what is not there, newest first, and removes what retention has dropped once the newest is there. So it does
not matter where it was cut: it looks again and sends the rest. Nobody waits for it but the end of a session, for a while.

A folder is whole once it has a manifest, which comes last. Until then it holds a copy of the manifest under another name,
so that what an older checkpoint of the same step has left there is not taken for a part of this one.
"""

from __future__ import annotations

import contextlib
import errno
import io
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Engine

from db import checkpoints as rows
from db.records import CheckpointInfo, RunInfo
from orchestrator.checkpoint.folder import CHUNK_BYTES, read_checkpoint
from orchestrator.checkpoint.manifest import FOLDER_PATTERN, MANIFEST_NAME
from orchestrator.core.backoff import Backoff
from orchestrator.core.codes import CheckpointState, EventKind
from orchestrator.errors import CheckpointBroken, PlanError, nearest
from orchestrator.plan import Plan
from orchestrator.system import files, redaction

RETRIES = Backoff(first_s=5.0, longest_s=600.0)
END_S = 60.0
"""What a mirror gets at most at a session's end."""

UNDER_WAY = MANIFEST_NAME + ".part"


def check(plan: Plan) -> None:
    """See that fsspec can speak to the plan's mirror; nothing is connected.

    Raises: PlanError naming the package to install.
    """
    if plan.checkpoint.mirror is None:
        return
    from fsspec.registry import get_filesystem_class, known_implementations
    from fsspec.utils import get_protocol

    for part in plan.checkpoint.mirror.split("::"):
        protocol = get_protocol(part)
        try:
            get_filesystem_class(protocol)
        except ValueError:
            raise PlanError(
                f"checkpoint.mirror: fsspec knows no {protocol!r}{nearest(protocol, known_implementations)}",
                next_step='give a folder, or a URL such as "s3://bucket/folder"',
            ) from None
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            raise PlanError(
                f"checkpoint.mirror: {protocol}:// needs the package {package}",
                str(error),
                next_step=f"pip install {package}",
            ) from None


def of(engine: Engine, run: RunInfo, plan: Plan) -> Mirror | None:
    """The mirror that a plan names, at work already."""
    part = plan.checkpoint
    return Mirror(engine, run, part.mirror, part.mirror_options) if part.mirror else None


class Mirror:
    """Attributes:
    notes: for the journal: `mirroring` (there is one), `mirrored`, `mirror_failed` (once a cause), with their facts.
    """

    def __init__(self, engine: Engine, run: RunInfo, url: str, options: dict[str, Any]) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._engine, self._run, self._options = engine, run, options
        credentials = (*redaction.url_credentials(url), *_texts(options))
        self._secrets = {text for text in credentials if len(text) > 3}
        self._url = url if "://" in url else str(Path(run.workdir, url))
        self._guard, self._stopping = threading.Condition(), threading.Event()
        self._asked = self._done = 0
        self._hurried, self._has_news = False, True
        self._cause: Any = None
        self._holds = ""  # the newest that is known to be whole there
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._note(EventKind.MIRRORING, to=redaction.without_credentials(self._url))
        self._thread.start()
        self.wake()

    def wake(self, *, now: bool = False) -> None:
        """There may be something to send. `now`: also when it failed lately and would be tried later."""
        with self._guard:
            self._asked, self._hurried = self._asked + 1, self._hurried or now
            self._guard.notify()

    @property
    def is_busy(self) -> bool:
        """Whether it has yet to do what it was last woken for."""
        return self._done < self._asked

    def stop(self) -> None:
        """Where it is; what hangs in a far place is left behind."""
        self._stopping.set()
        self.wake(now=True)
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        failures = 0
        while asked := self._next(RETRIES.after(failures)):
            try:
                self._make_alike(asked)
                self._cause, failures = None, 0
            except _Stopped:
                return
            except Exception as error:  # whatever a far place, its library or the disk says
                failures += 1
                self._failed(error)
            self._done = asked

    def _next(self, pause_s: float) -> int:
        """Wait until it is woken or, after a failure, for a pause. How often it was woken by then; 0 to end."""
        with self._guard:
            if pause_s:
                self._guard.wait_for(lambda: self._hurried, timeout=pause_s)
            else:
                self._guard.wait_for(lambda: self._asked > self._done)
            self._hurried = False
            return 0 if self._stopping.is_set() else self._asked

    def _make_alike(self, asked: int) -> None:
        verified = rows.of_run(self._engine, self._run.id, CheckpointState.VERIFIED)
        kept = {_name(row): row for row in verified if Path(row.path).is_dir()}
        place = _Place(self._url, self._options, f"{self._run.name}-{self._run.id}", self._stopping)
        for number, (name, row) in enumerate(reversed(kept.items())):
            try:
                self._send(place, name, row, is_newest=number == 0)
            except (FileNotFoundError, CheckpointBroken):
                if Path(row.path).is_dir():
                    raise
                continue  # dropped meanwhile
            if number == 0:
                place.remove(self._dropped(place.names({row.stage for row in verified}) - kept.keys()))
            if self._asked > asked:
                return  # a newer one goes first

    def _dropped(self, names: set[str]) -> set[str]:
        """Which of these our own retention has let go: a long run has thousands of such rows, a mirror a few folders."""
        steps = {
            int(found[0].split("-")[1]) for name in names if (found := FOLDER_PATTERN.fullmatch(name.partition("/")[2]))
        }
        return names & {_name(row) for row in rows.dropped(self._engine, self._run.id, steps)}

    def _send(self, place: _Place, name: str, row: CheckpointInfo, *, is_newest: bool) -> None:
        began_s, sent = time.monotonic(), place.take(Path(row.path), name)
        if is_newest:
            self._holds = f"{row.stage} {row.step}"
        if sent or self._has_news:
            took_s = round(time.monotonic() - began_s, 3)
            self._note(EventKind.MIRRORED, stage=row.stage, step=row.step, bytes=sent, took_s=took_s)
            self._has_news = False

    def _failed(self, error: Exception) -> None:
        why = redaction.replace_values(f"{type(error).__name__}: {error}", self._secrets, mask="…")
        cause = (type(error), getattr(error, "errno", None) or why)
        if cause != self._cause:
            self._note(EventKind.MIRROR_FAILED, why=why[:500])
            self._cause, self._has_news = cause, True

    def _note(self, kind: str, **facts: Any) -> None:
        self.notes.put((kind, facts | {"holds": self._holds}))


class _Stopped(Exception):
    pass


class _Place:
    """The run's folder in a mirror.

    Raises, everywhere: whatever its library does; OSError for a local one.
    """

    def __init__(self, url: str, options: dict[str, Any], name: str, stopping: threading.Event) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        self._fs, root = url_to_fs(url, **options)
        self._is_local, self._stopping = isinstance(self._fs, LocalFileSystem), stopping
        if self._is_local and not Path(root).is_dir():  # not mounted, perhaps: making it would fill the wrong disk
            raise FileNotFoundError(errno.ENOENT, "there is no such folder to mirror into", root)
        self._fs.invalidate_cache()
        self._root = f"{root.rstrip('/')}/{name}"

    def take(self, folder: Path, name: str) -> int:
        """Have the checkpoint whole. Returns the bytes sent: 0 when it was there."""
        described, content, there = (
            read_checkpoint(folder),
            (folder / MANIFEST_NAME).read_bytes(),
            f"{self._root}/{name}",
        )
        if self._read(f"{there}/{MANIFEST_NAME}") == content:
            return 0
        if self._read(f"{there}/{UNDER_WAY}") != content:
            self._drop(there)
            self._fs.makedirs(there, exist_ok=True)
            self._write(io.BytesIO(content), f"{there}/{UNDER_WAY}")
        present, sent = self._sizes(there), len(content)
        for file, entry in described.files.items():
            if present.get(file) != entry.bytes:
                with open(folder / file, "rb") as source:
                    self._write(source, f"{there}/{file}")
                sent += entry.bytes
        self._write(io.BytesIO(content), f"{there}/{MANIFEST_NAME}")
        self._fs.rm_file(f"{there}/{UNDER_WAY}")
        return sent

    def names(self, stages: Iterable[str]) -> set[str]:
        """What lies there of these stages."""
        return {f"{stage}/{found}" for stage in stages for found in self._sizes(f"{self._root}/{stage}")}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._drop(f"{self._root}/{name}")

    def _drop(self, there: str) -> None:
        """The manifest first: cut here, what is left is no checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{there}/{MANIFEST_NAME}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(there, recursive=True)

    def _read(self, path: str) -> bytes | None:
        try:
            content: bytes = self._fs.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def _sizes(self, folder: str) -> dict[str, int]:
        try:
            return {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._fs.ls(folder, detail=True)}
        except FileNotFoundError:
            return {}

    def _write(self, source: BinaryIO, path: str) -> None:
        """Write in pieces, so that it can be stopped. On a local disk the file has its name only once it is durable."""
        # not ".part", which is the name that a manifest under way has here
        local = files.replacement(Path(path), suffix=".tmp", durable=True, sync_parent=True) if self._is_local else None
        with local or self._fs.open(path, "wb") as sink:
            while piece := source.read(CHUNK_BYTES):
                if self._stopping.is_set():
                    raise _Stopped
                sink.write(piece)


def _name(row: CheckpointInfo) -> str:
    return f"{row.stage}/{Path(row.path).name}"


def _texts(value: Any) -> Iterator[str]:
    """Every text below a value, whatever it is for."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    else:
        yield str(value)
