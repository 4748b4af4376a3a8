"""The lifecycle of a session: which phase it is in, what may happen to it, and what is to be done then.

A session is one stretch of a run on one machine, between two walls. It opens (STARTING: torchrun is coming up), trains,
saves now and then beside the training (SAVING), and ends in one of four ways: FINISHED, SUSPENDED (a checkpoint was
put in order before the end), CUT_OFF (the end came first; the checkpoint before stands) or FAILED (it would fail
again). SUSPENDED and CUT_OFF queue a resume.

Why these phases. SAVING is apart from TRAINING so that one save is asked for at a time, and the next not before this one
is verified or lost. STOPPING is apart from SAVING because it has no way back: from there on, what ends the processes is
an end in order, and a crash is no reason to launch again. RECOVERING is a STARTING that follows a crash; it is a phase
of its own because a person who looks wants to see it. DIAGNOSING is apart from it because the processes of a hang still
live: their stacks are written down first, for a bounded time, and a deadline in it leads to STOPPING as from training.
There is no phase for "the supervisor is dead": it is not an event of the session, training goes on; its successor says
Adopted.

`advance` is the only way to move. A pair that TRANSITIONS does not hold is a mistake of the caller, not a state. Time
enters as events too: `due` yields those whose moment has come. A choice that hangs on figures is made before the table
(core/attempt_outcome.py turns the end of an attempt into one event), so each pair has one answer.

Instants are seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from orchestrator.core import checkpoint_interval, save_deadline
from orchestrator.core.codes import REASON_TEXT, EventKind, Phase, Reason
from orchestrator.core.wall import Wall

Instant = float

LAST_WORDS_S = 0.5
"""What is kept between killing what did not end and the wall: time to write down how it ended."""

GAP_FADES = 0.9998
"""The longest gap between steps is half forgotten in an hour of reports: an evaluation comes again, a freak does not."""

CALIBRATION_S = 5.0
"""Of training before a session's first save."""

DIAGNOSIS_S = 30.0
"""What the stacks of all ranks may take to be collected, twice over (launch/stack_dumps.py)."""

STOP_GRACE_S = 120.0
"""How long a stop without a wall may take at least before what runs is killed."""

SCRIPT_GRACE_S = 30.0
"""How long a script whose training is over and saved may go on after a stop: it runs again from there in the next session."""


class Event:
    """Something that has happened."""

    __slots__ = ()
    kind: ClassVar[EventKind]


@dataclass(frozen=True, slots=True)
class SessionOpened(Event):
    kind = EventKind.SESSION_OPENED


@dataclass(frozen=True, slots=True)
class Attached(Event):
    """A rank tracks its state and is ready to step."""

    kind = EventKind.ATTACHED
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointDue(Event):
    kind = EventKind.CHECKPOINT_DUE


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    kind = EventKind.SAVE_REQUESTED


@dataclass(frozen=True, slots=True)
class CheckpointVerified(Event):
    """`took_s`: asked for to read back; `blocking_s`: of it, what held the training up; `rescued`: no rank asked for it;
    `final`: of a stage whose steps are all done: what its script still does changes no state."""

    kind = EventKind.CHECKPOINT_VERIFIED
    step: int
    took_s: float
    blocking_s: float = 0.0
    bytes: int = 0
    rescued: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    kind = EventKind.SAVE_FAILED
    why: str


@dataclass(frozen=True, slots=True)
class DeadlineReached(Event):
    kind = EventKind.DEADLINE_REACHED


@dataclass(frozen=True, slots=True)
class WallMoved(Event):
    """The nearest of the session's walls is another, or stands elsewhere; None when nothing ends it any more."""

    kind = EventKind.WALL_MOVED
    wall: Wall | None


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """`wall_s` when something outside will end us then; None when the user asks, who can wait for the save."""

    kind = EventKind.STOP_REQUESTED
    reason: Reason
    wall_s: Instant | None = None


@dataclass(frozen=True, slots=True)
class LastSaveLate(Event):
    """What was asked to stop has not saved, and a save begun later would not be done before the wall."""

    kind = EventKind.LAST_SAVE_LATE


@dataclass(frozen=True, slots=True)
class GraceExpired(Event):
    """What was asked to stop has neither saved nor ended."""

    kind = EventKind.GRACE_EXPIRED


