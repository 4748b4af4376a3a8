"""Waits for the end of an attempt's processes, and judges it, beside the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from subprocess import Popen

from kgorch.core.codes import EventKind, Phase
from kgorch.core.session.events import AttemptCrashed
from kgorch.launch import attempts, launcher
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.launch.standby import ForkedShim
from kgorch.supervisor.checkpoint_records import CheckpointRecords
from kgorch.supervisor.live_session import AttemptEnded, AttemptGone, Input, LiveSession
from kgorch.supervisor.metric_curves import CurveImporter
from kgorch.supervisor.node_saves import NodeSaves
from kgorch.supervisor.recorder import Journal

WRITTEN_S = 60.0
"""Seconds to wait for the journal before what it writes is read: remedies that were applied decide how an end is judged."""


class AttemptEnds:
    """Of one session. Two steps, for what is found on disk in the first goes through the loop before the second judges."""

    def __init__(
        self,
        live: LiveSession,
        journal: Journal,
        saves: tuple[CheckpointRecords, NodeSaves],
        curves: CurveImporter,
        post: Callable[[Input], None],
    ) -> None:
        self._live, self._journal = live, journal
        self._checkpoints, self._saves = saves
        self._curves, self._post = curves, post

    def watch(self, attempt: LaunchedAttempt, process: Popen[bytes] | ForkedShim | None) -> None:
        """AttemptGone follows. Args: process: of the shim; None where another supervisor started it."""

        def until_gone() -> None:
            launcher.wait(attempt.folder)
            if process is not None:
                process.wait()
            self._live.nodes.finish(attempt.name, attempt.folder)
            self._checkpoints.verifier.submit(lambda: self._collect(attempt))

        threading.Thread(target=until_gone, name=f"wait-{attempt.name}", daemon=True).start()

    def judge(self, attempt: LaunchedAttempt) -> None:
        """AttemptEnded follows."""
        live, recorded = self._live, frozenset(self._live.recorded)
        step = attempt.progress_step(live.row.step, live.saved_step)
        context = attempts.SessionContext(live.engine, live.run, live.plan, live.row, live.environ)

        def ask() -> None:
            try:
                event = attempts.judge_end(context, attempt, step, recorded)
            except Exception as error:  # a session that waits for a verdict would never end
                event = AttemptCrashed(f"its end could not be judged: {type(error).__name__}: {error}")
            self._post(AttemptEnded(attempt, event, attempt.failed_by_itself()))

        self._checkpoints.verifier.submit(ask)

    def _collect(self, attempt: LaunchedAttempt) -> None:
        """Take in what the attempt saved and nobody reported."""
        live = self._live
        try:
            if live.state.phase is Phase.STOPPING:
                self._saves.persist(live.left_s())
            self._checkpoints.verify_left_by(attempt)
            final = attempt.final_checkpoint(live.run)
            if final and not final.exists():  # quarantined as broken: the keeper may still hold what it was to be
                self._saves.persist(live.left_s(), again=True)
                self._checkpoints.verify_left_by(attempt)
            if attempt.has_unreadable_checkpoint():
                self._reopen_stages(attempt)
            self._curves.import_now(attempt.row)
            if live.state.phase is not Phase.STOPPING:
                self._journal.flush(live.left_s(WRITTEN_S))
        finally:  # whatever the disk does: that it has ended is known
            self._post(AttemptGone(attempt, attempt.recorded_step()))

    def _reopen_stages(self, attempt: LaunchedAttempt) -> None:
        """A rank could not read a checkpoint of an earlier stage: that stage has to make it again, or its next best is taken."""
        live, skipped = self._live, self._checkpoints.verifier.skipped
        stage = attempt.row.stage
        attempt.stages_without_best.extend(
            attempts.quarantine_broken_best(live.engine, live.run, live.plan, stage, skipped)
        )
        for reopened in attempts.reopen_stages(live.engine, live.run, stage, skipped):
            attempt.reopened_stages.append(reopened)
            self._journal.note(EventKind.STAGE_REOPENED, {"stage": reopened})
