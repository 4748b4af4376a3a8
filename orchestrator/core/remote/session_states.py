"""The states of a session that runs at a place, and what each answer of the place means for it.

    planned ─▶ bundling ─▶ pushing ─▶ queued ─▶ running ─▶ ended ─▶ collected ─▶ the next one: planned
       ▲                      │          ▲                   │
       │  a definite no ──────┤          │ it is there       ├─▶ done: the run is finished
       │                      ▼ unsure   │                   ├─▶ lost: the next one is planned from the last good one
       └──── stopped ◀──── asking ───────┘                   └─▶ failed: a person has to act

Each state is committed before the act that it names, so that a process that is killed leaves a row that says what may have been
done. A session found in `pushing` may have been pushed: the place is asked (`asking`) before anything is pushed again, always under
the same name and nonce. Why a session waits is no state of its own: a running session whose place wants a new login is still
running, and what waits for hours of the account is still planned.

What this prevents: two sessions of a run at once (the next one is planned only from a session that is over), and a session that
goes on from a state that was not verified (session_plan.is_source).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from kgorch.core.backoff import Backoff
from kgorch.core.codes import REMOTE_OPEN, RemoteState, RemoteWait
from kgorch.core.remote.place_values import PlaceError, Pushed, RemoteStatus, Sighting, Trouble
from kgorch.core.remote.record_values import RecordOutcome, SessionRecord

MAX_FRUITLESS = 3
"""Sessions in a row without a new verified step, after which the run fails: each may have cost hours of the account."""

MAX_UNPREPARED = 2
"""Sessions in a row that found no state or no bundle: a place may mount an input late once."""

MAX_REFUSALS = 2
MAX_SEARCHES = 2
"""Times that a place must say that there is no such session before it is pushed again. Reads may lag behind writes."""

MAX_COLLECTS = 20
"""Answers that a completed session has no record: three to five hours. That the place does not answer says nothing of it."""

QUEUED_TOLD_S, QUEUED_NOTICE_S = 3600.0, 6 * 3600.0


class Progress(NamedTuple):
    """Of a run: position of the stage in the plan, step in it. Steps of two stages cannot be compared."""

    position: int = -1
    step: int = -1


NO_PROGRESS = Progress()


class Moment(NamedTuple):
    """When an answer came.

    Attributes:
        chance: uniform in 0 to 1, for the jitter.
        poll_s: least seconds between two requests; every pause is a multiple of it.
    """

    now: datetime
    chance: float = 0.5
    poll_s: float = 60.0

    def after(self, polls: float) -> datetime:
        return self.now + timedelta(seconds=polls * self.poll_s)

    def back_off(self, tries: int, retry_after_s: float | None = None) -> datetime:
        """Full jitter below a pause that doubles from 1 to 30 polls, but at least one poll, and what the place asks for."""
        pause_s = Backoff(self.poll_s, 30 * self.poll_s).after(tries) * self.chance
        return self.now + timedelta(seconds=max(self.poll_s, pause_s, retry_after_s or 0.0))


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """One session of a run at a place.

    Attributes:
        number: counts from 1 in the run.
        wait, why: what it waits for; the same for people.
        tries: answers in a row that told nothing.
        refusals: definite noes to this session.
        absences: answers that there is no such session, or no record of it; absent_since: of the first of them.
        source: number of the session whose output it goes on from; 0 for none.
        expected: progress in that output.
        session_s, timeout_s: as in SessionOrder.
        running_at, pushed_at: when that was first known.
        status, status_at: the last known answer, and when it came; an unknown one changes neither.
        version: the place's count of pushes under the name.
        is_last: no session follows it, because a user has stopped the run.
        queue_told: how often a user was told that it waits in the place's queue: after 1 h, after 6 h.
        outcome, reached: by its record.
        fruitless, unprepared: sessions in a row before this one without a new verified step; without an input.
        first_cause: of the first of these, for people.
    """

    number: int
    state: RemoteState
    due_at: datetime
    source: int = 0
    expected: Progress = NO_PROGRESS
    session_s: int = 0
    timeout_s: int = 0
    wait: RemoteWait = RemoteWait.NONE
    why: str = ""
    tries: int = 0
    refusals: int = 0
    absences: int = 0
    absent_since: datetime | None = None
    pushed_at: datetime | None = None
    running_at: datetime | None = None
    status: RemoteStatus | None = None
    status_at: datetime | None = None
    version: int = 0
    is_last: bool = False
    queue_told: int = 0
    outcome: RecordOutcome | None = None
    reached: Progress = NO_PROGRESS
    fruitless: int = 0
    unprepared: int = 0
    first_cause: str = ""

    @property
    def is_open(self) -> bool:
        return self.state in REMOTE_OPEN

    def moved(self, state: RemoteState, due_at: datetime, **changes: object) -> RemoteSession:
        """In another state, with nothing left of what it waited for in the former one."""
        values: dict[str, object] = {
            "wait": RemoteWait.NONE,
            "why": "",
            "tries": 0,
            "absences": 0,
            "absent_since": None,
        }
        return replace(self, state=state, due_at=due_at, **(values | changes))  # type: ignore[arg-type]


def begin_push(session: RemoteSession, moment: Moment) -> RemoteSession:
    """To be committed before the push."""
    return session.moved(RemoteState.PUSHING, moment.now)


def in_doubt(session: RemoteSession, moment: Moment) -> RemoteSession:
    """Of a push nobody knows whether it was accepted: the place is asked, once its reads can know of it."""
    return session.moved(RemoteState.ASKING, moment.after(1), why="it is not known whether the place has accepted it")


def after_push(session: RemoteSession, pushed: Pushed, moment: Moment) -> RemoteSession:
    return session.moved(
        RemoteState.QUEUED,
        moment.after(1),
        pushed_at=moment.now,
        version=pushed.version,
        refusals=0,
        status_at=moment.now,
    )


def after_search(session: RemoteSession, pushed: Pushed | None, moment: Moment) -> RemoteSession:
    """The answer to whether a push was accepted. Where it was not, the session comes back in PLANNED (or STOPPED): the driver
    begins the push anew, under the same name and nonce."""
    if pushed:
        return after_push(session, pushed, moment)
    if session.absences + 1 < MAX_SEARCHES:
        return replace(session, absences=session.absences + 1, tries=0, wait=RemoteWait.NONE, due_at=moment.after(1))
    return session.moved(RemoteState.STOPPED if session.is_last else RemoteState.PLANNED, moment.now)


def after_look(session: RemoteSession, sighting: Sighting, moment: Moment) -> RemoteSession:
    """A status that is not known, or has gone back, ends nothing and moves nothing."""
    version = max(session.version, sighting.version)
    if sighting.status is RemoteStatus.UNKNOWN:
        tries = session.tries + 1
        return replace(session, tries=tries, version=version, due_at=moment.back_off(tries))
    known = session.moved(session.state, moment.after(1), status=sighting.status, status_at=moment.now, version=version)
    if sighting.status.is_over:
        return replace(known, state=RemoteState.ENDED, due_at=moment.now, why=sighting.message)
    if sighting.status is RemoteStatus.RUNNING:
        return replace(known, state=RemoteState.RUNNING, running_at=session.running_at or moment.now)
    if session.state is RemoteState.QUEUED and session.pushed_at:
        waits_s = (moment.now - session.pushed_at).total_seconds()
        told = (waits_s >= QUEUED_TOLD_S) + (waits_s >= QUEUED_NOTICE_S)
        return replace(known, queue_told=max(session.queue_told, told))
    return known


def after_collect(
    session: RemoteSession, record: SessionRecord | None, reached: Progress, why: str, moment: Moment
) -> RemoteSession:
    """Judge a session that is over.

    Args:
        record: its own; None where there is none, or one of another nonce.
        reached: by the record.
        why: why there is none; for people.
    """
    if record is None:
        # A listing may lag behind the end of a session, whose output exists and has cost hours of the account; places answer
        # 403 for outages of their own, too.
        tries, absences = session.tries + 1, session.absences + 1
        if session.status is RemoteStatus.COMPLETE and absences < MAX_COLLECTS:
            waiting = replace(session, wait=RemoteWait.NONE, why=why, tries=tries, absences=absences)
            return replace(waiting, due_at=moment.back_off(tries))
        return _without_progress(session, why, moment)
    judged = replace(session, outcome=record.outcome, reached=reached)
    if record.outcome is RecordOutcome.FINISHED:
        return judged.moved(RemoteState.DONE, moment.now)
    if record.outcome is RecordOutcome.FAILED:
        return judged.moved(RemoteState.FAILED, moment.now, why=record.message or "the training failed")
    if reached <= session.expected or not record.checkpoint or record.outcome.is_unprepared:
        return _without_progress(judged, record.message or _NOTHING_NEW[record.outcome], moment)
    if session.status is RemoteStatus.ERROR:
        return _without_progress(judged, "the place attaches no output of a session that ended with an error", moment)
    return judged.moved(RemoteState.COLLECTED, moment.now)


_NOTHING_NEW = {
    RecordOutcome.SUSPENDED: "it ended without a new verified checkpoint",
    RecordOutcome.QUOTA: "its quota ended before a new checkpoint was verified",
    RecordOutcome.ERROR: "it ended with an error before a new checkpoint was verified",
    RecordOutcome.NO_STATE: "the state to go on from was not attached",
    RecordOutcome.NO_BUNDLE: "the bundle was not attached",
}


def _without_progress(session: RemoteSession, why: str, moment: Moment) -> RemoteSession:
    """LOST, or FAILED where that has happened too often in a row."""
    unprepared = session.outcome is not None and session.outcome.is_unprepared
    count, most = (session.unprepared, MAX_UNPREPARED) if unprepared else (session.fruitless, MAX_FRUITLESS)
    cause = session.first_cause or why
    if count + 1 >= most:
        text = f"{count + 1} sessions in a row ended without progress; the first: {cause}" if count else why
        return session.moved(RemoteState.FAILED, moment.now, why=text)
    return session.moved(RemoteState.LOST, moment.now, why=why, first_cause=cause)


def after_trouble(session: RemoteSession, error: PlaceError, moment: Moment) -> RemoteSession:
    """The place did not do what it was asked for in this state."""
    match error.trouble:
        case Trouble.LOGIN | Trouble.NO_CLIENT:
            wait = RemoteWait.LOGIN if error.trouble is Trouble.LOGIN else RemoteWait.CLIENT
            return replace(_not_pushed(session), wait=wait, why=error.message, due_at=moment.after(30))
        case Trouble.UNATTACHED if session.state is RemoteState.PUSHING:
            # it runs, and ends at once by itself
            pushed = Pushed(max(1, session.version), "", "")
            return replace(after_push(session, pushed, moment), why=error.message)
        case Trouble.UNANSWERED if session.state is RemoteState.PUSHING:
            return replace(in_doubt(session, moment), wait=RemoteWait.NETWORK)
        case Trouble.SLOTS if session.state is RemoteState.PUSHING:
            return replace(_not_pushed(session), wait=RemoteWait.SLOTS, why=error.message, due_at=moment.after(10))
        case Trouble.QUOTA if session.state is RemoteState.PUSHING:
            # the hours were there when they were read: the place counts with a delay, and is asked again
            return replace(_not_pushed(session), wait=RemoteWait.QUOTA, why=error.message, due_at=moment.after(30))
        case Trouble.ABSENT | Trouble.REFUSED:
            return _after_no(session, error, moment)
    tries = session.tries + 1
    due_at = moment.back_off(tries, error.retry_after_s)
    return replace(_not_pushed(session), wait=RemoteWait.NETWORK, why=error.message, tries=tries, due_at=due_at)


def _not_pushed(session: RemoteSession) -> RemoteSession:
    """After a definite no to a push nothing of the session is at the place."""
    return replace(session, state=RemoteState.PLANNED) if session.state is RemoteState.PUSHING else session


def _after_no(session: RemoteSession, error: PlaceError, moment: Moment) -> RemoteSession:
    """ABSENT or REFUSED."""
    is_absent = error.trouble is Trouble.ABSENT
    match session.state:
        case RemoteState.ASKING if is_absent:
            return after_search(session, None, moment)
        case RemoteState.ASKING:  # another nonce lies under the name
            return session.moved(RemoteState.FAILED, moment.now, why=error.message)
        case RemoteState.QUEUED | RemoteState.RUNNING:
            since = session.absent_since or moment.now
            # whatever ran under a name that is absent for longer than a session may last is over
            if is_absent and (moment.now - since).total_seconds() > session.timeout_s + QUEUED_TOLD_S:
                return session.moved(RemoteState.ENDED, moment.now, why=error.message)
            tries = session.tries + 1
            changes = {"absences": session.absences + 1, "absent_since": since} if is_absent else {}
            due_at = moment.back_off(tries)
            return replace(session, wait=RemoteWait.NONE, tries=tries, why=error.message, due_at=due_at, **changes)  # type: ignore[arg-type]
        case RemoteState.ENDED:
            return after_collect(session, None, NO_PROGRESS, error.message, moment)
    refusals = session.refusals + 1
    if refusals >= MAX_REFUSALS:
        return session.moved(RemoteState.FAILED, moment.now, why=error.message)
    planned = replace(_not_pushed(session), refusals=refusals, why=error.message)
    return replace(planned, due_at=moment.back_off(refusals, error.retry_after_s))


def stop(session: RemoteSession, moment: Moment) -> RemoteSession:
    """No session follows this one; what was not pushed is not pushed any more."""
    if session.state in (RemoteState.PLANNED, RemoteState.BUNDLING):
        return session.moved(RemoteState.STOPPED, moment.now, is_last=True)
    return replace(session, is_last=True)
