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
(core/session/attempt_outcome.py turns the end of an attempt into one event), so each pair has one answer.

Instants are seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from kgorch.core.checkpoint import save_deadline
from kgorch.core.codes import REASON_TEXT, EventKind, Outcome, Phase, Reason
from kgorch.core.session.events import (
    Adopted,
    Attached,
    AttemptCrashed,
    AttemptDiverged,
    AttemptSuspended,
    AttemptUnsaved,
    CheckpointDue,
    CheckpointVerified,
    DeadlineReached,
    Diagnosed,
    Event,
    ExitOverdue,
    GraceExpired,
    Hung,
    Instant,
    LastSaveLate,
    OutOfMemory,
    RetriesExhausted,
    RunFinished,
    SaveFailed,
    SaveRequested,
    SessionLost,
    SessionOpened,
    StageFinished,
    StopRequested,
    WallMoved,
)
from kgorch.core.session.lifecycle_state import LifecycleState


class Effect(Enum):
    """Something to do after a move. Each may be done twice: a supervisor that takes over does not know what its predecessor did."""

    LAUNCH = "launch the first stage that is not done, from its newest verified checkpoint"
    ASK_TO_SAVE = "have the ranks save at their next step boundary"
    ASK_TO_STOP = "have the ranks save at their next step boundary, and end"
    PERSIST_SNAPSHOT = "have the newest snapshot in host memory written to disk, though no rank asks for it"
    COLLECT_STACKS = "dump the stacks of all ranks; Diagnosed follows"
    KILL_ATTEMPT = "kill all processes of the attempt"


@dataclass(frozen=True, slots=True)
class NextSession:
    """The run's next session, to be queued: at once, or as the reason says."""

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
class TransitionRecord:
    """What is written down of a move besides the session's own columns, all of it in one transaction.

    Attributes:
        kind: of the journal's entry, and `facts`: what the entry says.
        outcome: of the attempt that ended with the event, and `cause` of that; None where no attempt ended.
        finishes_stage: whether the attempt's stage is done.
        resume: the next session, where one is to be queued.
    """

    kind: EventKind
    facts: Mapping[str, Any]
    outcome: Outcome | None = None
    cause: str = ""
    finishes_stage: bool = False
    resume: NextSession | None = None


class Transition(NamedTuple):
    """One move: where the session stands now, what is written down of it, and what is to be done, in this order.

    Attributes:
        event: that moved it; another than was asked for where figures of the session say so.
    """

    event: Event
    session: LifecycleState
    record: TransitionRecord
    effects: tuple[Effect, ...]


P, E = Phase, Effect
_RUNNING = (P.STARTING, P.TRAINING, P.SAVING, P.STOPPING, P.RECOVERING, P.DIAGNOSING)
CAN_HANG = (P.STARTING, P.RECOVERING, P.TRAINING, P.SAVING)  # a stop has its own end


@dataclass(frozen=True, slots=True)
class Row:
    """What a phase and an event lead to.

    Attributes:
        to: the next phase.
        effects: what is to be done.
        outcome: of the attempt that ends with the event.
        queues: whether the run's next session is queued.
        finishes_stage: whether the stage of the attempt is done.
    """

    to: Phase
    effects: tuple[Effect, ...] = ()
    outcome: Outcome | None = None
    queues: bool = False
    finishes_stage: bool = False


_CRASHES = {
    AttemptCrashed: Outcome.CRASHED,
    OutOfMemory: Outcome.OUT_OF_MEMORY,
    AttemptDiverged: Outcome.DIVERGED,
}
_LAUNCH, _KILL = (E.LAUNCH,), (E.KILL_ATTEMPT,)
_NOT_TRAINING = Row(P.SUSPENDED, _KILL, Outcome.TIME_LIMIT, queues=True)