@dataclass(frozen=True, slots=True)
class ExitOverdue(Event):
    """What was asked to stop has saved, and has not ended."""

    kind = EventKind.EXIT_OVERDUE


@dataclass(frozen=True, slots=True)
class StageFinished(Event):
    """All ranks have come to the end of a stage that is not the last."""

    kind = EventKind.STAGE_FINISHED


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    kind = EventKind.RUN_FINISHED


@dataclass(frozen=True, slots=True)
class AttemptSuspended(Event):
    """All ranks have ended at a step boundary, as asked or by their own watch."""

    kind = EventKind.ATTEMPT_SUSPENDED


@dataclass(frozen=True, slots=True)
class AttemptUnsaved(Event):
    """The same, but the save at that boundary failed."""

    kind = EventKind.ATTEMPT_UNSAVED
    cause: str


@dataclass(frozen=True, slots=True)
class AttemptCrashed(Event):
    kind = EventKind.ATTEMPT_CRASHED
    cause: str


@dataclass(frozen=True, slots=True)
class OutOfMemory(Event):
    """Memory ran out, and not so that the ranks could try again; `rung`: what the next attempt does otherwise."""

    kind = EventKind.ATTEMPT_OUT_OF_MEMORY
    cause: str
    rung: str


@dataclass(frozen=True, slots=True)
class Unwell(Event):
    """The ranks ended because loss or weights went bad; the next attempt makes this change of the schedule
    (core/training_health.py)."""

    kind = EventKind.ATTEMPT_DIVERGED
    cause: str
    remedy: str
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hung(Event):
    """A rank has been `where` it is (core/hang_detection.py) for longer than that can take."""

    kind = EventKind.RANKS_HUNG
    rank: int
    where: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Diagnosed(Event):
    """What could be learned of a hang is written down; its processes are to end."""

    kind = EventKind.HANG_DIAGNOSED
    cause: str


@dataclass(frozen=True, slots=True)
class RetriesExhausted(Event):
    kind = EventKind.RETRIES_EXHAUSTED
    cause: str


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A new supervisor has found the attempt running."""

    kind = EventKind.ADOPTED


@dataclass(frozen=True, slots=True)
class SessionLost(Event):
    """A new supervisor has found nothing running."""

    kind = EventKind.SESSION_LOST
    why: str


class Action:
    """Something to do. Each can be done twice: after a crash it may be."""


@dataclass(frozen=True, slots=True)
class Launch(Action):
    """Start the first stage that is not done, from the newest verified checkpoint."""


@dataclass(frozen=True, slots=True)
class AskToSave(Action):
    pass


@dataclass(frozen=True, slots=True)
class AskToStop(Action):
    why: str


@dataclass(frozen=True, slots=True)
class RescueSnapshot(Action):
    """Have the newest snapshot in memory written, though no rank asks."""


@dataclass(frozen=True, slots=True)
class CollectStacks(Action):
    """Write down where all ranks stand, beside the loop; Diagnosed follows."""


@dataclass(frozen=True, slots=True)
class KillAttempt(Action):
    pass


@dataclass(frozen=True, slots=True)
class QueueResume(Action):
    """Queue the run's next session: at once, or as the reason says."""

    reason: Reason
    why: str

    @property
    def when_asked(self) -> bool:
        """The user stopped it, so the user says when it goes on."""
        return self.reason is Reason.USER

    @property
    def on_quota(self) -> bool:
        """It goes on when there are hours again."""
        return self.reason is Reason.QUOTA


