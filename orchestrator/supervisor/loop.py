"""The loop of a supervised session: take what happened, ask the lifecycle, hand the record to the journal, act.

Everything comes through one queue: messages of ranks and commands (control socket) and of the snapshot server (watcher), results
of the verifier's thread, events of the monitors, the time limits and the signals. Nothing in the loop waits for a database, a disk,
a process or a terminal: what may wait is done in a thread that posts its result (`AttemptLauncher`, `AttemptEnds`, `Duties`).
The loop itself sleeps until the next instant at which the lifecycle has something to say.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.checkpoint.verifier import Job
from kgorch.core.codes import EventKind, Phase, Reason
from kgorch.core.limits.wall import Wall
from kgorch.core.session import events, notification_policy
from kgorch.core.session import lifecycle as core
from kgorch.core.session.events import Event
from kgorch.core.session.lifecycle import Effect
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import checkpoints as checkpoint_rows
from kgorch.db import fleet, sessions
from kgorch.db.rows import SessionInfo
from kgorch.hardware import telemetry
from kgorch.launch import launcher
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.limits import quota_ledger
from kgorch.nodes.node_group import NodeGroup
from kgorch.protocol.messages import Command, DeadlineUpdate, Message, RankMetrics
from kgorch.protocol.node_messages import NodeMetrics
from kgorch.services import mirror, notifications, trackers
from kgorch.services.data_cache import DataCache
from kgorch.snapshots import keeper_client
from kgorch.supervisor.attempts import hang_monitor
from kgorch.supervisor.attempts.attempt_control import AttemptControl
from kgorch.supervisor.attempts.attempt_end import WRITTEN_S
from kgorch.supervisor.checkpoint_records import CheckpointRecords
from kgorch.supervisor.duties import Duties
from kgorch.supervisor.live_session import (
    KEEPER_S,
    AttemptEnded,
    AttemptGone,
    AttemptStarted,
    Input,
    LaunchFailed,
    LiveSession,
    NodesLost,
    OpenSession,
    Refined,
    RungOrdered,
    StacksCollected,
)
from kgorch.supervisor.messages import MessageHandler
from kgorch.supervisor.node_saves import NodeSaves
from kgorch.supervisor.observers import Listener, Observer, Observers
from kgorch.supervisor.recorder import Journal, Recorder, say
from kgorch.supervisor.refinement import Refinement
from kgorch.supervisor.run_forecast import ForecastRecorder
from kgorch.system import signals
from kgorch.system.clock import Clock, SystemClock
from kgorch.system.sockets.control_socket import ControlSocket, Reply
from kgorch.system.sockets.listener import raise_descriptor_limit

SLEEP_S = 5.0
"""Seconds that the loop sleeps at most. It waits on CLOCK_MONOTONIC, which stands still while the machine is suspended; deadlines
are instants of CLOCK_BOOTTIME, which does not."""

SIGTERM_GRACE_S = 25.0
"""What a SIGTERM leaves before SIGKILL: 30 s at torchrun, Slurm and Kubernetes by default, less five to end in."""

HANG_LOOK_S = 1.0


class Supervisor:
    """One session of one run, from opening or adopting it to its end.

    Args:
        observer: is shown the session's row after each change; for a live line of progress.
        listener: is told each event of the lifecycle. Both are called in a thread of their own.
    """

    def __init__(
        self,
        engine: Engine,
        opened: OpenSession,
        *,
        clock: Clock | None = None,
        observer: Observer = lambda _: None,
        listener: Listener = lambda _: None,
    ) -> None:
        run, plan = opened.run, opened.plan
        self._opened, self._queue = opened, queue.SimpleQueue[Job | Input]()
        self._journal = Journal(engine, run.id, opened.row.id)
        self._live = live = LiveSession(
            engine, run, plan, opened.row, opened.session, clock or SystemClock(), opened.claim.environ,
            recorded=checkpoint_rows.verified_paths(engine, run.id), nodes=self._node_group(opened),
            saved_step=opened.row.first_step,
            # of one that is taken over: its ranks may be gone before they say so again
            is_attached=opened.session.is_final or opened.session.phase in (Phase.TRAINING, Phase.SAVING, Phase.STOPPING),
        )  # fmt: skip
        self._clock = live.clock
        self._recorder = Recorder(live, self._journal, opened.walls.ledger)
        self._checkpoints = CheckpointRecords(live, self._journal, self.dispatch, self.post)
        self._saves = NodeSaves(live, self._checkpoints.verifier, self.post)
        self._attempts = AttemptControl(self, live, self._journal, (self._checkpoints, self._saves), opened.claim)
        self._refinement = Refinement(live, self._journal, (self._checkpoints, self._saves), self.post)
        self._forecasts = ForecastRecorder(engine, run, self._journal.note)
        self._observers = Observers(observer, listener, lambda error: self._note_bug(error, ""))
        self._journal.on_note = self._observers.tell
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self._sent_deadline_s: float | None = None
        self._sigint_count = self._signal_count = 0

    def _node_group(self, opened: OpenSession) -> NodeGroup:
        run = opened.run
        return NodeGroup(Path(run.folder), run.id, opened.plan.nodes, self._on_node_message, self._journal.note)

    def run(self) -> LifecycleState:
        """Until the session is over; what ran is gone then. Returns where it ended."""
        raise_descriptor_limit()
        live, note = self._live, self._journal.note
        workdir = Path(live.run.workdir)
        self._duties = Duties()
        self._mirror = self._checkpoints.mirror = mirror.of(live.engine, live.run, live.plan, note)
        self._trackers = trackers.of(live.run, live.plan.track, note)
        self._notices = notifications.Notifier(live.plan.notify, live.run.name, workdir, note)
        self._data = DataCache(live.plan.data, workdir, note, [stage.args for stage in live.plan.stage])
        self._sampler = telemetry.Sampler(
            live.engine, live.row.id, Path(live.run.checkpoints), note, self._on_sample, live.environ
        )
        messages = MessageHandler(
            self, live, self._journal, self._checkpoints, (self._attempts.hangs, self._attempts.memory)
        )
        self._channel = ControlSocket(live.folder / "control.sock", self._on_rank_message, post=self.post)
        self._messages = messages
        self._watcher = keeper_client.KeeperListener(live.folder, lambda message: self._on_node_message(message, 0))
        try:
            with signals.handlers(on_terminate=self._on_sigterm, on_interrupt=self._on_sigint):
                self._begin()
                while not live.state.phase.is_over:
                    self._turn()
                self._finish()
        finally:
            self._close()
        return live.state

    def _begin(self) -> None:
        live, opened = self._live, self._opened
        state, wall = live.state, None
        if state.wall_s is not None:
            wall = Wall(state.wall_s, state.wall_kind)
        opened.walls.watch(wall, self._clock, self._journal.note, self.post)
        if ledger := opened.walls.ledger:
            self._duties.every(quota_ledger.LOOK_S, ledger.look)
        if fleet.settings(live.engine):
            self._duties.every(fleet.lease_of(live.engine).total_seconds() / 5, self._renew_lease)
        self._duties.every(HANG_LOOK_S, lambda: self._attempts.hangs.look(self.post))
        if opened.adopted:
            self._attempts.adopt(opened.adopted)
            self.dispatch(events.Adopted())
        else:
            self.dispatch(events.SessionOpened())

    def _on_rank_message(self, message: Message, reply: Reply) -> None:
        self._saves.take(message, 0)
        self._messages.handle(message, reply)

    def _on_node_message(self, message: Message, node: int) -> None:
        """From any thread: what a keeper says, or a rank of another node."""
        if isinstance(message, NodeMetrics):
            self._sampler.add_node_metrics(node, message.values)
        elif not self._saves.take(message, node):
            self.post(lambda: self._messages.handle(message, lambda _: None))

    # The loop

    def _turn(self) -> None:
        """One input, or what is due."""
        now_s = self._clock.now_s()
        self._duties.follow_clock()
        for event in core.due(self._live.state, now_s):
            self._consider(event)
        for name in [name for name, (at_s, _) in self._timers.items() if now_s >= at_s]:
            self._guarded(self._timers.pop(name)[1])
        try:
            item = self._queue.get(timeout=self._sleep_s())
        except queue.Empty:
            return
        self._guarded(item if callable(item) else lambda: self._handle(item))

    def _sleep_s(self) -> float:
        instants = [at_s for at_s, _ in self._timers.values()]
        if (
            not self._refinement.is_busy
            and (due_s := core.next_due_s(self._live.state, self._live.clock.now_s())) is not None
        ):
            instants.append(due_s)
        return min([SLEEP_S, *(max(0.0, at_s - self._clock.now_s()) for at_s in instants)])

    def _guarded(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # our own bug; the training must not pay for it
            self._note_bug(error, traceback.format_exc())

    def _note_bug(self, error: Exception, text: str) -> None:
        say(text or repr(error))
        self._journal.note(EventKind.BUG, {"what": f"{type(error).__name__}: {error}"})

    def _handle(self, item: Input) -> None:
        live = self._live
        match item:
            case events.Hung() if live.state.phase not in core.CAN_HANG:
                pass  # it was seen to hang just before it was asked to stop
            case events.WallMoved() if live.state.phase.is_over:
                pass
            case Event():
                self.dispatch(item)
            case Refined():
                if event := self._refinement.conclude(item):
                    self.dispatch(event)
            case AttemptStarted():
                self._attempts.on_started(item)
                self._observers.show(live.row)
            case LaunchFailed():
                self._attempts.on_launch_failed(item)
            case NodesLost(why):
                say(f"kgorch: {why}; the run goes on when they are there")
                self.dispatch(events.StopRequested(Reason.LOST))
            case AttemptGone() | AttemptEnded() if self._refinement.is_killing:
                pass
            case AttemptGone(attempt, step):
                live.row = live.row._replace(step=max(live.row.step, step))
                self._attempts.on_gone(attempt)
            case AttemptEnded():
                self._attempts.on_ended(item)
            case StacksCollected(attempt, cause, facts):
                self._journal.note(EventKind.STACKS, dict(facts))
                if live.attempt is attempt and live.state.phase is Phase.DIAGNOSING:
                    self._attempts.forget_snapshot_of(attempt)
                    self._consider(events.Diagnosed(cause))
            case RungOrdered(order, facts) if live.state.phase in (Phase.TRAINING, Phase.SAVING):
                self._journal.note(EventKind.MEMORY_WATCH, dict(facts))
                self._channel.broadcast(Command(order))

    def _consider(self, event: Event) -> None:
        if refined := self._refinement.refine(event):
            self.dispatch(refined)

    def launch_again(self) -> None:
        if self._live.state.phase.is_launching:
            self._attempts.launch(self._data)

    def allow_ranks(self, ranks: int) -> None:
        self._channel.allow_ranks(ranks)

    def dispatch(self, event: Event) -> None:
        """Move the session by one event: record it, act, tell."""
        live = self._live
        before = replace(live.state, step=live.row.step, saved_step=live.saved_step)
        try:
            move = core.advance(before, event, self._clock.now_s())
        except core.IllegalTransition as error:
            self._journal.note(EventKind.EVENT_IGNORED, {"event": event.kind, "why": str(error)})
            return
        event, attempt, live.state = move.event, live.attempt, move.session
        if move.record.outcome and attempt:
            self._attempts.hangs.remember()
        self._recorder.record(move)
        for effect in move.effects:
            self._perform(effect, event, attempt)
        self.notify(notification_policy.notice_of(event, live.state, number=live.row.number))
        self._send_deadline()
        self._observers.tell(event)
        self._observers.show(live.row)

    def _perform(self, effect: Effect, event: Event, attempt: LaunchedAttempt | None) -> None:
        live = self._live
        match effect:
            case Effect.LAUNCH:
                self._attempts.launch(self._data)
            case Effect.ASK_TO_SAVE:
                self._channel.broadcast(Command("save"))
            case Effect.ASK_TO_STOP:
                self._channel.broadcast(Command("stop", live.state.why, live.state.wall_s))
            case Effect.PERSIST_SNAPSHOT:
                _in_background(lambda: self._saves.persist(KEEPER_S))
            case Effect.COLLECT_STACKS if attempt and isinstance(event, events.Hung):
                _in_background(lambda: self.post(hang_monitor.collect_stacks(attempt, event, live.nodes)))
            case Effect.KILL_ATTEMPT if (folder := live.processes) and not live.state.phase.is_over:
                live.nodes.kill()
                _in_background(lambda: launcher.kill(folder))  # at a session's end `_finish` does, and waits

    # The end

    def _finish(self) -> None:
        """All that ran for the session ends; what is newer than the disk is written first, as far as the wall allows."""
        live = self._live
        self._attempts.end()
        if (why := core.why_after(live.state, live.saved_step)) != live.state.why:
            live.state = replace(live.state, why=why)
            self._journal.write(lambda: sessions.update_session(live.engine, live.row.id, why=why))
        if live.state.phase is not Phase.FINISHED:  # by an early stop, perhaps: steps that are left will never be done
            self._journal.write(lambda: self._forecasts.record(live.row, is_live=False))
        self._finish_mirror_and_trackers()
        self._finish_notices()

    def _finish_mirror_and_trackers(self) -> None:
        """What they do not have yet gets a while of what is left before the wall, both at once; any signal ends it."""
        if not (self._mirror or self._trackers):
            return
        before, now_s = self._signal_count, self._clock.now_s()
        wall_s, margin_s = self._live.state.wall_s, self._live.state.margin_s
        latest_s = math.inf if wall_s is None else wall_s - margin_s
        self._journal.flush(self._live.left_s(WRITTEN_S))
        if self._trackers:
            self._trackers.hurry()
        if self._mirror:
            self._mirror.wake(now=True)
            self._wait_while(
                lambda: self._mirror is not None and self._mirror.is_busy, min(now_s + mirror.END_S, latest_s), before
            )
        if self._trackers:
            self._wait_while(
                lambda: self._trackers is not None and self._trackers.is_busy,
                min(now_s + trackers.END_S, latest_s),
                before,
            )

    def _finish_notices(self) -> None:
        """Notices of the end get a moment; any signal ends it. Half of the margin stays, all else is done by then; where the wall
        is nearer than the margin, as after a SIGTERM, half of what is left."""
        state, before, for_s = self._live.state, self._signal_count, notifications.END_S
        if state.wall_s is not None:
            left_s = state.wall_s - self._clock.now_s()
            for_s = min(for_s, max(left_s - state.margin_s / 2, left_s / 2))
        self._notices.hurry()
        self._wait_while(lambda: self._notices.is_busy, self._clock.now_s() + for_s, before)

    def _wait_while(self, is_busy: Callable[[], bool], until_s: float, signal_count: int) -> None:
        """Handle inputs meanwhile, until a signal comes."""
        while is_busy() and self._clock.now_s() < until_s and self._signal_count == signal_count:
            self.set_timer("end", 0.1, lambda: None)
            self._turn()

    def _close(self) -> None:
        live = self._live
        self._opened.walls.stop()
        self._duties.stop()
        for service in (self._notices, self._sampler, self._data, self._mirror, self._trackers):
            if service:
                service.stop()
        live.nodes.close()
        self._saves.close()
        self._channel.close()
        self._watcher.close()
        self._recorder.close(live.left_s(WRITTEN_S))
        self._checkpoints.verifier.close()  # the journal's last entries have it delete what may go
        self._observers.close()

    # Small parts

    def post(self, item: Job | Input) -> None:
        self._queue.put(item)

    def add_rank_metrics(self, metrics: RankMetrics) -> None:
        self._sampler.add_rank_metrics(metrics)

    def set_timer(self, name: str, in_s: float, then: Callable[[], None]) -> None:
        self._timers[name] = (self._clock.now_s() + in_s, then)

    def _on_sample(self, sample: Mapping[str, float]) -> None:
        """In the sampler's thread."""
        self._attempts.memory.look(sample, self.post)
        self._data.consider(sample)

    def after_heartbeat(self) -> None:
        live, attempt = self._live, self._live.attempt
        if attempt:
            row = live.row
            self._journal.refresh("beat", lambda: self._write_heartbeat(row, attempt))
            self._attempts.curves.submit_if_due(attempt.row)
        self._send_deadline()
        self._observers.show(live.row)

    def _write_heartbeat(self, row: SessionInfo, attempt: LaunchedAttempt) -> None:
        """In the journal's thread."""
        if self._live.attempt is not attempt:
            return  # its end is written down, or waits before this
        names = ("epoch", "step", "samples", "step_s", "steps_total", "epochs_total", "save_lead_s")
        figures = {name: getattr(row, name) for name in names}
        sessions.record_heartbeat(self._live.engine, row.id, attempt.row.id, **figures, metrics=dict(row.metrics))
        self._forecasts.on_heartbeat(row)

    def notify(self, notice: notification_policy.Notice | None) -> None:
        if notice:
            row = self._live.row
            self._notices.tell(notice, session=row.number, stage=row.stage, step=row.step, metrics=dict(row.metrics))

    def _send_deadline(self) -> None:
        """Ranks watch the deadline themselves, a little later than we do, should we be dead by then."""
        at_s, sent_s = self._live.state.deadline_s, self._sent_deadline_s
        if at_s != sent_s and (at_s is None or sent_s is None or abs(at_s - sent_s) > 0.05):
            self._sent_deadline_s = at_s
            self._channel.broadcast(DeadlineUpdate(at_s))
            self._live.nodes.broadcast(DeadlineUpdate(at_s))

    def _renew_lease(self) -> None:
        """A periodic duty in a fleet. Where another machine has ended the session meanwhile, this one stops at once."""
        with contextlib.suppress(SQLAlchemyError):  # an outage: the others wait for a lease after it
            if not fleet.renew_session(self._live.engine, self._live.row.id) and not self._live.state.phase.is_over:
                self.post(events.StopRequested(Reason.LOST, self._clock.now_s()))

    def _on_sigterm(self) -> None:
        """Of the platform. No source of time limits reports this wall: after a stop they only come nearer."""
        self._signal_count += 1
        self.post(events.StopRequested(Reason.SIGTERM, self._clock.now_s() + SIGTERM_GRACE_S))

    def _on_sigint(self) -> None:
        """Ctrl-C: save and stop; twice: stop at once."""
        self._sigint_count, self._signal_count = self._sigint_count + 1, self._signal_count + 1
        wall_s = None if self._sigint_count == 1 else self._clock.now_s()
        self.post(events.StopRequested(Reason.USER, wall_s))


def _in_background(job: Callable[[], object]) -> None:
    threading.Thread(target=job, name="effect", daemon=True).start()