TRANSITIONS: Mapping[tuple[Phase, type[Event]], Row] = {
    (P.QUEUED, SessionOpened): Row(P.STARTING, _LAUNCH),
    # Coming up. Nothing is unsaved yet, so an end costs nothing.
    **{(phase, Attached): Row(P.TRAINING) for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, DeadlineReached): _NOT_TRAINING for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, StopRequested): _NOT_TRAINING for phase in (P.STARTING, P.RECOVERING)},
    **{(phase, SaveRequested): Row(phase) for phase in (P.STARTING, P.RECOVERING)},  # what there is to save is saved
    # Training, and saving beside it.
    (P.TRAINING, CheckpointDue): Row(P.SAVING, (E.ASK_TO_SAVE,)),
    (P.TRAINING, SaveRequested): Row(P.SAVING, (E.ASK_TO_SAVE,)),
    (P.SAVING, SaveRequested): Row(P.SAVING),  # the one under way serves
    (P.SAVING, CheckpointVerified): Row(P.TRAINING),
    (P.SAVING, SaveFailed): Row(P.TRAINING),  # training goes on; the checkpoint before stands
    **{(phase, DeadlineReached): Row(P.STOPPING, (E.ASK_TO_STOP,)) for phase in (P.TRAINING, P.SAVING, P.DIAGNOSING)},
    **{(phase, StopRequested): Row(P.STOPPING, (E.ASK_TO_STOP,)) for phase in (P.TRAINING, P.SAVING, P.DIAGNOSING)},
    (P.STOPPING, StopRequested): Row(P.STOPPING),
    **{(phase, WallMoved): Row(phase) for phase in _RUNNING},
    # A connection that was cut and made anew: an order that was on its way may have been lost with the old one.
    **{(phase, Attached): Row(phase) for phase in (P.TRAINING, P.DIAGNOSING)},
    (P.SAVING, Attached): Row(P.SAVING, (E.ASK_TO_SAVE,)),
    (P.STOPPING, Attached): Row(P.STOPPING, (E.ASK_TO_STOP,)),
    # Saves that ranks make by themselves: a stage's last, or one that came after it was given up.
    **{(phase, CheckpointVerified): Row(phase) for phase in _RUNNING if phase is not P.SAVING},
    **{(phase, SaveFailed): Row(phase) for phase in _RUNNING if phase is not P.SAVING},
    (P.STOPPING, SaveRequested): Row(P.STOPPING),  # it saves anyway
    (P.DIAGNOSING, SaveRequested): Row(P.DIAGNOSING),  # ranks that hang do not save
    # A hang.
    **{(phase, Hung): Row(P.DIAGNOSING, (E.COLLECT_STACKS,)) for phase in CAN_HANG},
    (P.DIAGNOSING, Diagnosed): Row(P.RECOVERING, _KILL + _LAUNCH, Outcome.HUNG),
    # How an attempt ends.
    **{(phase, StageFinished): Row(P.STARTING, _LAUNCH, Outcome.FINISHED, finishes_stage=True) for phase in _RUNNING},
    (P.STOPPING, StageFinished): Row(P.SUSPENDED, (), Outcome.FINISHED, queues=True, finishes_stage=True),
    **{(phase, RunFinished): Row(P.FINISHED, (), Outcome.FINISHED, finishes_stage=True) for phase in _RUNNING},
    **{(phase, AttemptSuspended): Row(P.SUSPENDED, (), Outcome.SUSPENDED, queues=True) for phase in _RUNNING},
    **{(phase, AttemptUnsaved): Row(P.CUT_OFF, (), Outcome.UNSAVED, queues=True) for phase in _RUNNING},
    **{
        (phase, crash): Row(P.RECOVERING, _LAUNCH, outcome) for phase in _RUNNING for crash, outcome in _CRASHES.items()
    },
    **{(P.STOPPING, crash): Row(P.CUT_OFF, (), outcome, queues=True) for crash, outcome in _CRASHES.items()},
    **{(phase, RetriesExhausted): Row(P.FAILED, _KILL, Outcome.CRASHED) for phase in _RUNNING},
    (P.STOPPING, LastSaveLate): Row(P.STOPPING, (E.PERSIST_SNAPSHOT,)),
    (P.STOPPING, GraceExpired): Row(P.CUT_OFF, _KILL, Outcome.TIME_LIMIT, queues=True),
    (P.STOPPING, ExitOverdue): Row(P.SUSPENDED, _KILL, Outcome.SUSPENDED, queues=True),
    # A supervisor that takes over from a dead one.
    **{(phase, Adopted): Row(phase) for phase in (P.STARTING, P.TRAINING, P.RECOVERING)},
    **{(phase, Adopted): Row(P.TRAINING) for phase in (P.SAVING, P.DIAGNOSING)},
    (P.STOPPING, Adopted): Row(P.STOPPING, (E.ASK_TO_STOP,)),
    **{(phase, SessionLost): Row(P.CUT_OFF, (), Outcome.LOST, queues=True) for phase in (P.QUEUED, *_RUNNING)},
}


class IllegalTransition(Exception):
    """The event means nothing in this phase, and nothing has changed."""

    def __init__(self, phase: Phase, event: Event) -> None:
        super().__init__(f"{type(event).__name__} means nothing to a session that is {phase.value}")
        self.phase, self.event = phase, event