@dataclass(frozen=True, slots=True)
class Session:
    """Where a session stands, and all that its decisions hang on.

    Attributes:
        entered_s: when the phase began.
        wall_s: when something ends us, and `wall_kind` what; None for a machine without such an end.
        every_s: the plan's upper bound between two saves.
        saves: of this run, oldest first. guess_s: what to count on before the first one.
        state_bytes: what a save holds. write_bytes_per_s: of this session's disk, as measured at its beginning.
        gap_s, step_s: the longest time between two steps lately; an ordinary step.
        began_s: when training began, with all before it on disk; -inf when it is not known.
        saved_s: end of the last save, or the beginning of training.
        trained_s, failures: of the run before this session; blocking_s: of the last save.
        is_measured: a save of this very session has told how long it takes.
        is_in_order: a checkpoint was verified since the stop. is_rescued: the newest snapshot was asked for.
        has_saved: a checkpoint was verified in this session. save_error: why the newest save failed; empty once one did not.
        is_final: the stage's final checkpoint is verified, and its script still runs: there is nothing to save.
        reason: what ends or has ended the session. why: the same for people, with what came after.
    """

    phase: Phase = Phase.QUEUED
    entered_s: Instant = 0.0
    wall_s: Instant | None = None
    wall_kind: Reason = Reason.TIME_LIMIT
    margin_s: float = 5.0
    every_s: float | None = None
    saves: tuple[save_deadline.Save, ...] = ()
    state_bytes: int = 0
    guess_s: float = 2.0
    gap_s: float = 0.0
    step_s: float = 0.0
    began_s: Instant = -math.inf
    saved_s: Instant = 0.0
    blocking_s: float = 0.0
    trained_s: float = 0.0
    failures: int = 0
    write_bytes_per_s: float = 100e6
    is_measured: bool = False
    is_in_order: bool = False
    is_rescued: bool = False
    is_final: bool = False
    has_saved: bool = False
    save_error: str = ""
    reason: Reason = Reason.NONE
    why: str = ""

    @property
    def is_stopped_by_user(self) -> bool:
        return self.reason is Reason.USER

    @property
    def save_s(self) -> float:
        """What to count on for the next save."""
        floor_s = self.state_bytes / max(self.write_bytes_per_s, 1.0)
        return max(save_deadline.save_s(self.saves, self.state_bytes, guess_s=self.guess_s), floor_s)

    @property
    def lead_s(self) -> float:
        """So long before the wall the last save is asked for. While a session comes up nothing is unsaved, and it may go on as
        long as any save may still come in time; a part of what it has left then is trained in any case."""
        if self.is_final:
            return self.margin_s
        if self.phase is Phase.STARTING:
            return self.least_lead_s
        left_s = math.inf if self.wall_s is None else max(0.0, self.wall_s - self.began_s)
        return min(self._lead_s(self.save_s), (1 - save_deadline.TRAINS) * left_s)

    @property
    def least_lead_s(self) -> float:
        """A shorter one than that would be in vain."""
        return self._lead_s(save_deadline.least_s(self.saves, guess_s=self.guess_s))

    def _lead_s(self, save_s: float) -> float:
        return save_deadline.lead_s(save_s=save_s, gap_s=self.gap_s, step_s=self.step_s, margin_s=self.margin_s)

    @property
    def deadline_s(self) -> Instant | None:
        return None if self.wall_s is None else self.wall_s - self.lead_s

    @property
    def rescue_s(self) -> Instant | None:
        """When a last save that has not come would come too late. Ranks that answer have begun it by then: a snapshot written first
        would hold it up."""
        if self.wall_s is None:
            return None
        answer_s = min(
            save_deadline.agreed_s(self.step_s), save_deadline.TRAINS * max(0.0, self.wall_s - self.entered_s)
        )
        return max(self.wall_s - self.save_s - self.margin_s, self.entered_s + answer_s)

    @property
    def next_save_s(self) -> Instant:
        if not self.is_measured:  # one early, so that the deadline's lead is measured, on this session's own disk
            return self.saved_s + min(CALIBRATION_S, self.every_s or CALIBRATION_S)
        interval = checkpoint_interval.interval_s(
            self.blocking_s, trained_s=self.trained_s, failures=self.failures, at_most_s=self.every_s
        )
        return self.saved_s + interval

    @property
    def kill_s(self) -> Instant:
        """When what has not ended after a stop is killed."""
        patience_s = max(SCRIPT_GRACE_S, self.margin_s) if self.is_final else max(STOP_GRACE_S, 4 * self.lead_s)
        graceful = self.entered_s + patience_s
        return graceful if self.wall_s is None else min(graceful, self.wall_s - LAST_WORDS_S)

    @property
    def diagnosed_s(self) -> Instant:
        """When a hang counts as diagnosed, whatever was learned."""
        return self.entered_s + DIAGNOSIS_S

    @property
    def overdue_s(self) -> Instant:
        """When a save that was asked for is given up as never coming."""
        return self.entered_s + max(300.0, 10 * self.lead_s)

    @property
    def ends_on_quota(self) -> bool:
        return self.reason is Reason.QUOTA

    def observing(self, *, gap_s: float, step_s: float) -> Session:
        """With the ranks' own times, told about once a second."""
        return replace(self, gap_s=max(gap_s, GAP_FADES * self.gap_s, step_s), step_s=step_s)


