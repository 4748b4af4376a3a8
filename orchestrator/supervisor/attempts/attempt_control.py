"""The attempts of a session, one after another, as the loop sees them: launched, watched, judged, launched again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind
from kgorch.core.session import events
from kgorch.db import sessions
from kgorch.hardware.gpu_locks import GpuLocks
from kgorch.launch import launcher
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.launch.standby import ForkedShim
from kgorch.services.data_cache import DataCache
from kgorch.snapshots import keeper_client
from kgorch.supervisor import checkpoint_records
from kgorch.supervisor.attempts.attempt_end import AttemptEnds
from kgorch.supervisor.attempts.attempt_launch import AttemptLauncher
from kgorch.supervisor.attempts.hang_monitor import HangMonitor
from kgorch.supervisor.attempts.memory_monitor import MemoryMonitor
from kgorch.supervisor.checkpoint_records import CheckpointRecords
from kgorch.supervisor.live_session import AttemptEnded, AttemptStarted, LaunchFailed, LiveSession, SupervisorLoop
from kgorch.supervisor.metric_curves import CurveImporter
from kgorch.supervisor.node_saves import NodeSaves
from kgorch.supervisor.recorder import Journal

ATTACH_S = 60.0
"""Seconds after which a person is told of a script that has not attached; imports from a slow disk are over by then."""

AGAIN = Backoff(5.0, longest_s=30.0)
"""Pauses between launches that failed."""


class AttemptControl:
    """Of one session; called in its loop.

    Args:
        saves: what was verified, and what the keepers write.
        claim: the locks of the GPUs that the attempts get.
    Attributes:
        hangs, memory: watch the attempt that runs. curves: import its metrics.
    """

    def __init__(
        self,
        loop: SupervisorLoop,
        live: LiveSession,
        journal: Journal,
        saves: tuple[CheckpointRecords, NodeSaves],
        claim: GpuLocks,
    ) -> None:
        checkpoints, self._saves = saves
        self._loop, self._live, self._journal, self._checkpoints = loop, live, journal, checkpoints
        self.hangs, self.memory = HangMonitor(live, journal.note), MemoryMonitor(live)
        self.curves = CurveImporter(live.engine, checkpoints.verifier.submit, journal.write)
        self._launcher = AttemptLauncher(live, journal, (checkpoints.verifier, self._saves), claim, loop.post)
        self._ends = AttemptEnds(live, journal, saves, self.curves, loop.post)
        self._failed: Counter[float] = Counter()  # launches in a row, by how often one that fails so is tried

    def launch(self, data: DataCache) -> None:
        """Have the next one started, beside the loop. `data`: knows which data sets have a local copy."""
        self._launcher.request(data, self.hangs, self.memory)

    def adopt(self, attempt: LaunchedAttempt) -> None:
        """One that has outlived its supervisor. Before the loop runs: it asks the database."""
        live = self._live
        live.attempt = live.last_attempt = attempt
        live.processes = attempt.folder
        live.saved_step = checkpoint_records.newest_saved_step(live.engine, live.run.id, attempt.row.stage)
        self.hangs.begin(attempt)
        self.memory.begin(attempt)
        self._watch(attempt)
        self._ends.watch(attempt, None)

    def on_started(self, started: AttemptStarted) -> None:
        live, attempt, restored = self._live, started.attempt, started.found
        self._ends.watch(attempt, started.process)
        if not live.state.phase.is_launching:  # stopped while it was started
            threading.Thread(target=launcher.kill, args=(attempt.folder,), daemon=True).start()
            self._journal.write(lambda: sessions.delete_open_attempts(live.engine, live.row.id))
            return
        live.attempt = live.last_attempt = attempt
        live.recorded -= started.gone
        live.saved_step = restored.checkpoint[1].step if restored.checkpoint else 0
        live.is_attached = False
        self._failed.clear()
        self._watch(attempt)
        stage = attempt.row.stage
        lost = max(0, live.row.step - restored.step) if stage == live.row.stage else 0
        facts = {"attempt": attempt.name, "stage": stage, **restored.facts(), "lost_steps": lost}
        facts["standby"] = isinstance(started.process, ForkedShim)
        self._journal.note(EventKind.LAUNCHED, facts)
        columns: dict[str, Any] = {"stage": stage, "step": attempt.row.first_step}
        if stage != live.row.stage:
            columns |= {"steps_total": 0, "epochs_total": 0}
        session_id = live.row.id
        live.row = live.row._replace(**columns)
        self._journal.write(lambda: sessions.update_session(live.engine, session_id, **columns))

    def on_launch_failed(self, failed: LaunchFailed) -> None:
        self._failed[failed.tries] += 1
        count = self._failed[failed.tries]
        if count >= failed.tries:
            self._loop.dispatch(events.RetriesExhausted(failed.why))
            return
        self._journal.note(EventKind.LAUNCH_FAILED, {"why": failed.why, "tries": count})
        self._loop.set_timer("launch", AGAIN.after(count), self._loop.launch_again)

    def on_gone(self, attempt: LaunchedAttempt) -> None:
        if self._live.attempt is attempt:  # otherwise its end is recorded: we killed it
            self._ends.judge(attempt)

    def on_ended(self, ended: AttemptEnded) -> None:
        if self._live.attempt is not ended.attempt:
            return
        event = ended.event
        if ended.failed_by_itself and not isinstance(event, events.OutOfMemory | events.AttemptDiverged):
            self.forget_snapshot_of(ended.attempt)
        if isinstance(event, events.AttemptDiverged):
            facts = {"remedy": event.remedy, "why": event.cause, "change": dict(event.change)}
            self._journal.note(EventKind.REMEDIED, facts)
        self._loop.dispatch(event)

    def forget_snapshot_of(self, attempt: LaunchedAttempt) -> None:
        """One with which an attempt came to no step is not used again. In the verifier's thread: the next launch comes after it."""
        number, folder = attempt.from_snapshot, self._live.folder
        if number is not None and self._live.row.step <= attempt.row.first_step:
            self._checkpoints.verifier.submit(lambda: keeper_client.forget(folder, number))

    def end(self) -> None:
        """At the session's end, and waiting: nothing of it runs any more, and what it saved is verified."""
        live = self._live
        self._launcher.end()
        # The session may have ended between the start of an attempt and AttemptStarted: nobody would close that row.
        self._journal.write(lambda: sessions.delete_open_attempts(live.engine, live.row.id))
        self._saves.end(live.left_s())
        if attempt := self._live.last_attempt:
            self._checkpoints.verify_now(attempt)
            self.curves.import_now(attempt.row)

    def _watch(self, attempt: LaunchedAttempt) -> None:
        self._loop.allow_ranks(attempt.row.ranks)
        self._loop.set_timer("attach", ATTACH_S, lambda: self._warn_of_no_attach(attempt))

    def _warn_of_no_attach(self, attempt: LaunchedAttempt) -> None:
        """A script that does not attach trains unsaved: said once, while it can still be stopped."""
        if self._live.attempt is attempt and not self._live.is_attached:
            what = f"it has not called kgorch.attach() after {ATTACH_S:.0f} s: until then nothing can be saved"
            self._journal.note(EventKind.NOT_ATTACHED, {"stage": attempt.row.stage, "what": what})