def advance(session: LifecycleState, event: Event, now: Instant) -> Transition:
    """Move by one event.

    Raises: IllegalTransition if it means nothing here, and nothing has changed.
    """
    event = _refined(session, event)
    row = TRANSITIONS.get((session.phase, type(event)))
    if row is None:
        raise IllegalTransition(session.phase, event)
    after = _applied(session, event, now)
    if row.to is not session.phase:
        after = replace(after, phase=row.to, entered_s=now)
    facts = _facts(event)
    if row.to is P.CUT_OFF and (lost := session.step - session.saved_step) > 0:
        facts |= {"lost_steps": lost, "lost_s": round(lost * session.step_s, 3), "saved_step": session.saved_step}
        after = replace(after, why=f"{after.why}; {_lost(session.step, session.saved_step)}")
    record = TransitionRecord(
        event.kind,
        facts,
        outcome=_outcome(row, event, after),
        cause=getattr(event, "cause", ""),
        finishes_stage=row.finishes_stage,
        resume=NextSession(after.reason, after.why) if row.queues else None,
    )
    return Transition(event, after, record, row.effects)


def why_after(session: LifecycleState, saved_step: int) -> str:
    """Why a session ended, when all that ran for it is over: a save that came after its end takes back what was told as lost.

    Args:
        session: as it ended.
        saved_step: the newest step that is on disk.
    """
    told = _lost(session.step, session.saved_step)
    if session.phase is not P.CUT_OFF or saved_step <= session.saved_step or not session.why.endswith(told):
        return session.why
    now = _lost(session.step, saved_step) if saved_step < session.step else "nothing is lost: it was done after all"
    return session.why.removesuffix(told) + now


def _lost(step: int, saved_step: int) -> str:
    return f"{step - saved_step} steps since step {saved_step} are lost"


def ended_alone(
    session: LifecycleState, end: Event | None, now: Instant, *, failed_by_itself: bool = False
) -> Transition:
    """The end of a session whose supervisor died before it: the same move, but nothing is launched again.

    Args:
        session: as its supervisor left it.
        end: of its attempt, which is over by now; None where none ran.
        failed_by_itself: whether a rank raised; otherwise everything was killed at once, and the training is not to blame.
    """
    if isinstance(end, StageFinished | RunFinished | AttemptSuspended | AttemptUnsaved):
        # As if it had been asked to stop: the next stage is for the next session.
        return advance(replace(session, phase=P.STOPPING), end, now)
    if end is None:
        return advance(session, SessionLost(REASON_TEXT[Reason.LOST]), now)
    if isinstance(end, OutOfMemory | AttemptDiverged):  # ranks said so themselves; a kill does not look like that
        outcome = _CRASHES[type(end)]
    else:
        outcome = Outcome.CRASHED if failed_by_itself else Outcome.LOST
    return advance(session, SessionLost(getattr(end, "cause", ""), outcome), now)


def _facts(event: Event) -> dict[str, Any]:
    """The event's own values, but those that say nothing."""
    if isinstance(event, WallMoved):  # the reading of a clock is not kept: the recorder writes the instant
        return {}
    values = ((name, getattr(event, name)) for name in getattr(event, "__slots__", ()) if name != "outcome")
    return {name: value for name, value in values if value not in (None, "")}


def _outcome(row: Row, event: Event, after: LifecycleState) -> Outcome | None:
    outcome = getattr(event, "outcome", row.outcome)
    if after.is_stopped_by_user and outcome in (Outcome.SUSPENDED, Outcome.TIME_LIMIT):
        return Outcome.STOPPED
    return outcome


def _refined(session: LifecycleState, event: Event) -> Event:
    """The end of the run where a session ends that could save nothing: the next one would begin where it did and save no more.
    The event itself for one that saved something, or had nothing to save."""
    # A foreign program saves when it likes: a session without a save is one without progress, which the queue counts.
    is_cut = isinstance(event, GraceExpired | AttemptUnsaved) and session.stop_s is None
    if not is_cut or session.has_saved or not session.save_error:
        return event
    return RetriesExhausted(f"nothing of this session could be saved: {session.save_error}")


def due(session: LifecycleState, now: Instant) -> Iterator[Event]:
    """The events of time whose moment has come, at most one of them; asking twice without advancing gives it twice."""
    deadline_s = session.deadline_s
    if (
        session.phase in (P.STARTING, P.RECOVERING, P.TRAINING, P.SAVING, P.DIAGNOSING)
        and deadline_s is not None
        and now >= deadline_s
    ):
        yield DeadlineReached()
    elif session.phase is P.TRAINING and now >= session.next_save_s and not session.is_final:
        # else the last save would wait for this one
        if deadline_s is None or now + session.periodic_save_s <= deadline_s:
            yield CheckpointDue()
    elif session.phase is P.SAVING and now >= session.overdue_s:
        yield SaveFailed(f"no checkpoint within {now - session.entered_s:.0f} s of asking", overdue=True)
    elif session.phase is P.DIAGNOSING and now >= session.diagnosed_s:
        yield Diagnosed("the ranks hang, and their stacks could not be collected")
    elif session.phase is P.STOPPING and now >= session.kill_s:
        yield ExitOverdue() if session.is_in_order or session.is_final else GraceExpired()
    elif session.phase is P.STOPPING and _needs_rescue(session) and now >= (session.rescue_s or now):
        yield LastSaveLate()


