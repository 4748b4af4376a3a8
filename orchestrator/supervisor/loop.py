"""The only loop: take what happened, ask the core, hand it to the journal to be written, do it.

Everything comes through one queue: what ranks and command line say (channel), what the keeper has saved (watcher), that
an attempt's processes are gone (a thread that waits on their lock), results of the reader (one thread that reads
checkpoints back), the scheduler's wake-ups at the next instant on which the core will have something to say, and signals.
The loop looks at the clock at least twice a second besides, so that no step of the wall clock, on which the scheduler
hangs, moves a deadline.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import checkpoints as checkpoint_rows
from db import runs, sessions
from db.records import RunInfo, SessionInfo
from orchestrator.checkpoint import registry
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.verifier import Job, Verifier
from orchestrator.core import lifecycle as core
from orchestrator.core import notification_policy as core_notices
from orchestrator.core.codes import NOTED_BY_RANKS, CheckpointState, EventKind, Outcome, Phase, Reason
from orchestrator.core.lifecycle import Event, Session
from orchestrator.core.wall import Wall, has_moved
from orchestrator.errors import CheckpointUnreadable, KgorchError
from orchestrator.hardware import devices, telemetry
from orchestrator.hardware.gpu_locks import GpuLocks
from orchestrator.launch import attempts, launcher, remedies, rungs, stack_dumps
from orchestrator.launch.attempts import Running
from orchestrator.limits.wall_sources import Walls
from orchestrator.plan import Plan, StageSection
from orchestrator.protocol.messages import (
    Command,
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
from orchestrator.protocol.snapshot_messages import CheckpointWritten, SaveFailure
from orchestrator.services import mirror, notifications
from orchestrator.services.data_cache import DataCache
from orchestrator.snapshots import keeper_client
from orchestrator.supervisor import ending_files, hang_monitor, metric_curves
from orchestrator.supervisor.memory_monitor import MemoryWatch
from orchestrator.supervisor.recorder import Journal, say
from orchestrator.supervisor.run_forecast import Foreteller
from orchestrator.system import signals
from orchestrator.system.clock import Clock, SystemClock
from orchestrator.system.sockets.control_socket import ControlSocket, Reply
from orchestrator.system.sockets.listener import raise_descriptor_limit

LOOK_S = 0.5
SIGTERM_GRACE_S = 25.0
"""What a SIGTERM leaves before SIGKILL: 30 s at torchrun, Slurm and Kubernetes by default, less five to end in."""

KEEPER_S = 120.0
"""How long a session without a wall waits at its end for the keeper's disk."""

FLUSH_S, WRITTEN_S = 1.0, 60.0
"""How long the loop, and a thread beside it, wait for the journal before they read what it writes."""

ATTACHES_S = 60.0
"""After so long a script that has not attached is told of; imports of a slow disk are over by then."""

LAUNCH_TRIES, LAUNCH_AGAIN_S = 12, 5.0
"""A launch that the disk or the database does not allow just now is tried again for a minute."""

OUTCOMES: dict[type[Event], Outcome] = {
    core.StageFinished: Outcome.FINISHED,
    core.RunFinished: Outcome.FINISHED,
    core.AttemptSuspended: Outcome.SUSPENDED,
    core.ExitOverdue: Outcome.SUSPENDED,
    core.AttemptUnsaved: Outcome.UNSAVED,
    core.AttemptCrashed: Outcome.CRASHED,
    core.OutOfMemory: Outcome.OUT_OF_MEMORY,
    core.Unwell: Outcome.DIVERGED,
    core.RetriesExhausted: Outcome.CRASHED,
    core.Diagnosed: Outcome.HUNG,
    core.SessionLost: Outcome.LOST,
}

Observer = Callable[[SessionInfo], None]
Listener = Callable[[Event], None]


