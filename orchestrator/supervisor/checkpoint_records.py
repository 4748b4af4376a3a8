"""What the verifier found, brought into the session's state and the database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Engine

from kgorch.checkpoint import registry
from kgorch.checkpoint.manifest import Manifest
from kgorch.checkpoint.verifier import Job, Verifier
from kgorch.core.codes import CheckpointState, EventKind, Phase
from kgorch.core.session.events import CheckpointVerified, Event, RetriesExhausted, SaveFailed
from kgorch.db import checkpoints as rows
from kgorch.errors import KgorchError
from kgorch.launch import attempts
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.services.mirror import Mirror
from kgorch.supervisor.live_session import LiveSession
from kgorch.supervisor.recorder import Journal


def newest_saved_step(engine: Engine, run_id: str, stage: str) -> int:
    """The newest step of the stage that is on disk and verified; 0 for none."""
    found = rows.of_run(engine, run_id, CheckpointState.VERIFIED)
    return max((row.step for row in found if row.stage == stage), default=0)


class CheckpointRecords:
    """The loop's side of a Verifier (checkpoint/verifier.py, VerificationListener).

    Args:
        dispatch: moves the session by an event.
        post: hands a job to the loop.
    Attributes:
        verifier: its thread, in which slow work on checkpoints is done.
        mirror: is woken when there is something to send; None where the plan has none.
    """

    def __init__(
        self,
        live: LiveSession,
        journal: Journal,
        dispatch: Callable[[Event], None],
        post: Callable[[Job | Event], None],
    ) -> None:
        self._live, self._journal, self._dispatch, self._post = live, journal, dispatch, post
        self.verifier = Verifier(live.run, self, post)
        self.mirror: Mirror | None = None

    def is_known(self, folder: str) -> bool:
        return folder in self._live.recorded

    def verified(
        self, found: Manifest, folder: Path, took_s: float, blocking_s: float, *, rescued: bool = False
    ) -> None:
        live = self._live
        is_final = found.final and found.stage == live.row.stage  # a message of the stage before may come late
        if self.is_known(str(folder)):  # reported by the keeper, and found on disk besides; or measured since
            self._journal.write(lambda: registry.mark_best(live.engine, live.run.id, live.plan))
            if live.state.phase is Phase.SAVING or (is_final and not live.state.phase.is_over):
                self._dispatch(CheckpointVerified(found.step, 0.0, blocking_s, found.total_bytes, final=is_final))
            return
        live.recorded.add(str(folder))
        self._take_figures(found)
        session_id = live.row.id
        self._journal.write(
            lambda: registry.record_verified(
                live.engine, live.run.id, session_id, found, folder, save_duration_s=took_s, blocking_s=blocking_s
            )
        )
        if self.mirror:  # it asks the database what there is to send
            self._journal.write(self.mirror.wake)
        self._journal.write(lambda: registry.mark_best(live.engine, live.run.id, live.plan))
        if not live.state.phase.is_over:
            self._dispatch(CheckpointVerified(found.step, took_s, blocking_s, found.total_bytes, rescued, is_final))
        self._journal.write(self._drop_expired)

    def save_failed(self, why: str) -> None:
        self._dispatch(SaveFailed(why))

    def make_room(self) -> None:
        """Delete what may go: a save has failed, and the disk may be fuller than after the last one."""
        self._journal.write(self._drop_expired)

    def passed_over(self, place: Path, error: KgorchError, was: Path | None) -> None:
        self._journal.note(
            EventKind.CHECKPOINT_QUARANTINED if was else EventKind.CHECKPOINT_SKIPPED,
            {"checkpoint": place.name, "why": str(error)},
        )
        if was:
            self._live.recorded.discard(str(was))
            self._journal.write(lambda: rows.set_state(self._live.engine, str(was), CheckpointState.BROKEN, error.what))

    def reader_failed(self, why: str) -> None:
        self._journal.note(EventKind.READER_FAILED, {"why": why})

    def check_room(self, state_bytes: int) -> None:
        """End the run where its first save cannot fit on the disk: it would be lost with its session."""
        if self._live.state.phase.is_over or self._live.recorded:
            return
        root = Path(self._live.run.checkpoints)

        def look() -> None:
            if (free_bytes := registry.disk_free_bytes(root)) < state_bytes:
                self._post(RetriesExhausted(registry.no_room_message(root, state_bytes, free_bytes)))

        self.verifier.submit(look)

    def verify_left_by(self, attempt: LaunchedAttempt) -> None:
        """In a thread: verify what the attempt saved and nobody reported."""
        self.verifier.verify_unrecorded(attempts.checkpoint_root(self._live.run, attempt.row.stage))

    def verify_now(self, attempt: LaunchedAttempt) -> None:
        """The same in the loop itself, at the session's end, when nothing else waits for it."""
        self.verifier.verify_unrecorded_now(attempts.checkpoint_root(self._live.run, attempt.row.stage))

    def _take_figures(self, found: Manifest) -> None:
        live = self._live
        if found.stage != live.row.stage:
            return
        live.saved_step = max(live.saved_step, found.step)
        if found.step >= live.row.step:
            # The ranks' last heartbeat may come after their end is known: the figures of a short stage are in its last checkpoint.
            live.row = live.row._replace(step=found.step, metrics={**live.row.metrics, **found.metrics})

    def _drop_expired(self) -> None:
        """In the journal's thread, once what was verified is written down: the database knows the folders that may go."""
        live = self._live
        registry.drop_expired(live.engine, live.run.id, live.plan, self.verifier.drop)
