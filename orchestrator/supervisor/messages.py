"""What ranks, commands and the snapshot server say to a supervisor. Runs in its loop: each message is a few assignments, or is
handed on to a thread."""

from __future__ import annotations

from kgorch.core.codes import NOTED_BY_RANKS, EventKind, Reason
from kgorch.core.session import events, notification_policy
from kgorch.db.runs import now
from kgorch.launch import launcher, remedies, rungs
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.protocol.messages import (
    DeadlineUpdate,
    DeferredFile,
    Heartbeat,
    Hello,
    JournalEntry,
    Message,
    RankMetrics,
    RankProgress,
    RemedyApplied,
    Request,
    Response,
    RungApplied,
)
from kgorch.protocol.snapshot_messages import CheckpointWritten, SaveFailure
from kgorch.supervisor.attempts.hang_monitor import HangMonitor
from kgorch.supervisor.attempts.memory_monitor import MemoryMonitor
from kgorch.supervisor.checkpoint_records import CheckpointRecords
from kgorch.supervisor.live_session import LiveSession, SupervisorLoop
from kgorch.supervisor.recorder import Journal
from kgorch.system.sockets.control_socket import Reply


class MessageHandler:
    """Of one session. What comes from an attempt that is not the current one is dropped."""

    def __init__(
        self,
        loop: SupervisorLoop,
        live: LiveSession,
        journal: Journal,
        checkpoints: CheckpointRecords,
        monitors: tuple[HangMonitor, MemoryMonitor],
    ) -> None:
        self._loop, self._live, self._journal, self._checkpoints = loop, live, journal, checkpoints
        self._hangs, self._memory = monitors

    def handle(self, message: Message, reply: Reply) -> None:
        live = self._live
        match message:
            case Request(what, within_s):
                self._answer(what, within_s, reply)
            case CheckpointWritten():  # also of a dead attempt: the keeper writes what it left
                verifier = self._checkpoints.verifier
                verifier.submit(lambda: verifier.verify(message))
            case SaveFailure(attempt=name, rank=rank, error=error) if live.is_current(name):
                self._loop.dispatch(events.SaveFailed(f"rank {rank}: {error}" if rank >= 0 else error))
                self._checkpoints.make_room()
            case Hello(rank=0, attempt=name) if live.is_current(name):
                live.is_attached = True
                if message.ready:
                    self._loop.dispatch(events.Attached(message.state_bytes, message.stop_s))
                    self._checkpoints.check_room(message.state_bytes)
                reply(DeadlineUpdate(live.state.deadline_s))
            case _ if (attempt := live.attempt) and getattr(message, "attempt", None) == attempt.name:
                self._report(message, attempt)

    def _report(self, message: Message, attempt: LaunchedAttempt) -> None:
        match message:
            case Heartbeat():
                self._on_heartbeat(message)
            case RankMetrics():
                self._loop.add_rank_metrics(message)
            case RankProgress():
                self._hangs.on_progress(message)
                self._memory.on_progress(message)
            case JournalEntry(kind=kind, facts=facts) if kind in NOTED_BY_RANKS:
                self._journal.note(kind, dict(facts))
            case DeferredFile(name=name, content=content):
                attempt.deferred_files[name] = content
                self._journal.write(lambda: launcher.write_deferred_file(attempt.folder, name, content))
            case RungApplied():
                self._on_rung(attempt, message)
            case RemedyApplied():
                self._on_remedy(attempt, message)

    def _answer(self, what: str, within_s: float, reply: Reply) -> None:
        live = self._live
        match what:
            case "stop":
                self._loop.dispatch(events.StopRequested(Reason.USER))
            case "suspend":
                self._loop.dispatch(events.StopRequested(Reason.DAEMON, live.clock.now_s() + within_s))
            case "save":
                self._loop.dispatch(events.SaveRequested())
        reply(Response(what in ("stop", "suspend", "save", "ping"), live.state.phase.value))

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        live = self._live
        live.state = live.state.observing(gap_s=beat.gap_s, step_s=beat.step_s)
        # A further attempt of the stage knows the totals at its first step; a launch of another stage has reset them.
        is_new = live.attempt is not None and beat.step <= live.attempt.row.first_step
        known = (live.row.steps_total, live.row.epochs_total) if is_new else (0, 0)
        live.row = live.row._replace(
            epoch=beat.epoch,
            step=max(beat.step, live.saved_step),  # one that was long on its way says nothing new
            samples=beat.samples,
            step_s=beat.step_s,
            steps_total=beat.steps_total or known[0],
            epochs_total=beat.epochs_total or known[1],
            metrics=beat.metrics,
            save_lead_s=live.state.save_lead_s,
            heartbeat_at=live.clock.utc(),
        )
        self._loop.after_heartbeat()

    def _on_rung(self, attempt: LaunchedAttempt, applied: RungApplied) -> None:
        live, session_id, at = self._live, self._live.row.id, now()

        def write() -> None:
            rungs.record_applied(live.engine, live.run, session_id, attempt.scope, applied, at=at)
            self._memory.begin(attempt)

        self._journal.write(write)
        self._loop.notify(notification_policy.rung_notice(applied.rung, applied.why, applied.step, up=applied.up))

    def _on_remedy(self, attempt: LaunchedAttempt, applied: RemedyApplied) -> None:
        live, session_id, at = self._live, self._live.row.id, now()
        facts = {"remedy": applied.remedy, "why": applied.why, "change": dict(applied.change)}
        self._journal.note(EventKind.REMEDIED, facts)
        self._loop.notify(notification_policy.remedy_notice(applied.remedy, applied.why, live.row.step))
        self._journal.write(lambda: remedies.write(live.engine, live.run, session_id, attempt.row, applied, at))
