"""Verbs on the queue of resumes. The rows are the truth; who takes one is decided by one UPDATE.

A row is `due` (at its instant, or when a person asks), `claimed` by a process, `done` once a session was opened, or `failed`. A
run's newest row, whatever its state, tells what the run wants of a machine; each row that follows it inherits that.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Engine, Select, delete, func, select, true, update
from sqlalchemy.orm import Session as Orm
from sqlalchemy.orm import aliased

from db.records import ResumeInfo
from db.runs import now, plain
from db.tables import Attempt, Resume, Run, Session
from orchestrator.core.codes import LIVE, REASON_TEXT, Outcome, Reason, ResumeState, RunState

WAITING = (ResumeState.DUE, ResumeState.CLAIMED)
LEASE = timedelta(minutes=5)
"""A claimant that has not renewed its claim for so long hangs, or its machine does."""

AHEAD = timedelta(hours=1)
"""An entry that was made so far in the future was made by a clock that has been put right since."""

INHERITED = ("priority", "ranks", "share")


class Claimant(NamedTuple):
    """A process: a pid alone is no identity."""

    pid: int
    ticks: int | None
    boot: str


class Entry(NamedTuple):
    """A place in the queue, with the run that stands there."""

    resume: ResumeInfo
    run: str
    number: int
    folder: str


class Seen(NamedTuple):
    """What had been claimed and opened when somebody looked; a claim that follows from that look asks for nothing newer."""

    claimed: int
    newest_session: int


class OpenSession(NamedTuple):
    """`waits`: its run stands in the queue. `begun_by`: who had claimed that place, "" where a person began it."""

    run_id: str
    run: str
    folder: str
    is_active: bool
    pid: int | None
    ticks: int | None
    boot: str
    waits: bool
    share: bool
    begun_by: str


def queue_resume(
    orm: Orm, run_id: str, *, reason: Reason, why: str, due_at: datetime | None, place: str = "local"
) -> None:
    """Put the run into the queue, in the place of an entry that stands there; part of another transaction.

    One that is claimed stays so. Its tries are counted on where its last session came no step further.
    """
    newest = orm.scalars(_newest(run_id)).first()
    if newest and newest.state == ResumeState.CLAIMED:  # who claimed it settles what was, and opens a session next
        newest.reason, newest.why = reason, why
        return
    session = orm.scalars(
        select(Session).where(Session.run_id == run_id).order_by(Session.number.desc()).limit(1)
    ).first()
    gained = session is None or _came_further(orm, session)
    inherited: dict[str, Any] = {name: getattr(newest, name) for name in INHERITED} if newest else {}
    tries = newest.tries if newest and not gained else 0
    orm.execute(delete(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING)))
    row = Resume(
        run_id=run_id,
        place=place,
        reason=reason,
        why=why,
        due_at=due_at,
        state=ResumeState.DUE,
        created_at=now(),
        tries=tries,
    )
    for name, value in inherited.items():
        setattr(row, name, value)
    row.turn_at = session.started_at if session else None
    orm.add(row)


def _came_further(orm: Orm, session: Session) -> bool:
    """Whether an attempt of the session finished a stage, or came to a step of its stage that none before it had come to: steps of
    two stages are never compared. One that nobody has ended yet, for all was killed, counts by the steps that it did."""
    is_open = Attempt.ended_at.is_(None) & (Attempt.last_step > Attempt.first_step)
    further = Attempt.gained.is_(True) | (Attempt.outcome == Outcome.FINISHED) | is_open
    return orm.scalar(select(Attempt.id).where(Attempt.session_id == session.id, further).limit(1)) is not None


def put(
    engine: Engine, run_id: str, *, reason: Reason, due_at: datetime | None, wants: Mapping[str, Any] | None = None
) -> None:
    """The same by itself, and whoever has claimed it has done with it.

    `wants`: what the run wants of a machine, by the columns' names.
    """
    with Orm(engine) as orm, orm.begin():
        orm.execute(
            update(Resume)
            .where(Resume.run_id == run_id, Resume.state == ResumeState.CLAIMED)
            .values(state=ResumeState.DONE)
        )
        queue_resume(orm, run_id, reason=reason, why=REASON_TEXT[reason], due_at=due_at)
        if wants:
            orm.execute(update(Resume).where(Resume.run_id == run_id, Resume.state == ResumeState.DUE).values(**wants))


def mend_clock(engine: Engine, at: datetime) -> int:
    """Make due what was written down by a clock that ran ahead: its hour would come when nobody waits for it any more. How many
    there were."""
    with Orm(engine) as orm, orm.begin():
        ahead = Resume.state == ResumeState.DUE, Resume.due_at > at, Resume.created_at > at + AHEAD
        return _count(orm.execute(update(Resume).where(*ahead).values(due_at=at)))


def drop(engine: Engine, run_id: str) -> bool:
    """From now on the run goes on when a person asks, and not when there are hours either. False where it does not wait, or is
    being taken just now."""
    with Orm(engine) as orm, orm.begin():
        chosen = update(Resume).where(
            Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.reason != Reason.REMOVED
        )
        return (
            _count(orm.execute(chosen.values(due_at=None, reason=Reason.REMOVED, why=REASON_TEXT[Reason.REMOVED]))) > 0
        )


def taken(
    engine: Engine,
    run_id: str,
    *,
    by: str,
    pid: int,
    ticks: int | None,
    boot: str,
    wants: Mapping[str, Any] | None = None,
) -> None:
    """The run has a session, whoever opened it: it waits no more. What it wants is kept for the next time."""
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(select(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING))).first()
        if row is None:
            row = Resume(run_id=run_id, why="", created_at=now(), tries=0)
            orm.add(row)
        claimed = row.state == ResumeState.CLAIMED and (row.claimed_pid, row.claimed_ticks) == (pid, ticks)
        row.state, row.tries, row.lease_until_at = ResumeState.DONE, row.tries + 1, None
        row.claimed_by = row.claimed_by if claimed else by
        row.claimed_pid, row.claimed_ticks, row.claimed_boot, row.claimed_at = pid, ticks, boot, now()
        for name, value in (wants or {}).items():
            setattr(row, name, value)


def open_resume(engine: Engine, run_id: str) -> ResumeInfo | None:
    """The run's place in the queue."""
    with Orm(engine) as orm:
        row = orm.scalars(select(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING))).first()
        return plain(ResumeInfo, row) if row else None