def next_due_s(session: LifecycleState, now: Instant) -> Instant | None:
    """When `due` will have something to say, if nothing else happens before."""
    instants = {
        P.STARTING: (session.deadline_s,),
        P.RECOVERING: (session.deadline_s,),
        P.TRAINING: (session.deadline_s, session.next_save_s if _leaves_time(session, now) else None),
        P.SAVING: (session.deadline_s, session.overdue_s),
        P.DIAGNOSING: (session.deadline_s, session.diagnosed_s),
        P.STOPPING: (session.kill_s, session.rescue_s if _needs_rescue(session) else None),
    }.get(session.phase, ())
    return min((instant for instant in instants if instant is not None), default=None)


def _leaves_time(session: LifecycleState, now: Instant) -> bool:
    """Whether the next periodic save is over before the last one is due."""
    if session.is_final:
        return False
    return session.deadline_s is None or max(now, session.next_save_s) + session.periodic_save_s <= session.deadline_s


def _needs_rescue(session: LifecycleState) -> bool:
    saved = session.is_in_order or session.is_rescued or session.is_final
    # of a foreign program there are no snapshots to rescue
    return session.wall_s is not None and session.stop_s is None and not saved


def _applied(session: LifecycleState, event: Event, now: Instant) -> LifecycleState:
    """The session with what the event tells, its phase left as it is."""
    match event:
        case Attached(state_bytes, stop_s):
            guess_s = save_deadline.first_guess_s(state_bytes, session.write_bytes_per_s)
            fresh = session.phase in (P.STARTING, P.RECOVERING)
            return replace(
                session,
                guess_s=guess_s,
                state_bytes=state_bytes,
                stop_s=stop_s,
                began_s=now if session.phase is P.STARTING else session.began_s,
                saved_s=now if fresh else session.saved_s,
                is_final=session.is_final and not fresh,
            )
        case CheckpointVerified(rescued=True, final=False):
            return replace(session, has_saved=True, save_error="")
        case CheckpointVerified(step, took_s, blocking_s, size, final=final):
            # one that was asked for before the stop is not the last one; of one found on disk nobody knows when that was
            is_last = step >= session.step if took_s <= 0 else now - took_s >= session.entered_s
            in_order = session.is_in_order or (session.phase is P.STOPPING and is_last)
            saved = replace(session, is_in_order=in_order, is_final=session.is_final or final, saved_s=now)
            saved = replace(saved, has_saved=True, save_error="")
            if took_s <= 0:  # found on disk: nobody knows how long it took
                return saved
            saves = (*session.saves, save_deadline.Save(size, took_s))[-save_deadline.RECENT_SAVES :]
            return replace(saved, saves=saves, blocking_s=blocking_s, is_measured=True)
        case LastSaveLate():
            return replace(session, is_rescued=True)
        case SaveFailed(why, overdue):
            error = session.save_error if overdue else why  # ranks that have not come to a step yet cannot save
            return replace(session, saved_s=now, save_error=error)  # asked again after one interval, not at once
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
        case DeadlineReached() | AttemptSuspended() | StageFinished() if _ends_by_itself(session, event):
            return _ending(session, session.wall_kind)
        case AttemptUnsaved(cause):
            ending = session if session.reason else _ending(session, session.wall_kind)
            return replace(ending, why=f"{ending.why}; {cause}")
        case ExitOverdue(cause) if cause:
            return replace(session, why=f"{session.why}; {cause}")
        case GraceExpired():
            return replace(session, why=f"{session.why}; the last save was not done in time")
        case AttemptCrashed(cause) | OutOfMemory(cause) | AttemptDiverged(cause) if session.phase is P.STOPPING:
            return replace(session, why=f"{session.why}; then: {cause}")
        case AttemptCrashed() | AttemptDiverged():
            return replace(session, failures=session.failures + 1)
        case Diagnosed():  # the hang was a gap between two steps, and is none to count on
            return replace(session, failures=session.failures + 1, gap_s=session.step_s)
        case RetriesExhausted(cause):
            return replace(session, reason=Reason.ERROR, why=cause)
        case SessionLost(why):  # a user's stop stays one: the run waits for the user
            return replace(session, reason=Reason.USER if session.is_stopped_by_user else Reason.LOST, why=why)
    return session


def _ends_by_itself(session: LifecycleState, event: Event) -> bool:
    """Whether nobody has said yet why the session ends: then its wall is why."""
    return not session.reason and (session.phase is P.STOPPING or not isinstance(event, StageFinished))


def _ending(session: LifecycleState, reason: Reason) -> LifecycleState:
    return replace(session, reason=reason, why=REASON_TEXT[reason])
