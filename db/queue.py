"""The queue of runs to resume: one row of `resumes` for each wait of a run.

A row is `due` (at `due_at`, or when a user asks), `claimed` by a process (queue_claims.py), `done` once a session was opened here
or planned at another place, or `failed`. The newest row of a run, whatever its state, holds its resource
request (priority, ranks, share), and each later row inherits it: no second table is needed for it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Engine, Select, bindparam, delete, func, or_, select, true, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import REASON_TEXT, Outcome, Reason, ResumeState, RunState
from kgorch.db import fleet
from kgorch.db.rows import ResumeInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import Attempt, Resume, Run, SessionRow, SlurmJobRow

WAITING = (ResumeState.DUE, ResumeState.CLAIMED)
MAX_CLOCK_ERROR = timedelta(hours=1)
"""A row that was written further in the future comes from a clock that was wrong and has been corrected since."""

INHERITED = ("priority", "ranks", "share", "mirrored")


class Claimant(NamedTuple):
    """The identity of a process: pid, start time in clock ticks, boot id. A pid alone may be reused.

    Attributes:
        machine: of a fleet; else empty.
    """

    pid: int
    ticks: int | None
    boot: str
    machine: str = ""


class Entry(NamedTuple):
    """A row of the queue with the name, number and folder of its run.

    Attributes:
        machine: of a fleet, which has the run's newest files; else empty.
    """

    resume: ResumeInfo
    run: str
    number: int
    folder: str
    machine: str = ""


def queue_resume(
    orm: Orm, run_id: str, *, reason: Reason, why: str, due_at: datetime | None, site: str = "local"
) -> None:
    """Put the run into the queue, as part of the caller's transaction. Its row that waits is replaced.

    A claimed row keeps its claim. Only a stop by the user ends it, because the claimant must not resume the run then.
    `failed_starts` goes on counting where the last session made no progress.
    """
    with one_writer(orm, run_id):
        newest = orm.scalars(_newest(run_id)).first()
    if newest and newest.state == ResumeState.CLAIMED:  # the claimant recovers the session and opens the next one
        newest.reason, newest.why = reason, why
        if reason == Reason.USER:
            newest.state, newest.due_at, newest.lease_expires_at = ResumeState.DUE, None, None
        return
    session = orm.scalars(
        select(SessionRow).where(SessionRow.run_id == run_id).order_by(SessionRow.number.desc()).limit(1)
    ).first()
    made_progress = session is None or _made_progress(orm, session)
    inherited: dict[str, Any] = {name: getattr(newest, name) for name in INHERITED} if newest else {}
    failed_starts = newest.failed_starts if newest and not made_progress else 0
    orm.execute(delete(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING)))
    row = Resume(
        run_id=run_id,
        site=site,
        reason=reason,
        why=why,
        due_at=due_at,
        state=ResumeState.DUE,
        created_at=now(),
        failed_starts=failed_starts,
    )
    for name, value in inherited.items():
        setattr(row, name, value)
    row.last_session_at = session.started_at if session else None
    orm.add(row)


def one_writer(orm: Orm, run_id: str) -> AbstractContextManager[None]:
    """Until the transaction ends, no other one replaces the run's row. Two that both did would both insert, and one would fail.

    A transaction that locks the row of a session, too, does so before.
    """
    return fleet.one_at_a_time(orm, f"queue of {run_id}")


def _made_progress(orm: Orm, session: SessionRow) -> bool:
    """Whether an attempt of the session finished a stage or reached a step that no attempt before it had reached.

    That is asked of attempts, because steps of two stages cannot be compared. An attempt without an end, because everything was
    killed, counts by its own steps.
    """
    is_open = Attempt.ended_at.is_(None) & (Attempt.last_step > Attempt.first_step)
    progress = Attempt.made_progress.is_(True) | (Attempt.outcome == Outcome.FINISHED) | is_open
    return orm.scalar(select(Attempt.id).where(Attempt.session_id == session.id, progress).limit(1)) is not None


def put(
    engine: Engine,
    run_id: str,
    *,
    reason: Reason,
    due_at: datetime | None,
    resource_request: Mapping[str, Any] | None = None,
) -> None:
    """Put the run into the queue in a transaction of its own, after a claim on it is closed.

    Args:
        resource_request: columns of the row that differ from the inherited ones.
    """
    with Orm(engine) as orm, orm.begin(), one_writer(orm, run_id):
        orm.execute(
            update(Resume)
            .where(Resume.run_id == run_id, Resume.state == ResumeState.CLAIMED)
            .values(state=ResumeState.DONE)
        )
        queue_resume(orm, run_id, reason=reason, why=REASON_TEXT[reason], due_at=due_at)
        if resource_request:
            orm.execute(
                update(Resume)
                .where(Resume.run_id == run_id, Resume.state == ResumeState.DUE)
                .values(**resource_request)
            )


def repair_future_timestamps(engine: Engine, at: datetime) -> int:
    """Make rows due at `at` that a clock running ahead has written, else they would wait until its date. Returns their number."""
    last = at + MAX_CLOCK_ERROR
    was_ahead = or_(Resume.created_at > last, Resume.claimed_at > last)  # a claim that was given up has put it off
    with Orm(engine) as orm, orm.begin():
        ahead = Resume.state == ResumeState.DUE, Resume.due_at > at, was_ahead
        return count_of(orm.execute(update(Resume).where(*ahead).values(due_at=at)))


def unschedule(engine: Engine, run_id: str) -> bool:
    """Resume the run only when a user asks, not by time or quota. False where it does not wait, or was claimed just now."""
    removed = {"due_at": None, "reason": Reason.REMOVED, "why": REASON_TEXT[Reason.REMOVED]}
    with Orm(engine) as orm, orm.begin():
        waiting = Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.reason != Reason.REMOVED
        return count_of(orm.execute(update(Resume).where(*waiting).values(**removed))) > 0


def close(engine: Engine, run_id: str) -> None:
    """End the run's wait, and a claim on it: its next session is started by nobody's queue."""
    waiting = Resume.run_id == run_id, Resume.state.in_(WAITING)
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Resume).where(*waiting).values(state=ResumeState.DONE, lease_expires_at=None))


def mark_started(
    engine: Engine,
    run_id: str,
    process: Claimant,
    *,
    by: str,
    resource_request: Mapping[str, Any] | None = None,
) -> None:
    """Close the run's row, because a session was opened, by a claimant or by a user. A run without a row gets one, which keeps
    the resource request for the next time.

    `failed_starts` counts this start; queue_resume sets it back to 0 once the session has made progress.
    """
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(select(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING))).first()
        if row is None:
            row = Resume(run_id=run_id, why="", created_at=now(), failed_starts=0)
            orm.add(row)
        claimant = row.claimant_pid, row.claimant_started_ticks, row.claimant_machine
        is_claimant = row.state == ResumeState.CLAIMED and claimant == (process.pid, process.ticks, process.machine)
        row.state, row.failed_starts, row.lease_expires_at = ResumeState.DONE, row.failed_starts + 1, None
        row.claimed_by = row.claimed_by if is_claimant else by
        row.claimant_pid, row.claimant_started_ticks, row.claimant_boot_id, row.claimant_machine = process
        row.claimed_at = now()
        for name, value in (resource_request or {}).items():
            setattr(row, name, value)


def pending_resume(engine: Engine, run_id: str) -> ResumeInfo | None:
    """The run's row that waits or is claimed."""
    with Orm(engine) as orm:
        row = orm.scalars(select(Resume).where(Resume.run_id == run_id, Resume.state.in_(WAITING))).first()
        return to_info(ResumeInfo, row) if row else None