P = Phase
_RUNNING = (P.STARTING, P.TRAINING, P.SAVING, P.STOPPING, P.RECOVERING, P.DIAGNOSING)
CAN_HANG = (P.STARTING, P.RECOVERING, P.TRAINING, P.SAVING)  # a stop has its own end

TRANSITIONS: Mapping[tuple[Phase, type[Event]], Phase] = {
    (P.QUEUED, SessionOpened): P.STARTING,
    # coming up: nothing is unsaved yet, so an end costs nothing
    **{(phase, Attached): P.TRAINING for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, DeadlineReached): P.SUSPENDED for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, StopRequested): P.SUSPENDED for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, SaveRequested): phase for phase in (P.STARTING, P.RECOVERING)},  # what there is to save is saved
    # training, and saving beside it
    (P.TRAINING, CheckpointDue): P.SAVING,
    (P.TRAINING, SaveRequested): P.SAVING,
    (P.SAVING, SaveRequested): P.SAVING,  # the one under way serves
    (P.SAVING, CheckpointVerified): P.TRAINING,
    (P.SAVING, SaveFailed): P.TRAINING,  # training goes on; the checkpoint before stands
    **{(phase, DeadlineReached): P.STOPPING for phase in (P.TRAINING, P.SAVING, P.DIAGNOSING)},
    **{(phase, StopRequested): P.STOPPING for phase in (P.TRAINING, P.SAVING, P.STOPPING, P.DIAGNOSING)},
    **{(phase, WallMoved): phase for phase in _RUNNING},
    **{
        (phase, Attached): phase for phase in (P.TRAINING, P.SAVING, P.STOPPING, P.DIAGNOSING)
    },  # a line that was cut and made anew
    # saves that ranks make by themselves: a stage's last, or one that came after it was given up
    **{(phase, CheckpointVerified): phase for phase in _RUNNING if phase is not P.SAVING},
    **{(phase, SaveFailed): phase for phase in _RUNNING if phase is not P.SAVING},
    (P.STOPPING, SaveRequested): P.STOPPING,  # it saves anyway
    (P.DIAGNOSING, SaveRequested): P.DIAGNOSING,  # ranks that hang do not save
    # a hang
    **{(phase, Hung): P.DIAGNOSING for phase in CAN_HANG},
    (P.DIAGNOSING, Diagnosed): P.RECOVERING,
    # how an attempt ends
    **{(phase, StageFinished): P.STARTING for phase in _RUNNING},
    (P.STOPPING, StageFinished): P.SUSPENDED,
    **{(phase, RunFinished): P.FINISHED for phase in _RUNNING},
    **{(phase, AttemptSuspended): P.SUSPENDED for phase in _RUNNING},
    **{(phase, AttemptUnsaved): P.CUT_OFF for phase in _RUNNING},
    **{(phase, ended): P.RECOVERING for phase in _RUNNING for ended in (AttemptCrashed, OutOfMemory, Unwell)},
    **{(P.STOPPING, ended): P.CUT_OFF for ended in (AttemptCrashed, OutOfMemory, Unwell)},
    **{(phase, RetriesExhausted): P.FAILED for phase in _RUNNING},
    (P.STOPPING, LastSaveLate): P.STOPPING,
    (P.STOPPING, GraceExpired): P.CUT_OFF,
    (P.STOPPING, ExitOverdue): P.SUSPENDED,
    # a supervisor that takes over from a dead one
    **{(phase, Adopted): phase for phase in _RUNNING},
    **{(phase, Adopted): P.TRAINING for phase in (P.SAVING, P.DIAGNOSING)},
    **{(phase, SessionLost): P.CUT_OFF for phase in _RUNNING},
    (P.QUEUED, SessionLost): P.CUT_OFF,
}