def entries(engine: Engine) -> list[Entry]:
    """All that wait, those that nothing brings up by themselves last."""
    with Orm(engine) as orm:
        chosen = _entries().where(Resume.state.in_(WAITING)).order_by(Resume.due_at.is_(None), Resume.due_at, Resume.id)
        return [_entry(row) for row in orm.execute(chosen)]


def due(engine: Engine, at: datetime, *, limit: int, only_sharing: bool = False) -> list[Entry]:
    """Those whose hour has come, in the order in which they go: by priority, then whose turn was longest ago, then by the hour."""
    with Orm(engine) as orm:
        chosen = _entries().where(Resume.state == ResumeState.DUE, Resume.due_at <= at, Run.state == RunState.ACTIVE)
        if only_sharing:
            chosen = chosen.where(Resume.share == true())
        ordered = chosen.order_by(Resume.priority.desc(), Resume.turn_at, Resume.due_at, Resume.id)
        return [_entry(row) for row in orm.execute(ordered.limit(limit))]


def entry_of(engine: Engine, run_id: str, at: datetime) -> Entry | None:
    """The run's place in the queue, if it is due."""
    with Orm(engine) as orm:
        chosen = _entries().where(Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.due_at <= at)
        row = orm.execute(chosen).first()
        return _entry(row) if row else None


def counts(engine: Engine, at: datetime) -> tuple[int, int, datetime | None]:
    """How many are due, how many wait in all, and the next instant at which one becomes due."""
    with Orm(engine) as orm:
        count = select(func.count(Resume.id))
        is_due = orm.scalar(count.where(Resume.state == ResumeState.DUE, Resume.due_at <= at)) or 0
        return is_due, orm.scalar(count.where(Resume.state.in_(WAITING))) or 0, next_due_at(engine, at)


def next_due_at(engine: Engine, after: datetime) -> datetime | None:
    with Orm(engine) as orm:
        return orm.scalar(select(func.min(Resume.due_at)).where(Resume.state == ResumeState.DUE, Resume.due_at > after))


def claimed(engine: Engine) -> list[Entry]:
    with Orm(engine) as orm:
        return [_entry(row) for row in orm.execute(_entries().where(Resume.state == ResumeState.CLAIMED))]


def newest_session(engine: Engine) -> int:
    """The highest id; 0 before there is one."""
    with Orm(engine) as orm:
        return orm.scalar(select(func.max(Session.id))) or 0