def entries(engine: Engine) -> list[Entry]:
    """All rows that wait or are claimed, by `due_at`; those without one last."""
    with Orm(engine) as orm:
        query = (
            entry_query().where(Resume.state.in_(WAITING)).order_by(Resume.due_at.is_(None), Resume.due_at, Resume.id)
        )
        return [entry_of(row) for row in orm.execute(query)]


def due_entries(
    engine: Engine,
    at: datetime,
    *,
    limit: int,
    only_sharing: bool = False,
    reachable: Collection[str] = (),
    but: Collection[str] = (),
) -> list[Entry]:
    """Rows that are due, in the order to start them: by priority, then the run whose last session is longest ago, then `due_at`.

    Args:
        reachable: of a fleet, the machines whose runs have their files here. Of the others only runs whose files may be had
            here: those with a mirror or a checkpoint folder of their own, and those without a session yet.
        but: ids of runs that are left out.
    """
    query = _due_query(only_sharing=only_sharing, is_fleet=bool(reachable), leaves_out=bool(but))
    parameters: dict[str, Any] = {"at": at, "most": limit}
    if reachable:
        parameters["machines"] = ["", *reachable]
    if but:
        parameters["but"] = list(but)
    with Orm(engine) as orm:
        return [entry_of(row) for row in orm.execute(query, parameters)]