class IllegalTransition(Exception):
    """The event means nothing in this phase, and nothing has changed."""

    def __init__(self, phase: Phase, event: Event) -> None:
        super().__init__(f"{type(event).__name__} means nothing to a session that is {phase.value}")
        self.phase, self.event = phase, event


def advance(session: Session, event: Event, now: Instant) -> tuple[Session, tuple[Action, ...]]:
    """Move by one event.

    Raises: IllegalTransition if it means nothing here, and nothing has changed.
    """
    phase = TRANSITIONS.get((session.phase, type(event)))
    if phase is None:
        raise IllegalTransition(session.phase, event)
    moved = _noting(session, event, now)
    if phase is not session.phase:
        moved = replace(moved, phase=phase, entered_s=now)
    return moved, _actions(session, moved, event)


def due(session: Session, now: Instant) -> Iterator[Event]:
    """The events of time whose moment has come, at most one of them; asking twice without advancing gives it twice."""
    deadline_s = session.deadline_s
    if (
        session.phase in (P.STARTING, P.RECOVERING, P.TRAINING, P.SAVING, P.DIAGNOSING)
        and deadline_s is not None
        and now >= deadline_s
    ):
        yield DeadlineReached()
    elif session.phase is P.TRAINING and now >= session.next_save_s and not session.is_final:
        if deadline_s is None or now + session.save_s <= deadline_s:  # else the last save would wait for this one
            yield CheckpointDue()
    elif session.phase is P.SAVING and now >= session.overdue_s:
        yield SaveFailed(f"no checkpoint within {now - session.entered_s:.0f} s of asking")
    elif session.phase is P.DIAGNOSING and now >= session.diagnosed_s:
        yield Diagnosed("the ranks hang, and their stacks could not be collected")
    elif session.phase is P.STOPPING and now >= session.kill_s:
        yield ExitOverdue() if session.is_in_order or session.is_final else GraceExpired()
    elif session.phase is P.STOPPING and _needs_rescue(session) and now >= (session.rescue_s or now):
        yield LastSaveLate()


def next_due_s(session: Session) -> Instant | None:
    """When `due` will have something to say, if nothing else happens before."""
    instants = {
        P.STARTING: (session.deadline_s,),
        P.RECOVERING: (session.deadline_s,),
        P.TRAINING: (session.deadline_s, session.next_save_s if _leaves_time(session) else None),
        P.SAVING: (session.deadline_s, session.overdue_s),
        P.DIAGNOSING: (session.deadline_s, session.diagnosed_s),
        P.STOPPING: (session.kill_s, session.rescue_s if _needs_rescue(session) else None),
    }.get(session.phase, ())
    return min((instant for instant in instants if instant is not None), default=None)


def in_vain(session: Session, event: Event) -> RetriesExhausted | None:
    """The end of the run where a session ends that could save nothing: the next one would begin where it did and save no more.
    None for one that saved something, or had nothing to save."""
    cut = isinstance(event, GraceExpired | AttemptUnsaved)
    if not cut or session.has_saved or not session.save_error:
        return None
    return RetriesExhausted(f"nothing of this session could be saved: {session.save_error}")


def _leaves_time(session: Session) -> bool:
    """Whether the next periodic save is over before the last one is due."""
    if session.is_final:
        return False
    return session.deadline_s is None or session.next_save_s + session.save_s <= session.deadline_s


def _needs_rescue(session: Session) -> bool:
    saved = session.is_in_order or session.is_rescued or session.is_final
    return session.wall_s is not None and not saved