def claim(engine: Engine, resume_id: int, claimant: Claimant, *, by: str, seen: Seen) -> bool:
    """Take a due row: one UPDATE, so that of any number of claimants one succeeds. False also where something was claimed or opened
    that the claimant had not seen: there may be no room left."""
    other = aliased(Resume)
    others, opened = (
        select(func.count(other.id)).where(other.state == ResumeState.CLAIMED),
        select(func.max(Session.id)),
    )
    with Orm(engine) as orm, orm.begin():
        chosen = update(Resume).where(
            Resume.id == resume_id,
            Resume.state == ResumeState.DUE,
            others.scalar_subquery() <= seen.claimed,
            func.coalesce(opened.scalar_subquery(), 0) <= seen.newest_session,
        )
        return _count(orm.execute(chosen.values(state=ResumeState.CLAIMED, **_by(claimant, by)))) == 1


def hand_over(engine: Engine, resume_id: int, before: Claimant, claimant: Claimant, *, by: str) -> bool:
    """From who claimed a row to the process that it started for that; False where the claim is no more."""
    with Orm(engine) as orm, orm.begin():
        chosen = update(Resume).where(Resume.id == resume_id, *_held_by(before))
        return _count(orm.execute(chosen.values(**_by(claimant, by)))) == 1


def renew(engine: Engine, resume_id: int, claimant: Claimant) -> bool:
    with Orm(engine) as orm, orm.begin():
        chosen = update(Resume).where(Resume.id == resume_id, *_held_by(claimant))
        return _count(orm.execute(chosen.values(lease_until_at=now() + LEASE))) == 1


def put_back(
    engine: Engine, resume_id: int, claimant: Claimant, *, due_at: datetime | None, tries: int, error: str
) -> bool:
    """A claim that led to no session: due again at `due_at`; without one the row has `failed`, and its run with it."""
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(select(Resume).where(Resume.id == resume_id, *_held_by(claimant))).first()
        if row is None:
            return False
        row.state = ResumeState.DUE if due_at else ResumeState.FAILED
        row.tries, row.last_error, row.lease_until_at = tries, error, None
        row.due_at = due_at or row.due_at
        if due_at is None:
            why = f"it could not be resumed, {tries} times in a row: {error}"
            orm.execute(
                update(Run)
                .where(Run.id == row.run_id, Run.state == RunState.ACTIVE)
                .values(state=RunState.FAILED, why=why)
            )
        return True


def open_sessions(engine: Engine) -> list[OpenSession]:
    """Those that are not over, as far as is written down: whether a process stands behind them is not asked here."""
    other, done = aliased(Resume), aliased(Resume)
    waiting = select(other.id).where(other.run_id == Session.run_id, other.state.in_(WAITING)).exists()
    newest = select(func.max(done.id)).where(done.run_id == Session.run_id, done.state.not_in(WAITING))
    with Orm(engine) as orm:
        chosen = (
            select(
                Session.run_id,
                Run.name,
                Run.folder,
                Run.state == RunState.ACTIVE,
                Session.supervisor_pid,
                Session.supervisor_started_ticks,
                Session.boot_id,
                waiting,
                func.coalesce(Resume.share, False),
                func.coalesce(Resume.claimed_by, ""),
            )
            .join(Run, Run.id == Session.run_id)
            .outerjoin(Resume, Resume.id == newest.scalar_subquery())
            .where(Session.phase.in_(LIVE))
        )
        return [OpenSession._make(row) for row in orm.execute(chosen)]


def _newest(run_id: str) -> Select[Any]:
    return select(Resume).where(Resume.run_id == run_id).order_by(Resume.id.desc()).limit(1)


def _entries() -> Any:
    return select(Resume, Run.name, Run.number, Run.folder).join(Run, Run.id == Resume.run_id)


def _entry(row: Any) -> Entry:
    return Entry(plain(ResumeInfo, row[0]), *row[1:])


def _by(claimant: Claimant, by: str) -> dict[str, Any]:
    at = now()
    who = {"claimed_pid": claimant.pid, "claimed_ticks": claimant.ticks, "claimed_boot": claimant.boot}
    return {**who, "claimed_by": by, "claimed_at": at, "lease_until_at": at + LEASE}


def _held_by(claimant: Claimant) -> tuple[Any, ...]:
    return (
        Resume.state == ResumeState.CLAIMED,
        Resume.claimed_pid == claimant.pid,
        Resume.claimed_ticks == claimant.ticks,
        Resume.claimed_boot == claimant.boot,
    )


def _count(result: Any) -> int:
    return int(result.rowcount)