@functools.cache  # to build it takes as long as three round trips to the database
def _due_query(*, only_sharing: bool, is_fleet: bool, leaves_out: bool) -> Any:
    query = entry_query().where(
        Resume.state == ResumeState.DUE,
        Resume.due_at <= bindparam("at"),
        Run.state == RunState.ACTIVE,
        is_no_job(Resume.run_id),
    )
    if only_sharing:
        query = query.where(Resume.share == true())
    if is_fleet:
        is_ours = Run.machine.in_(bindparam("machines", expanding=True))
        may_be_had = or_(Resume.mirrored == true(), Run.checkpoints.like("/%"), Resume.last_session_at.is_(None))
        query = query.where(or_(is_ours, may_be_had))
    if leaves_out:
        query = query.where(Resume.run_id.not_in(bindparam("but", expanding=True)))
    longest_ago = Resume.last_session_at.nulls_first()  # as SQLite sorts by itself
    return query.order_by(Resume.priority.desc(), longest_ago, Resume.due_at, Resume.id).limit(bindparam("most"))


def due_entry(engine: Engine, run_id: str, at: datetime) -> Entry | None:
    """The run's row, if it is due."""
    with Orm(engine) as orm:
        query = entry_query().where(
            Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.due_at <= at, is_no_job(Resume.run_id)
        )
        row = orm.execute(query).first()
        return entry_of(row) if row else None


def counts(engine: Engine, at: datetime) -> tuple[int, int, datetime | None]:
    """Number of rows that are due, of all that wait or are claimed, and the next instant at which one becomes due."""
    with Orm(engine) as orm:
        count = select(func.count(Resume.id))
        is_due = (
            orm.scalar(count.where(Resume.state == ResumeState.DUE, Resume.due_at <= at, is_no_job(Resume.run_id))) or 0
        )
        return is_due, orm.scalar(count.where(Resume.state.in_(WAITING))) or 0, next_due_at(engine, at)


def next_due_at(engine: Engine, after: datetime) -> datetime | None:
    """None where no row becomes due after that."""
    with Orm(engine) as orm:
        return orm.scalar(select(func.min(Resume.due_at)).where(Resume.state == ResumeState.DUE, Resume.due_at > after))


def is_no_job(run_id: Any) -> ColumnElement[bool]:
    """The run of this column has no Slurm job that waits or runs."""
    return ~select(SlurmJobRow.id).where(SlurmJobRow.run_id == run_id, SlurmJobRow.ended_at.is_(None)).exists()


def _newest(run_id: str) -> Select[Any]:
    return select(Resume).where(Resume.run_id == run_id).order_by(Resume.id.desc()).limit(1)


def entry_query() -> Any:
    """Rows for `entry_of`; the caller adds its conditions."""
    return select(Resume, Run.name, Run.number, Run.folder, Run.machine).join(Run, Run.id == Resume.run_id)


def entry_of(row: Any) -> Entry:
    return Entry(to_info(ResumeInfo, row[0]), *row[1:])


def count_of(result: Any) -> int:
    return int(result.rowcount)
