"""Slow looks at the disk, one after another, beside the supervisor's loop: it reads and renames, the loop writes down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from db.records import RunInfo
from orchestrator.checkpoint import manifest
from orchestrator.checkpoint import store as checkpoints
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from orchestrator.protocol.messages import Saved, boottime_s

Job = Callable[[], None]


class Listener(Protocol):
    """The loop's side; all of it is called in the loop."""

    def is_known(self, folder: str) -> bool:
        """Whether this checkpoint was written down already."""

    def verified(
        self, found: Manifest, folder: Path, took_s: float, blocking_s: float, *, rescued: bool = False
    ) -> None: ...

    def save_failed(self, why: str) -> None: ...

    def passed_over(self, place: Path, error: KgorchError, was: Path | None) -> None:
        """A checkpoint that cannot be used; `was`: where it lay, if it was set aside."""

    def reader_failed(self, why: str) -> None: ...


class Reader:
    """Args: post: hands a job to the loop."""

    def __init__(self, run: RunInfo, listener: Listener, post: Callable[[Job], None]) -> None:
        self._run, self._listener, self._post = run, listener, post
        self._root = Path(run.checkpoints)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def submit(self, job: Job) -> bool:
        """False where it is shut down, for the session is over: the job is not done."""

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # the reader must not die in silence, nor take the training along
                why = f"{type(error).__name__}: {error}"
                self._post(lambda: self._listener.reader_failed(why))

        try:
            self._pool.submit(guarded)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def drop(self, folder: Path) -> bool:
        return self.submit(lambda: checkpoints.drop(folder, self._root))

    def read_back(self, saved: Saved) -> None:
        """In the reader: see whether what was saved is what was to be saved."""
        began_s, folder = boottime_s(), Path(saved.path)
        checkpoints.check_place(folder, self._root)
        try:
            found = manifest.verify(folder)
        except CheckpointBroken as error:
            place = checkpoints.set_aside(folder, self._root)
            self.skipped(place, error)
            self._failed(f"read back and found broken, now {place.name}")
        except CheckpointUnreadable as error:
            self._failed(str(error))
        else:
            if found.run_id != self._run.id:
                self._failed(f"{folder} belongs to another run")
                return
            took_s = 0.0 if saved.rescued else saved.took_s + boottime_s() - began_s
            self._post(lambda: self._listener.verified(found, folder, took_s, saved.blocking_s, rescued=saved.rescued))

    def untold(self, root: Path) -> list[Path]:
        """Checkpoints of the run that lie in a stage's folder and nobody told of."""
        return [
            folder
            for folder, found in manifest.newest_readable(root)
            if not self._listener.is_known(str(folder)) and found.run_id == self._run.id
        ]

    def read_untold(self, root: Path) -> None:
        """In the reader: the same, read back. Nobody knows how long they took."""
        for folder in self.untold(root):
            self.read_back(Saved("", str(folder), 0, 0, 0.0, 0.0))

    def take_in(self, root: Path) -> None:
        """The same from the loop, at once, when the session is ending."""
        with contextlib.suppress(CheckpointBroken, CheckpointUnreadable, OSError):
            for folder in self.untold(root):
                self._listener.verified(manifest.verify(folder), folder, 0.0, 0.0)

    def skipped(self, place: Path, error: KgorchError) -> None:
        """A checkpoint that cannot be used, and where it lies now."""
        name, aside, _ = place.name.partition(".broken")
        was = place.with_name(name) if aside else None
        self._post(lambda: self._listener.passed_over(place, error, was))

    def _failed(self, why: str) -> None:
        self._post(lambda: self._listener.save_failed(why))
