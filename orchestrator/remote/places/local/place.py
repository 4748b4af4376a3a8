"""Sessions on this machine, in folders laid out as a place's.

    bundles/NAME/                     files of a bundle
    sessions/NAME/order.json          what was pushed; the folder gets its name last, so it is there whole or not at all
                  script.py log.txt
                  input/datasets/local/BUNDLE/  input/notebooks/local/SOURCE/     hard links
                  output/
                  started, end.json   by session_process.py, which holds running.lock meanwhile

As at Kaggle, one session of a name can be pushed, and only the output of one that ended with 0 can be attached. A session that
was pushed by a process that died before it could start it is started by the next look.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kgorch.core.remote.place_values import (
    Account,
    PlaceError,
    PlaceQuota,
    Pushed,
    RemoteStatus,
    SessionOrder,
    Sighting,
    Trouble,
)
from kgorch.remote.place import RECORD_NAME, OnBytes, unwatched
from kgorch.remote.places.local.session_process import END, LOG, ORDER, OUTPUT, RUNNING, SCRIPT, STARTED
from kgorch.system.file_lock import FileLock, is_locked

AT_ONCE = 1
"""Sessions at the same time: each takes all GPUs of the machine."""

LOCK_S = 10.0
LOG_PAUSE_S = 0.3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_STATUSES = {"complete": RemoteStatus.COMPLETE, "killed": RemoteStatus.CANCELLED}


class LocalPlace:
    """See the head of this file. Args: folder: of its own, which outlives processes."""

    name = "local"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sessions, self._bundles = folder / "sessions", folder / "bundles"

    def account(self) -> Account:
        return Account("local", "none needed")

    def quota(self) -> PlaceQuota | None:
        return None

    def running(self) -> int | None:
        return sum(not self._status(path).status.is_over for path in self._all_sessions())

    def store_bundle(self, folder: Path, name: str) -> str:
        target = self._bundles / _checked(name)
        if not target.exists():
            self._bundles.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{name}.{os.getpid()}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial, symlinks=True)
            partial.rename(target)
        return name

    def is_bundle_ready(self, reference: str) -> bool:
        return (self._bundles / _checked(reference)).is_dir()

    def push(self, order: SessionOrder, script: str) -> Pushed:
        with self._lock():
            session = self._sessions / _checked(order.name)
            if session.exists():
                raise PlaceError(Trouble.REFUSED, f"there is a session {order.name} already")
            if sum(not self._status(path).status.is_over for path in self._all_sessions()) >= AT_ONCE:
                raise PlaceError(Trouble.SLOTS, f"{AT_ONCE} session runs on this machine already")
            partial = self._sessions / f".{order.name}"
            shutil.rmtree(partial, ignore_errors=True)
            (partial / OUTPUT).mkdir(parents=True)
            self._attach(order, partial / "input")
            (partial / SCRIPT).write_text(script)
            (partial / ORDER).write_text(json.dumps(asdict(order)))
            partial.rename(session)
        self._start(session)
        return self._pushed(session)

    def find_push(self, order: SessionOrder) -> Pushed | None:
        session = self._sessions / _checked(order.name)
        if not session.exists():
            return None
        if _read(session / ORDER)["nonce"] != order.nonce:
            raise PlaceError(Trouble.REFUSED, f"the session {order.name} was pushed by somebody else")
        return self._pushed(session)

    def look(self, name: str) -> Sighting:
        session = self._session(name)
        sighting = self._status(session)
        if sighting.status is RemoteStatus.QUEUED:
            self._start(session)
        return sighting

    def collect(
        self,
        name: str,
        folder: Path,
        patterns: tuple[str, ...] = (RECORD_NAME, "kgorch.db"),
        on_bytes: OnBytes = unwatched,
    ) -> list[Path]:
        output, collected = self._session(name) / OUTPUT, []
        for path in sorted(output.rglob("*")):
            relative = path.relative_to(output)
            if path.is_symlink() or not path.is_file():
                continue
            if any(fnmatch.fnmatchcase(text, item) for item in patterns for text in (str(relative), path.name)):
                target = folder / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
                on_bytes(target.stat().st_size, target.stat().st_size)
                collected.append(target)
        return collected

    def log(self, name: str, *, follow: bool = False) -> Iterator[str]:
        session = self._session(name)
        with open(session / LOG, "a+", errors="replace") as file:
            file.seek(0)
            while True:
                is_over = self._status(session).status.is_over
                yield from iter(file.readline, "")
                if is_over or not follow:
                    return
                time.sleep(LOG_PAUSE_S)

    def stop(self, name: str) -> str:
        session = self._session(name)
        if self._status(session).status.is_over:
            return "the session is over"
        seconds = _read(session / ORDER)["session_s"]
        return f"the session ends by itself, at most {seconds} s after its start; its log is {session / LOG}"

    def delete(self, name: str) -> None:
        session = self._sessions / _checked(name)
        if session.exists() and not self._status(session).status.is_over:
            raise PlaceError(Trouble.REFUSED, f"the session {name} is not over")
        shutil.rmtree(session, ignore_errors=True)

    def close(self) -> None:
        pass

    def _lock(self) -> _Lock:
        self._sessions.mkdir(parents=True, exist_ok=True)
        return _Lock(self._folder / "lock")

    def _all_sessions(self) -> list[Path]:
        return [path for path in self._sessions.glob("*") if _NAME.fullmatch(path.name)]

    def _session(self, name: str) -> Path:
        session = self._sessions / _checked(name)
        if not session.exists():
            raise PlaceError(Trouble.ABSENT, f"there is no session {name}")
        return session

    def _pushed(self, session: Path) -> Pushed:
        return Pushed(1, session.name, session.as_uri())

    def _attach(self, order: SessionOrder, into: Path) -> None:
        """The inputs of a session, as hard links: nothing in a session writes to its input."""
        bundle = self._bundles / _checked(order.bundle)
        if not bundle.is_dir():
            raise PlaceError(Trouble.REFUSED, f"there is no bundle {order.bundle}")
        shutil.copytree(bundle, into / "datasets" / "local" / order.bundle, copy_function=_link)
        if order.source:
            source = self._session(order.source)
            if self._status(source).status is not RemoteStatus.COMPLETE:
                raise PlaceError(
                    Trouble.REFUSED, f"the output of {order.source} cannot be attached: it did not complete"
                )
            shutil.copytree(
                source / OUTPUT,
                into / "notebooks" / "local" / order.source,
                copy_function=_link,
                ignore=lambda folder, names: [name for name in names if not _is_plain(Path(folder, name))],
            )

    def _start(self, session: Path) -> None:
        """Start its process; a second one ends at once, because the first holds the lock or has left its mark."""
        command = [sys.executable, "-m", "kgorch.remote.places.local.session_process", str(session)]
        with open(session / LOG, "ab") as log:
            subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _status(self, session: Path) -> Sighting:
        # In this order: its process takes the lock, then leaves its mark, then writes the end, and meanwhile goes on.
        has_started = (session / STARTED).exists()
        is_running = is_locked(session / RUNNING)
        if (session / END).exists():
            end = _read(session / END)
            status = _STATUSES.get(end["how"], RemoteStatus.ERROR)
            return Sighting(
                status, end["how"], "" if status is RemoteStatus.COMPLETE else f"exit code {end['exit']}", 1
            )
        if is_running:
            return Sighting(RemoteStatus.RUNNING, "running", version=1)
        if has_started:
            return Sighting(RemoteStatus.ERROR, "dead", "the process of the session was killed", 1)
        return Sighting(RemoteStatus.QUEUED, "queued", version=1)


class _Lock:
    """Held for the length of a push: two of them must not both fill the last free place."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)

    def __enter__(self) -> None:
        until_s = time.monotonic() + LOCK_S
        while not self._lock.acquire():
            if time.monotonic() > until_s:
                raise PlaceError(Trouble.BUSY, "another process pushes a session")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _checked(name: str) -> str:
    """A name of a session or bundle, which becomes part of a path."""
    if not _NAME.fullmatch(name):
        raise PlaceError(Trouble.REFUSED, f"{name!r:.80} is no name of a session or bundle")
    return name


def _is_plain(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or path.is_dir())


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_bytes())
    return content