def _noting(session: Session, event: Event, now: Instant) -> Session:
    """The session with what the event tells, its phase left as it is."""
    match event:
        case Attached(state_bytes):
            guess_s = save_deadline.first_guess_s(state_bytes, session.write_bytes_per_s)
            fresh = session.phase in (P.STARTING, P.RECOVERING)
            return replace(
                session,
                guess_s=guess_s,
                state_bytes=state_bytes,
                began_s=now if session.phase is P.STARTING else session.began_s,
                saved_s=now if fresh else session.saved_s,
                is_final=session.is_final and not fresh,
            )
        case CheckpointVerified(rescued=True, final=False):
            return replace(session, has_saved=True, save_error="")
        case CheckpointVerified(took_s=took_s, blocking_s=blocking_s, bytes=size, final=final):
            # one that was asked for before the stop is not the last one
            is_last = session.phase is P.STOPPING and (took_s <= 0 or now - took_s >= session.entered_s)
            in_order = session.is_in_order or is_last
            saved = replace(session, is_in_order=in_order, is_final=session.is_final or final, saved_s=now)
            saved = replace(saved, has_saved=True, save_error="")
            if took_s <= 0:  # found on disk: nobody knows how long it took
                return saved
            saves = (*session.saves, save_deadline.Save(size, took_s))[-save_deadline.RECENT_SAVES :]
            return replace(saved, saves=saves, blocking_s=blocking_s, is_measured=True)
        case LastSaveLate():
            return replace(session, is_rescued=True)
        case SaveFailed(why):
            return replace(session, saved_s=now, save_error=why)  # asked again after one interval, not at once
        case WallMoved(wall):
            if wall is None or (
                session.phase is P.STOPPING and session.wall_s is not None and wall.at_s > session.wall_s
            ):
                if session.phase is P.STOPPING:
                    return session
                return replace(session, wall_s=None, wall_kind=Reason.TIME_LIMIT)
            return replace(session, wall_s=wall.at_s, wall_kind=wall.kind)
        case StopRequested(reason, wall_s):
            nearer = min((wall for wall in (session.wall_s, wall_s) if wall is not None), default=None)
            stopped = replace(session, wall_s=nearer)  # what hurries a user's stop is not why it stops
            return stopped if session.is_stopped_by_user else _ending(stopped, reason)
        case DeadlineReached() | AttemptSuspended() if not session.reason:
            return _ending(session, session.wall_kind)
        case AttemptUnsaved(cause):
            ending = session if session.reason else _ending(session, session.wall_kind)
            return replace(ending, why=f"{ending.why}; {cause}")
        case GraceExpired():
            return replace(session, why=f"{session.why}; the last save was not done in time")
        case AttemptCrashed(cause) | OutOfMemory(cause) | Unwell(cause) if session.phase is P.STOPPING:
            return replace(session, why=f"{session.why}; then: {cause}")
        case AttemptCrashed() | Unwell():
            return replace(session, failures=session.failures + 1)
        case Diagnosed():  # the hang was a gap between two steps, and is none to count on
            return replace(session, failures=session.failures + 1, gap_s=session.step_s)
        case RetriesExhausted(cause):
            return replace(session, reason=Reason.ERROR, why=cause)
        case SessionLost(why):  # a user's stop stays one: the run waits for the user
            return replace(session, reason=Reason.USER if session.is_stopped_by_user else Reason.LOST, why=why)
    return session


def _ending(session: Session, reason: Reason) -> Session:
    return replace(session, reason=reason, why=REASON_TEXT[reason])


def _actions(before: Session, after: Session, event: Event) -> tuple[Action, ...]:
    """What a move asks for: by the phase it leads to, then by what may follow in the same phase."""
    resume = QueueResume(after.reason, after.why)
    if after.phase in (P.SUSPENDED, P.CUT_OFF):
        kill = isinstance(event, DeadlineReached | StopRequested | GraceExpired | ExitOverdue)
        return (KillAttempt(), resume) if kill else (resume,)
    if after.phase is P.FAILED:
        return (KillAttempt(),)
    if isinstance(event, SessionOpened | StageFinished | AttemptCrashed | OutOfMemory | Unwell):
        return (Launch(),) if after.phase in (P.STARTING, P.RECOVERING) else ()
    if isinstance(event, Hung):
        return (CollectStacks(),)
    if isinstance(event, Diagnosed):
        return (KillAttempt(), Launch())
    if after.phase is P.SAVING and (before.phase is P.TRAINING or isinstance(event, Attached)):
        return (
            AskToSave(),
        )  # on a line that was made anew once more: the word before may have been lost with the old one
    if isinstance(event, LastSaveLate):
        return (RescueSnapshot(),)
    if after.phase is P.STOPPING and (before.phase is not P.STOPPING or isinstance(event, Adopted | Attached)):
        return (AskToStop(after.why),)
    return ()