class Supervisor:
    """One session of one run, from opening or adopting it to its end.

    Args:
        row: the session's row, just opened, or a living one to adopt.
        session: where the core shall begin.
        observer: is shown the session's row after each change; for a live line of progress.
        listener: is told each event once it is written down.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunInfo,
        plan: Plan,
        row: SessionInfo,
        session: Session,
        *,
        walls: Walls | None = None,
        claim: GpuLocks | None = None,
        clock: Clock | None = None,
        observer: Observer = lambda _: None,
        listener: Listener = lambda _: None,
    ) -> None:
        self._walls, self._claim = walls or Walls(), claim or GpuLocks()
        self._engine, self._run, self._plan, self._row, self._session = engine, run, plan, row, session
        self._clock, self._observer, self._listener = clock or SystemClock(), observer, listener
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._journal = Journal(engine, run.id, row.id)
        if self._walls.ledger:
            self._walls.ledger.look_beside = lambda look: self._journal.refresh("quota", look)
        self._reader = Verifier(run, self, self._post)
        self._curves = metric_curves.Import(engine, self._reader.submit, self._journal.write)
        self._hangs = hang_monitor.Hangs(engine, run.id, plan.health.hang_s, self._journal.note)
        self._room = MemoryWatch(engine, run, plan)
        self._foreteller = Foreteller(engine, run, self._journal.note)
        self._attempt: Running | None = None
        self._last: Running | None = None  # the same, also once it has ended
        self._processes: Path | None = None  # the folder of the attempt that was started or adopted last
        self._known = self._written_down()
        self._memory = devices.GpuMemoryBaseline()
        self._told_s: float | None = None
        self._alarm_s: float | None = None
        self._again_s: float | None = None  # when a launch that failed is tried again
        self._attached = False
        self._watched_s = 0.0  # since when that attempt is ours to watch
        self._warned_of = ""  # the attempt that was said not to have attached
        self._saved_step = row.first_step  # the newest step of the stage that is on disk
        self._interrupts = self._signals = self._launch_tries = 0
        self._end: dict[str, Any] | None = None  # what is written down of the session's end
        self._wall = None if session.wall_s is None else Wall(session.wall_s, session.wall_kind)

    @property
    def folder(self) -> Path:
        return Path(self._run.folder)

    def run(self, adopted: Running | None = None) -> Session:
        """Until the session is over; what ran is gone then. Returns where it ended."""
        raise_descriptor_limit()
        self._channel = ControlSocket(self.folder / "control.sock", self._hear, post=self._post)
        self._watcher = keeper_client.Watcher(
            self.folder, lambda message: self._queue.put(lambda: self._hear(message, lambda _: None))
        )
        self._scheduler = BackgroundScheduler(timezone="UTC", daemon=True)
        self._scheduler.start()
        self._mirror = mirror.of(self._engine, self._run, self._plan)
        self._notices = notifications.Notices(self._plan.notify, self._run.name, Path(self._run.workdir))
        self._data = DataCache(self._plan.data, Path(self._run.workdir), [stage.args for stage in self._plan.stage])
        self._sampler = telemetry.Sampler(self._engine, self._row.id, Path(self._run.checkpoints))
        try:
            with signals.handlers(on_terminate=self._platform_ends_us, on_interrupt=self._person_interrupts):
                if adopted:
                    self._attempt = self._last = adopted
                    self._saved_step = self._newest_saved(adopted.row.stage)
                    self._begun(adopted)
                    self._watch(adopted, None)
                self._happened(core.Adopted() if adopted else core.SessionOpened())
                while not self._session.phase.is_over:
                    self._turn()
                self._end_processes()
                self._journal.write(lambda: self._foreteller.tell(self._row, lives=False))
                self._finish_mirroring()
                self._finish_telling()
        finally:
            self._walls.stop()
            self._notices.stop()
            self._sampler.stop()
            self._data.stop()
            if self._mirror:
                self._mirror.stop()
            self._hear_threads()
            self._reader.close()
            self._scheduler.shutdown(wait=False)
            self._channel.close()
            self._watcher.close()
            self._finish_writing()
        return self._session

    def _end_processes(self) -> None:
        """All that ran for the session; what is newer than the disk is written first, as far as the wall allows."""
        if self._processes:
            launcher.kill(self._processes)
        keeper_client.end(self.folder, timeout_s=self._left_s())
        if self._last:
            self._reader.verify_unrecorded_now(self._root(self._last))
            self._curves.read(self._last.row)

    def _finish_writing(self) -> None:
        """As long as the wall allows. What the database does not take by then is left beside it, for who settles the session."""
        left_s = WRITTEN_S if self._session.wall_s is None else self._session.wall_s - self._clock.now_s()
        if not self._journal.close(min(max(left_s, core.LAST_WORDS_S), WRITTEN_S)) and self._end:
            with contextlib.suppress(OSError):
                ending_files.write(self.folder, self._row.number, self._end)

    def _left_s(self) -> float:
        """Until the wall, for a wait that must not last longer."""
        wall_s = self._session.wall_s
        return KEEPER_S if wall_s is None else min(max(wall_s - self._clock.now_s(), core.LAST_WORDS_S), KEEPER_S)

    def _turn(self) -> None:
        self._watch_walls()
        for event in core.due(self._session, self._clock.now_s()):
            self._happened(self._weighed(event))
        if self._attempt and (hung := self._hangs.look(self._clock.now_s())) and self._session.phase in core.CAN_HANG:
            self._happened(hung)
        self._watch_memory()
        self._watch_launch()
        self._watch_attach()
        self._set_alarm()
        self._hear_threads()
        try:
            job = self._queue.get(timeout=LOOK_S)
        except queue.Empty:
            return
        self._try(job)

    def _try(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # our own bug; the training must not pay for it
            say(traceback.format_exc())
            self._journal.note(EventKind.BUG, {"what": f"{type(error).__name__}: {error}"})

    def _watch_walls(self) -> None:
        """SIGTERM's wall (core.StopRequested) is none of these: after a stop they only come nearer."""
        now = self._walls.nearest(self._clock.now_s())
        if has_moved(self._wall, now) and not self._session.phase.is_over:
            self._wall = now
            self._happened(core.WallMoved(now))

    def _watch_launch(self) -> None:
        if self._again_s is not None and self._clock.now_s() >= self._again_s:
            self._again_s = None
            if self._session.phase in (Phase.STARTING, Phase.RECOVERING):
                self._launch()

    def _watch_attach(self) -> None:
        """A script that does not attach trains unsaved: said once, while it can still be stopped."""
        attempt = self._attempt
        if attempt is None or self._attached or attempt.name == self._warned_of or self._session.phase.is_over:
            return
        since_s = self._clock.now_s() - self._watched_s
        if since_s >= ATTACHES_S:
            self._warned_of = attempt.name
            what = (
                f"it has not called orchestrator.worker.attach() after {since_s:.0f} s: until then nothing can be saved"
            )
            self._journal.note(EventKind.NOT_ATTACHED, {"stage": attempt.row.stage, "what": what})

    def _watch_memory(self) -> None:
        if self._session.phase in (Phase.TRAINING, Phase.SAVING):
            order, facts = self._room.look(self._sampler.latest(), self._clock.now_s())
            if order:
                self._journal.note(EventKind.MEMORY_WATCH, facts)
                self._channel.broadcast(Command(order))

    def _rung_taken(self, attempt: Running, told: RungApplied) -> None:
        def write() -> None:
            rungs.heard(self._engine, self._run, self._row.id, attempt.place, told)
            self._post(lambda: self._room.changed(attempt, self._clock.now_s()))

        self._journal.write(write)
        self._tell_people(core_notices.rung_taken(told.rung, told.why, told.step, up=told.up))

    def _begun(self, attempt: Running) -> None:
        """What watches an attempt begins anew with it."""
        self._channel.allow_ranks(attempt.row.ranks)
        with contextlib.suppress(SQLAlchemyError):
            self._room.changed(attempt, self._clock.now_s())
            self._hangs.launched(attempt, self._clock.now_s())

    def _weighed(self, event: Event) -> Event:
        """Look twice: at a wall that came before training for the third time, at a stop that seems to have saved nothing, at a hang
        that is one too many."""
        if isinstance(event, core.Diagnosed) and self._attempt:
            return self._attempt.hung(event, self._row.step)
        if isinstance(event, core.DeadlineReached) and self._attempt and self._session.phase is Phase.STARTING:
            return self._without_a_step(event, self._attempt)
        if isinstance(event, core.GraceExpired) and self._attempt:
            launcher.kill(self._attempt.folder)
            self._reader.verify_unrecorded_now(
                self._root(self._attempt)
            )  # the keeper may have saved and not come to tell
            event = next(core.due(self._session, self._clock.now_s()), event)
        return core.in_vain(self._session, event) or event

    def _without_a_step(self, event: core.DeadlineReached, attempt: Running) -> Event:
        """A session is over before its first step. Once may be chance; a second time in a row the third would do no better."""
        if attempt.row.number > 1:  # a stage before it was finished, or it has crashed: that is told already
            return event
        look_s = min(2.0, 0.5 * self._left_s())
        found = [] if self._attached else stack_dumps.dumped(attempt.folder, attempt.row.ranks, look_s)
        where = next((f"; rank {stack.rank} is at {stack}" for stack in found if stack.frames), "")
        waits = "its first step took longer" if self._attached else "the script had not attached"
        took_s = (self._clock.utc() - attempt.row.started_at).total_seconds()
        cause = f"the wall came before the first step: {waits}, {took_s:.0f} s after its launch{where}"
        self._journal.note(EventKind.NO_STEP, {"attempt": attempt.name, "why": cause})
        repeats = (
            self._session.wall_kind is Reason.TIME_LIMIT and attempt.without_progress > 0
        )  # a spot notice may come at any time
        return core.RetriesExhausted(f"{cause}; the attempt before it came to no step either") if repeats else event

    # What happens

    def _happened(self, event: Event) -> None:
        """Ask the core, hand phase and event to the journal as one transaction, act."""
        try:
            self._session, actions = core.advance(self._session, event, self._clock.now_s())
        except core.IllegalTransition as error:
            self._journal.note(EventKind.EVENT_IGNORED, {"event": event.kind, "why": str(error)})
            return
        self._write_down(event, actions)
        for action in actions:
            self._act(action, event)
        self._tell_people(core_notices.of(event, self._session, number=self._row.number))
        self._tell_deadline()
        self._try(lambda: self._listener(event))
        self._show()

    def _tell_people(self, notice: core_notices.Notice | None) -> None:
        if notice:
            row = self._row
            figures = {"stage": row.stage, "step": row.step, "metrics": dict(row.metrics)}
            self._notices.tell(notice, session=row.number, **figures)

    def _write_down(self, event: Event, actions: tuple[core.Action, ...]) -> None:
        """One transaction: phase, figures, event, and the resume that it queues."""
        facts = {
            name: value for name in getattr(event, "__slots__", ()) if (value := getattr(event, name)) not in (None, "")
        }
        if isinstance(event, core.WallMoved):  # a reading of a clock is not kept
            wall_at = self._wall_at()
            facts = {"wall_at": wall_at and wall_at.isoformat(), "wall": self._session.wall_kind}
        if self._session.phase is Phase.CUT_OFF and (lost := self._row.step - self._saved_step) > 0:
            facts |= {"lost_steps": lost, "lost_s": round(lost * self._row.step_s, 3), "saved_step": self._saved_step}
            since = f"{lost} steps since step {self._saved_step} are lost"
            self._session = replace(self._session, why=f"{self._session.why}; {since}")
        columns: dict[str, Any] = {
            "reason": self._session.reason,
            "why": self._session.why,
            "lead_s": self._session.lead_s,
            "boot_wall_s": self._session.wall_s,
            "wall_kind": self._session.wall_kind,
            "wall_at": self._wall_at(),
        }
        kind, phase = event.kind, self._session.phase
        resume = next((self._queued(action) for action in actions if isinstance(action, core.QueueResume)), None)
        self._row = self._row._replace(phase=phase, **columns)
        outcome = OUTCOMES.get(type(event)) or (Outcome.TIME_LIMIT if self._session.phase.is_over else None)
        if outcome and self._session.is_stopped_by_user and outcome in (Outcome.SUSPENDED, Outcome.TIME_LIMIT):
            outcome = Outcome.STOPPED
        closes = self._end_attempt(outcome, getattr(event, "cause", "")) if outcome else None
        entry = {"kind": kind, "phase": phase, "facts": facts, "resume": resume, "closes": closes, **columns}
        if self._session.phase.is_over:  # its last beat may not have been written
            entry |= {"epoch": self._row.epoch, "step": self._row.step, "samples": self._row.samples}
            self._end = entry
        self._journal.write(lambda: sessions.record(self._engine, self._run.id, self._row.id, **entry))

    def _queued(self, action: core.QueueResume) -> dict[str, Any]:
        ledger, due_at = self._walls.ledger, self._clock.utc()
        if ledger and not action.when_asked:
            with contextlib.suppress(SQLAlchemyError):  # who comes too early looks again
                return {
                    "reason": action.reason,
                    "why": action.why,
                    "due_at": ledger.resume_at(self._session.lead_s, on_quota=action.on_quota),
                }
        return {"reason": action.reason, "why": action.why, "due_at": None if action.when_asked else due_at}

    def _act(self, action: core.Action, event: Event) -> None:
        match action:
            case core.Launch():
                self._launch()
            case core.AskToSave():
                self._channel.broadcast(Command("save"))
            case core.AskToStop(why):
                self._channel.broadcast(Command("stop", why))
            case core.RescueSnapshot():
                threading.Thread(
                    target=keeper_client.persist, args=(self.folder,), kwargs={"timeout_s": KEEPER_S}, daemon=True
                ).start()
            case core.CollectStacks() if self._attempt and isinstance(event, core.Hung):
                attempt = self._attempt
                self._hangs.diagnose(
                    attempt, event, lambda cause, facts: self._post(lambda: self._diagnosed(attempt, cause, facts))
                )
            case core.KillAttempt() if self._processes:
                launcher.kill(self._processes)

    def _diagnosed(self, attempt: Running, cause: str, facts: dict[str, Any]) -> None:
        self._journal.note(EventKind.STACKS, facts)
        if self._attempt is attempt and self._session.phase is Phase.DIAGNOSING:
            self._forget_snapshot_of(attempt)
            self._happened(self._weighed(core.Diagnosed(cause)))

    def _launch(self) -> None:
        """In three steps, for the second reads gigabytes: choose the stage, find its checkpoint (reader), start."""
        if not self._journal.flush(FLUSH_S):  # that a stage is finished, that memory ran out
            self._launch_later("the database cannot be written")
            return
        try:
            todo = attempts.open_stages(self._engine, self._run, self._plan)
        except (OSError, SQLAlchemyError) as error:
            self._launch_later(f"an attempt could not be prepared: {error}")
            return
        if not todo:
            self._post(lambda: self._happened(core.RunFinished()))
            return

        def look() -> None:
            try:
                if self._processes and not launcher.kill(self._processes):  # what it had started may have outlived it
                    raise OSError(f"processes of {self._processes} do not end")
                if held := self._memory.wait_until_released():
                    self._post(lambda: self._journal.note(EventKind.MEMORY_NOT_GONE, {"what": held}))
                found = attempts.newest_state(self._engine, self._run, todo[0].name, self._reader.skipped)
            except Exception as error:
                hopeless = isinstance(error, KgorchError) and not isinstance(error, CheckpointUnreadable)
                again = self._fail if hopeless else self._launch_later
                self._post(lambda why=str(error): again(why))  # type: ignore[misc]
            else:
                self._post(lambda: self._start(todo[0], found))

        self._reader.submit(look)

    def _start(self, stage: StageSection, found: attempts.Found) -> None:
        if self._session.phase not in (Phase.STARTING, Phase.RECOVERING):
            return  # stopped meanwhile
        try:
            self._claim.check()
            self._known &= self._written_down()  # what the journal has not written yet is known besides
            attempt, launch = attempts.prepare(
                self._engine, self._run, self._plan, self._row, self._session, stage, found, self._data
            )
            process = launcher.start(launch, self._claim.descriptors)
        except Exception as error:  # whatever it is: a session that waits for nothing would be worse
            session_id = self._row.id
            self._journal.write(lambda: sessions.drop_open_attempts(self._engine, session_id))
            self._launch_later(f"an attempt could not be started: {type(error).__name__}: {error}")
            return
        self._attempt = attempt
        self._watch(attempt, process)
        self._attached, self._launch_tries, self._last = False, 0, self._attempt
        self._begun(self._attempt)
        self._saved_step = found.checkpoint[1].step if found.checkpoint else 0
        lost = max(0, self._row.step - found.step) if stage.name == self._row.stage else 0
        self._journal.note(
            EventKind.LAUNCHED, {"attempt": self._attempt.name, "stage": stage.name, **found.said(), "lost_steps": lost}
        )
        begun: dict[str, Any] = {
            "stage": stage.name,
            "step": self._attempt.row.first_step,
            "steps_total": 0,
            "epochs_total": 0,
        }
        self._row = self._row._replace(**begun)
        self._journal.write(lambda: sessions.update_session(self._engine, self._row.id, **begun))
        self._show()

    def _fail(self, why: str) -> None:
        self._happened(core.RetriesExhausted(why))

    def _launch_later(self, why: str) -> None:
        self._launch_tries += 1
        self._journal.note(EventKind.LAUNCH_FAILED, {"why": why, "tries": self._launch_tries})
        if self._launch_tries >= LAUNCH_TRIES:
            self._post(lambda: self._happened(core.RetriesExhausted(why)))
            return
        self._again_s = self._clock.now_s() + LAUNCH_AGAIN_S

    def _watch(self, attempt: Running, process: subprocess.Popen[bytes] | None) -> None:
        self._processes, self._watched_s = attempt.folder, self._clock.now_s()

        def until_gone() -> None:
            launcher.wait(attempt.folder)
            if process is not None:
                process.wait()
            self._reader.submit(lambda: self._judge(attempt))

        threading.Thread(target=until_gone, name=f"wait-{attempt.name}", daemon=True).start()

    # What is heard

    def _hear(self, message: Message, reply: Reply) -> None:
        match message:
            case Request(what, within_s):
                self._asked(what, within_s, reply)
            case Hello(rank=0, attempt=attempt) if self._is_current(attempt):
                self._attached = True
                if message.ready:
                    self._happened(core.Attached(message.state_bytes))
                    self._look_for_room(message.state_bytes)
                reply(DeadlineUpdate(self._session.deadline_s))
            case Heartbeat(attempt=attempt) if self._is_current(attempt):
                self._beat(message)
            case RankMetrics(attempt=attempt) if self._is_current(attempt):
                self._sampler.add_rank_metrics(message)
                self._data.consider(self._sampler.latest())
            case RankProgress(attempt=attempt) if self._is_current(attempt):
                self._hangs.heard(message, self._clock.now_s())
                self._room.heard(message)
            case CheckpointWritten():  # of the dead, too: the keeper writes what they left
                self._reader.submit(lambda: self._reader.verify(message))
            case JournalEntry(attempt=attempt, kind=kind, facts=facts) if (
                self._is_current(attempt) and kind in NOTED_BY_RANKS
            ):
                self._journal.note(kind, dict(facts))
            case DeferredFile(attempt=attempt) if self._attempt and self._is_current(attempt):
                self._write_late(self._attempt, message)
            case RungApplied(attempt=attempt) if self._attempt and self._is_current(attempt):
                self._rung_taken(self._attempt, message)
            case RemedyApplied(attempt=attempt) if self._attempt and self._is_current(attempt):
                self._remember(self._attempt, message)
            case SaveFailure(attempt=attempt, rank=rank, error=error) if self._is_current(attempt):
                self._happened(core.SaveFailed(f"rank {rank}: {error}" if rank >= 0 else error))

    def _look_for_room(self, state_bytes: int) -> None:
        """A training whose first save cannot fit would be lost with its session."""
        if self._session.phase.is_over or self._known:
            return
        root = Path(self._run.checkpoints)
        if (free_bytes := registry.disk_free_bytes(root)) < state_bytes:
            self._happened(core.RetriesExhausted(registry.no_room_message(root, state_bytes, free_bytes)))

    def _asked(self, what: str, within_s: float, reply: Reply) -> None:
        if what == "stop":
            self._happened(core.StopRequested(Reason.USER))
        elif what == "suspend":
            self._happened(core.StopRequested(Reason.DAEMON, self._clock.now_s() + within_s))
        elif what == "save":
            self._happened(core.SaveRequested())
        reply(Response(what in ("stop", "suspend", "save", "ping"), self._session.phase.value))

    def _beat(self, beat: Heartbeat) -> None:
        self._session = self._session.observing(gap_s=beat.gap_s, step_s=beat.step_s)
        self._row = self._row._replace(
            epoch=beat.epoch,
            step=max(beat.step, self._saved_step),  # one that was long on its way tells nothing that is not known
            samples=beat.samples,
            step_s=beat.step_s,
            steps_total=beat.steps_total,
            epochs_total=beat.epochs_total,
            metrics=beat.metrics,
            lead_s=self._session.lead_s,
            beat_at=self._clock.utc(),
        )
        row, attempt = self._row, self._attempt
        if attempt:
            self._journal.refresh("beat", lambda: self._write_beat(row, attempt))
            self._curves.look(attempt.row)
        self._tell_deadline()
        self._show()

    def _write_beat(self, row: SessionInfo, attempt: Running) -> None:
        if self._attempt is not attempt:
            return  # its end is written down, or waits before this
        names = ("epoch", "step", "samples", "step_s", "steps_total", "epochs_total", "lead_s")
        figures = {name: getattr(row, name) for name in names}
        sessions.beat(self._engine, row.id, attempt.row.id, **figures, metrics=dict(row.metrics))
        self._foreteller.beat(row)

    def _is_current(self, attempt: str) -> bool:
        return self._attempt is not None and attempt == self._attempt.name

    def _judge(self, attempt: Running) -> None:
        """In the reader: an attempt's processes are gone. Take in what it saved and nobody told of, then how it ended."""
        try:
            if self._session.phase is Phase.STOPPING:
                keeper_client.persist(self.folder, timeout_s=self._left_s())
            self._reader.verify_unrecorded(self._root(attempt))
            final = attempt.final_checkpoint(self._run)
            if final and not final.exists():  # set aside, as broken: the keeper may still hold what it was to be
                keeper_client.persist(self.folder, timeout_s=self._left_s(), again=True)
                self._reader.verify_unrecorded(self._root(attempt))
            if attempt.missed_a_checkpoint():
                before, skipped = attempt.row.stage, self._reader.skipped
                lost = attempts.set_aside_broken_best(self._engine, self._run, self._plan, before, skipped)
                attempt.lost_best.extend(lost)
                again = attempts.open_again(self._engine, self._run, before, skipped)
                attempt.opened_again.extend(again)
            self._curves.read(attempt.row)
            if self._session.phase is not Phase.STOPPING:  # remedies that were taken decide what is next
                self._journal.flush(min(WRITTEN_S, self._left_s()))
        finally:  # whatever the disk does: that it has ended is known
            self._post(lambda: self._ended(attempt))

    def _write_late(self, attempt: Running, told: DeferredFile) -> None:
        attempt.unwritten[told.name] = told.content
        self._journal.write(lambda: launcher.write_late(attempt.folder, told.name, told.content))

    def _root(self, attempt: Running) -> Path:
        return attempts.checkpoint_root(self._run, attempt.row.stage)

    # What the reader found

    def is_known(self, folder: str) -> bool:
        return folder in self._known

    def _newest_saved(self, stage: str) -> int:
        """The newest step of the stage that is on disk and verified; 0 for none."""
        rows = checkpoint_rows.of_run(self._engine, self._run.id, CheckpointState.VERIFIED)
        return max((row.step for row in rows if row.stage == stage), default=0)

    def _written_down(self) -> set[str]:
        return checkpoint_rows.verified_paths(self._engine, self._run.id)

    def verified(
        self, found: Manifest, folder: Path, took_s: float, blocking_s: float, *, rescued: bool = False
    ) -> None:
        if self.is_known(str(folder)):  # told by the keeper, and found on disk besides; or measured since
            self._journal.write(lambda: registry.mark_best(self._engine, self._run.id, self._plan))
            if self._session.phase is Phase.SAVING or (self._ends(found) and not self._session.phase.is_over):
                self._happened(
                    core.CheckpointVerified(found.step, 0.0, blocking_s, found.total_bytes, final=self._ends(found))
                )
            return
        self._known.add(str(folder))
        if found.stage == self._row.stage:
            self._saved_step = max(self._saved_step, found.step)
        if found.stage == self._row.stage and found.step >= self._row.step:
            # The ranks' last heartbeat may come after their end is known: the figures of a short stage are in its last checkpoint.
            self._row = self._row._replace(step=found.step, metrics={**self._row.metrics, **found.metrics})
        session_id = self._row.id
        self._journal.write(
            lambda: registry.record_verified(
                self._engine, self._run.id, session_id, found, folder, took_s=took_s, blocking_s=blocking_s
            )
        )
        if self._mirror:
            self._journal.write(self._mirror.wake)  # it asks the database what there is
        self._journal.write(lambda: registry.mark_best(self._engine, self._run.id, self._plan))
        if not self._session.phase.is_over:
            self._happened(
                core.CheckpointVerified(found.step, took_s, blocking_s, found.total_bytes, rescued, self._ends(found))
            )
        self._journal.write(self._drop_doomed)

    def _ends(self, found: Manifest) -> bool:
        """Whether the training of the stage that runs is over; a word of the stage before may come late."""
        return found.final and found.stage == self._row.stage

    def _drop_doomed(self) -> None:
        """In the journal's thread, once what was verified is written down."""
        for doomed in registry.expired_folders(self._engine, self._run.id, self._plan):
            if self._reader.drop(doomed):  # else the session is over, and the next one clears up
                checkpoint_rows.set_state(self._engine, str(doomed), CheckpointState.DROPPED)

    def save_failed(self, why: str) -> None:
        self._happened(core.SaveFailed(why))

    def passed_over(self, place: Path, error: KgorchError, was: Path | None) -> None:
        self._journal.note(
            EventKind.CHECKPOINT_QUARANTINED if was else EventKind.CHECKPOINT_SKIPPED,
            {"checkpoint": place.name, "why": str(error)},
        )
        if was:
            self._known.discard(str(was))
            self._journal.write(
                lambda: checkpoint_rows.set_state(self._engine, str(was), CheckpointState.BROKEN, error.what)
            )

    def reader_failed(self, why: str) -> None:
        self._journal.note(EventKind.READER_FAILED, {"why": why})

    def _ended(self, attempt: Running) -> None:
        if self._attempt is not attempt:
            return  # we ended it ourselves and have written that down
        for stage in attempt.opened_again:
            self._journal.note(EventKind.STAGE_REOPENED, {"stage": stage})
        event = attempts.ended(self._engine, self._run, self._plan, self._row.id, attempt, self._row.step, self._known)
        event = core.in_vain(self._session, event) or event
        if attempt.failed_by_itself() and not isinstance(event, core.OutOfMemory | core.Unwell):
            self._forget_snapshot_of(attempt)
        if isinstance(event, core.StageFinished | core.RunFinished):
            self._journal.write(lambda: runs.finish_stage(self._engine, self._run.id, attempt.row.stage))
        self._happened(event)
        if isinstance(event, core.Unwell):
            self._remember(attempt, event)

    def _remember(self, attempt: Running, taken: RemedyApplied | core.Unwell) -> None:
        """A remedy, before anything is launched that it is for."""
        why = taken.why if isinstance(taken, RemedyApplied) else taken.cause
        self._journal.note(EventKind.REMEDIED, {"remedy": taken.remedy, "why": why, "change": dict(taken.change)})
        if isinstance(taken, RemedyApplied):
            self._tell_people(core_notices.remedied(taken.remedy, why, self._row.step))
        session_id = self._row.id
        self._journal.write(lambda: remedies.write(self._engine, self._run, session_id, attempt.row, taken))

    def _forget_snapshot_of(self, attempt: Running) -> None:
        """One with which an attempt came to no step is not used again."""
        if attempt.from_snapshot is not None and self._row.step <= attempt.row.first_step:
            keeper_client.forget(self.folder, attempt.from_snapshot)

    def _end_attempt(self, outcome: Outcome, cause: str) -> dict[str, Any] | None:
        """The attempt is over; what to write down of it, None where there was none."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return None
        self._hangs.remember()
        if not self._attached and outcome is not Outcome.CRASHED:
            what = "no rank had called orchestrator.worker.attach() by then: nothing of it could be saved"
            self._journal.note(EventKind.NEVER_ATTACHED, {"stage": attempt.row.stage, "what": what})
        return {
            "attempt_id": attempt.row.id,
            "outcome": outcome,
            "cause": cause,
            "last_step": self._row.step,
            "gained": self._row.step > attempt.furthest
            or outcome is Outcome.DIVERGED,  # the plan's remedies bound those
        }

    def _hear_threads(self) -> None:
        for thread in (self._mirror, self._notices, self._sampler, self._data, *self._walls.sources):
            while thread and not thread.notes.empty():
                self._journal.note(*thread.notes.get())

    def _finish_mirroring(self) -> None:
        """What is not in the mirror yet gets a while of what is left before the wall; any signal ends it."""
        if self._mirror:
            before, until_s = self._signals, self._clock.now_s() + mirror.END_S
            if self._session.wall_s is not None:
                until_s = min(until_s, self._session.wall_s - self._session.margin_s)
            self._journal.flush(min(WRITTEN_S, self._left_s()))
            self._mirror.wake(now=True)
            while self._mirror.is_busy and self._clock.now_s() < until_s and self._signals == before:
                self._turn()

    def _finish_telling(self) -> None:
        """Notices of the end get a moment; any signal ends it. Half of the margin stays, all else is done by then; where the wall
        is nearer than the margin, as after a SIGTERM, half of what is left."""
        before, for_s = self._signals, notifications.END_S
        if self._session.wall_s is not None:
            left_s = self._session.wall_s - self._clock.now_s()
            for_s = min(for_s, max(left_s - self._session.margin_s / 2, left_s / 2))
        until_s = self._clock.now_s() + for_s
        self._notices.now()
        while self._notices.is_busy and self._clock.now_s() < until_s and self._signals == before:
            self._turn()

    # Small hands

    def _post(self, job: Job) -> None:
        self._queue.put(job)

    def _show(self) -> None:
        try:
            self._observer(self._row)
        except OSError:
            self._observer = lambda _: None  # the terminal is gone; the training is not

    def _tell_deadline(self) -> None:
        """Ranks watch the deadline themselves, a little later than we do, should we be dead by then."""
        at_s = self._session.deadline_s
        if at_s != self._told_s and (at_s is None or self._told_s is None or abs(at_s - self._told_s) > 0.05):
            self._told_s = at_s
            self._channel.broadcast(DeadlineUpdate(at_s))

    def _wall_at(self) -> Any:
        left = None if self._session.wall_s is None else self._session.wall_s - self._clock.now_s()
        return None if left is None else self._clock.utc() + timedelta(seconds=left)

    def _set_alarm(self) -> None:
        """Have the scheduler wake the loop at the next instant that the core names."""
        due_s = core.next_due_s(self._session)
        if due_s is None or due_s == self._alarm_s:
            return
        self._alarm_s = due_s
        at = self._clock.utc() + timedelta(seconds=max(0.0, due_s - self._clock.now_s()))
        self._scheduler.add_job(
            self._post,
            "date",
            run_date=at,
            args=[lambda: None],
            id="next",
            replace_existing=True,
            misfire_grace_time=None,
        )

    def _platform_ends_us(self) -> None:
        self._signals += 1
        wall_s = self._clock.now_s() + SIGTERM_GRACE_S
        self._post(lambda: self._happened(core.StopRequested(Reason.SIGTERM, wall_s)))

    def _person_interrupts(self) -> None:
        """Ctrl-C: save and stop; twice: stop at once."""
        self._interrupts, self._signals = self._interrupts + 1, self._signals + 1
        wall_s = None if self._interrupts == 1 else self._clock.now_s()
        self._post(lambda: self._happened(core.StopRequested(Reason.USER, wall_s)))
