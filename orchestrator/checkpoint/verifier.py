"""Background verification of checkpoints: a thread reads and renames, the supervisor's loop records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Protocol

from kgorch.checkpoint import store
from kgorch.checkpoint.folder import readable_checkpoints
from kgorch.checkpoint.manifest import Manifest
from kgorch.checkpoint.verify import verify_checkpoint
from kgorch.db.rows import RunInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from kgorch.protocol.snapshot_messages import CheckpointWritten

Job = Callable[[], None]


class VerificationListener(Protocol):
    """The loop's side of a Verifier; all of it is called in the loop."""

    def is_known(self, folder: str) -> bool:
        """Whether this checkpoint is recorded."""

    def verified(
        self, found: Manifest, folder: Path, took_s: float, blocking_s: float, *, rescued: bool = False
    ) -> None: ...

    def save_failed(self, why: str) -> None: ...

    def passed_over(self, place: Path, error: KgorchError, was: Path | None) -> None:
        """A checkpoint cannot be used and lies at `place`; `was`: where it lay before it was quarantined."""

    def reader_failed(self, why: str) -> None: ...


class Verifier:
    """One thread that verifies and deletes checkpoints, one after another, while the training goes on.

    A verification reads gigabytes: in the loop it would keep orders and deadlines waiting.

    Args:
        run: whose checkpoints they are; another run's are refused.
        post: hands a job to the loop.
    """

    def __init__(self, run: RunInfo, listener: VerificationListener, post: Callable[[Job], None]) -> None:
        self._run, self._listener, self._post = run, listener, post
        self._root = Path(run.checkpoints)
        self._restarts: dict[str, tuple[datetime, Job]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    def submit(self, job: Job) -> bool:
        """Run a job in the thread. False if it will not run, because the session is over and the thread has ended."""

        def guarded() -> None:
            try:
                job()
            except Exception as error:  # the thread must neither die in silence nor take the training along
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
        """Delete a checkpoint in the thread. False as `submit`."""
        return self.submit(lambda: store.delete(folder, self._root))

    def note_restart(self, stage: str, at: datetime, set_aside: Job) -> None:
        """The stage began anew: its older checkpoints do not count, as one that the keeper was still writing then.

        Args:
            set_aside: moves them away, so that the new beginning can save at the same steps.
        """
        self._restarts[stage] = at, set_aside

    def _is_superseded(self, manifest: Manifest) -> bool:
        restart = self._restarts.get(manifest.stage)
        return restart is not None and manifest.is_older_than(restart[0])

    def verify(self, written: CheckpointWritten) -> None:
        """In the thread: verify a checkpoint that was just written; quarantine it if it is broken."""
        began_s, folder = time.monotonic(), Path(written.path)
        store.check_folder(folder, self._root)
        try:
            manifest = verify_checkpoint(folder)
        except CheckpointBroken as error:
            place = store.quarantine(folder, self._root)
            self.skipped(place, error)
            self.report_failure(f"read back and found broken, now {place.name}")
        except CheckpointUnreadable as error:
            self.report_failure(str(error))
        else:
            if manifest.run_id != self._run.id:
                self.report_failure(f"{folder} belongs to another run")
                return
            if self._is_superseded(manifest):
                self.skipped(folder, KgorchError(f"{folder} was written after its stage began anew, and is of before"))
                self._restarts[manifest.stage][1]()
                return
            is_timed = written.took_s > 0 and not written.rescued  # else only the verification was measured
            took_s = written.took_s + time.monotonic() - began_s if is_timed else 0.0
            self._post(
                lambda: self._listener.verified(manifest, folder, took_s, written.blocking_s, rescued=written.rescued)
            )

    def unrecorded(self, root: Path) -> list[Path]:
        """Checkpoints of the run in a stage's folder that are not recorded: the message that told of them was lost."""
        return [
            folder
            for folder, manifest in readable_checkpoints(root)
            if not self._listener.is_known(str(folder))
            and manifest.run_id == self._run.id
            and not self._is_superseded(manifest)
        ]

    def verify_unrecorded(self, root: Path) -> None:
        """In the thread: verify the unrecorded checkpoints. How long their saves took is not known."""
        for folder in self.unrecorded(root):
            self.verify(CheckpointWritten("", str(folder), 0, 0, 0.0, 0.0))

    def verify_unrecorded_now(self, root: Path) -> None:
        """The same in the loop itself, at the end of the session, when nothing else waits for it."""
        with contextlib.suppress(CheckpointBroken, CheckpointUnreadable, OSError):
            for folder in self.unrecorded(root):
                self._listener.verified(verify_checkpoint(folder), folder, 0.0, 0.0)

    def skipped(self, place: Path, error: KgorchError) -> None:
        """Report a checkpoint that cannot be used, and where it lies now."""
        name, suffix, _ = place.name.partition(".broken")
        was = place.with_name(name) if suffix else None
        self._post(lambda: self._listener.passed_over(place, error, was))

    def report_failure(self, why: str) -> None:
        """A save has failed: the session is told."""
        self._post(lambda: self._listener.save_failed(why))
