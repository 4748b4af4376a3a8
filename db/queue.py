"""The queue of runs to resume: one row of `resumes` for each wait of a run.

A row is `due` (at `due_at`, or when a user asks), `claimed` by a process, `done` once a session was opened, or `failed`. Which
of several processes gets a row is decided by one UPDATE. The newest row of a run, whatever its state, holds its resource
request (priority, ranks, share), and each later row inherits it: no second table is needed for it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, ColumnElement, Engine, Select, bindparam, delete, func, or_, select, true, update
from sqlalchemy.orm import Session as Orm
from sqlalchemy.orm import aliased

from kgorch.core.codes import LIVE, REASON_TEXT, Outcome, Reason, ResumeState, RunState
from kgorch.db import fleet
from kgorch.db.rows import ResumeInfo
from kgorch.db.runs import machine_of, now, to_info
from kgorch.db.tables import Attempt, Resume, Run, SessionRow, SlurmJobRow

WAITING = (ResumeState.DUE, ResumeState.CLAIMED)
LEASE = timedelta(minutes=5)
"""A claimant that has not renewed its lease for so long hangs, or its machine does."""

MAX_CLOCK_ERROR = timedelta(hours=1)
"""A row that was created further in the future comes from a clock that was wrong and has been corrected since."""

CLAIM_COLUMNS = (
    "claimant_pid", "claimant_started_ticks", "claimant_boot_id", "claimant_machine", "claimed_by", "claimed_at",
    "lease_expires_at",
)  # fmt: skip

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


class QueueSnapshot(NamedTuple):
    """The state of the queue when a scheduler decided what to claim.

    `claim` compares it again in its UPDATE, so that two schedulers cannot both fill the last free place.

    Of a fleet only this machine's rows and sessions count: another machine's take no place here.

    Attributes:
        claimed: number of claimed rows.
        newest_session: highest id of a session.
    """

    claimed: int
    newest_session: int


class ActiveSession(NamedTuple):
    """A session that is not over.

    Attributes:
        run: name of its run.
        is_active: the run's state is `active`.
        pid, ticks, boot: identity of its supervisor.
        is_waiting: the run has a row that waits in the queue.
        share: the run shares its GPUs.
        started_by: `claimed_by` of the row that led to it; empty where a user started it.
        machine: of a fleet, on which it runs; else empty.
        is_elsewhere: that is another machine than this one.
        is_leased: its supervisor has renewed its lease in time.
    """

    run_id: str
    run: str
    folder: str
    is_active: bool
    pid: int | None
    ticks: int | None
    boot: str
    is_waiting: bool
    share: bool
    started_by: str
    machine: str = ""
    is_elsewhere: bool = False
    is_leased: bool = False


def queue_resume(
    orm: Orm, run_id: str, *, reason: Reason, why: str, due_at: datetime | None, site: str = "local"
) -> None:
    """Put the run into the queue, as part of the caller's transaction. Its row that waits is replaced.

    A claimed row keeps its claim. `failed_starts` goes on counting where the last session made no progress.
    """
    newest = orm.scalars(_newest(run_id)).first()
    if newest and newest.state == ResumeState.CLAIMED:  # the claimant recovers the session and opens the next one
        newest.reason, newest.why = reason, why
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
    with Orm(engine) as orm, orm.begin():
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
    with Orm(engine) as orm, orm.begin():
        ahead = Resume.state == ResumeState.DUE, Resume.due_at > at, Resume.created_at > at + MAX_CLOCK_ERROR
        return _count(orm.execute(update(Resume).where(*ahead).values(due_at=at)))


def unschedule(engine: Engine, run_id: str) -> bool:
    """Resume the run only when a user asks, not by time or quota. False where it does not wait, or was claimed just now."""
    removed = {"due_at": None, "reason": Reason.REMOVED, "why": REASON_TEXT[Reason.REMOVED]}
    with Orm(engine) as orm, orm.begin():
        waiting = Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.reason != Reason.REMOVED
        return _count(orm.execute(update(Resume).where(*waiting).values(**removed))) > 0


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
        query = _entries().where(Resume.state.in_(WAITING)).order_by(Resume.due_at.is_(None), Resume.due_at, Resume.id)
        return [_entry(row) for row in orm.execute(query)]


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
        return [_entry(row) for row in orm.execute(query, parameters)]


@functools.cache  # to build it takes as long as three round trips to the database
def _due_query(*, only_sharing: bool, is_fleet: bool, leaves_out: bool) -> Any:
    query = _entries().where(
        Resume.state == ResumeState.DUE,
        Resume.due_at <= bindparam("at"),
        Run.state == RunState.ACTIVE,
        _is_no_job(Resume.run_id),
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
        query = _entries().where(
            Resume.run_id == run_id, Resume.state == ResumeState.DUE, Resume.due_at <= at, _is_no_job(Resume.run_id)
        )
        row = orm.execute(query).first()
        return _entry(row) if row else None


def counts(engine: Engine, at: datetime) -> tuple[int, int, datetime | None]:
    """Number of rows that are due, of all that wait or are claimed, and the next instant at which one becomes due."""
    with Orm(engine) as orm:
        count = select(func.count(Resume.id))
        is_due = (
            orm.scalar(count.where(Resume.state == ResumeState.DUE, Resume.due_at <= at, _is_no_job(Resume.run_id)))
            or 0
        )
        return is_due, orm.scalar(count.where(Resume.state.in_(WAITING))) or 0, next_due_at(engine, at)


def next_due_at(engine: Engine, after: datetime) -> datetime | None:
    """None where no row becomes due after that."""
    with Orm(engine) as orm:
        return orm.scalar(select(func.min(Resume.due_at)).where(Resume.state == ResumeState.DUE, Resume.due_at > after))


def claimed_entries(engine: Engine, *, only_ours: bool = False) -> list[Entry]:
    """Rows that are claimed. Args: only_ours: of a fleet, those that this machine has claimed."""
    machine = machine_of(engine) if only_ours else ""
    with Orm(engine) as orm:
        query = _claimed_query(of_machine=bool(machine))
        return [_entry(row) for row in orm.execute(query, {"machine": machine} if machine else {})]


@functools.cache
def _claimed_query(*, of_machine: bool) -> Any:
    query = _entries().where(Resume.state == ResumeState.CLAIMED)
    return query.where(Resume.claimant_machine == bindparam("machine")) if of_machine else query


def newest_session_id(engine: Engine) -> int:
    """Of this machine; 0 before there is a session."""
    with Orm(engine) as orm:
        return orm.scalar(_newest_session(machine_of(engine))) or 0


def _newest_session(machine: str) -> Select[Any]:
    query = select(func.max(SessionRow.id))
    return query.where(SessionRow.machine == machine) if machine else query


def claim(engine: Engine, resume_id: int, claimant: Claimant, *, by: str, snapshot: QueueSnapshot) -> bool:
    """Claim a due row; see `claim_first`."""
    return claim_first(engine, [resume_id], claimant, by=by, snapshot=snapshot) is not None


def claim_first(
    engine: Engine, resume_ids: Sequence[int], claimant: Claimant, *, by: str, snapshot: QueueSnapshot
) -> int | None:
    """Claim the first of these rows that is due still. One UPDATE, so that of any number of claimants one gets a row.

    None also where this machine has claimed another row or opened a session since the snapshot: there may be no GPU left.

    Args:
        resume_ids: in the order of the queue. Claimants that meet at its head take different rows, and none waits.
    """
    ids = {"ids": list(resume_ids)} if claimant.machine else {"first": resume_ids[0]}
    seen = {"claimed": snapshot.claimed, "newest_session": snapshot.newest_session, "machine": claimant.machine}
    with Orm(engine) as orm, orm.begin(), fleet.one_at_a_time(orm, f"claims of {claimant.machine}"):
        values = _claim_columns(orm, engine, claimant, by)
        query = _claim_query(is_fleet=bool(claimant.machine))
        claimed_id: int | None = orm.connection().scalar(query, {**ids, **seen, **values})
        return claimed_id


@functools.cache
def _claim_query(*, is_fleet: bool) -> Any:
    """The UPDATE of `claim_first`: the id of the first of these rows that nobody has claimed or is just claiming."""
    other, row = aliased(Resume), aliased(Resume)
    claimed = select(func.count(other.id)).where(other.state == ResumeState.CLAIMED)
    newest_session = select(func.max(SessionRow.id))
    first: Any = bindparam("first", type_=Resume.id.type)
    if is_fleet:
        ids = bindparam("ids", type_=ARRAY(Resume.id.type))
        claimed = claimed.where(other.claimant_machine == bindparam("machine"))
        newest_session = newest_session.where(SessionRow.machine == bindparam("machine"))
        free = select(row.id).where(row.id == func.any(ids), row.state == ResumeState.DUE)
        ordered = free.order_by(func.array_position(ids, row.id)).limit(1)
        first = ordered.with_for_update(skip_locked=True).scalar_subquery()
    claimable = update(Resume).where(
        Resume.id == first,
        Resume.state == ResumeState.DUE,
        claimed.scalar_subquery() <= bindparam("claimed"),
        func.coalesce(newest_session.scalar_subquery(), 0) <= bindparam("newest_session"),
    )
    values: dict[str, Any] = {name: bindparam(name) for name in CLAIM_COLUMNS}
    return claimable.values(state=ResumeState.CLAIMED, **values).returning(Resume.id)


def hand_over(engine: Engine, resume_id: int, before: Claimant, claimant: Claimant, *, by: str) -> bool:
    """Transfer a claim from the daemon to the process that it started. False where `before` no longer has the claim."""
    with Orm(engine) as orm, orm.begin():
        query = update(Resume).where(Resume.id == resume_id, *_is_claimed_by(before))
        return _count(orm.execute(query.values(**_claim_columns(orm, engine, claimant, by)))) == 1


def renew(engine: Engine, resume_id: int, claimant: Claimant) -> bool:
    """Extend the lease. False where the claimant no longer has the claim."""
    with Orm(engine) as orm, orm.begin():
        query = update(Resume).where(Resume.id == resume_id, *_is_claimed_by(claimant))
        return _count(orm.execute(query.values(lease_expires_at=_lease_end(orm, engine)))) == 1


def put_back(
    engine: Engine, resume_id: int, claimant: Claimant, *, due_at: datetime | None, failed_starts: int, error: str
) -> bool:
    """Give up a claim that led to no session: the row is due again at `due_at`. Without it, row and run have failed.

    False where the claimant no longer has the claim.
    """
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(select(Resume).where(Resume.id == resume_id, *_is_claimed_by(claimant))).first()
        if row is None:
            return False
        row.state = ResumeState.DUE if due_at else ResumeState.FAILED
        row.failed_starts, row.last_error, row.lease_expires_at = failed_starts, error, None
        row.due_at = due_at or row.due_at
        if due_at is None:
            why = f"it could not be resumed, {failed_starts} times in a row: {error}"
            orm.execute(
                update(Run)
                .where(Run.id == row.run_id, Run.state == RunState.ACTIVE)
                .values(state=RunState.FAILED, why=why)
            )
        return True


def active_sessions(engine: Engine) -> list[ActiveSession]:
    """Sessions that are not over by their rows, but for those in a Slurm job, which belong to its node and not to a daemon.
    Whether their processes live is for the caller to check."""
    with Orm(engine) as orm:
        at = fleet.utc_now(orm)
        return [_active(engine, tuple(row), at) for row in orm.execute(_active_query())]


@functools.cache
def _active_query() -> Any:
    other, done = aliased(Resume), aliased(Resume)
    waiting = select(other.id).where(other.run_id == SessionRow.run_id, other.state.in_(WAITING)).exists()
    newest = select(func.max(done.id)).where(done.run_id == SessionRow.run_id, done.state.not_in(WAITING))
    return (
        select(
            SessionRow.run_id,
            Run.name,
            Run.folder,
            Run.state == RunState.ACTIVE,
            SessionRow.supervisor_pid,
            SessionRow.supervisor_started_ticks,
            SessionRow.boot_id,
            waiting,
            func.coalesce(Resume.share, False),
            func.coalesce(Resume.claimed_by, ""),
            SessionRow.machine,
            SessionRow.lease_expires_at,
        )
        .join(Run, Run.id == SessionRow.run_id)
        .outerjoin(Resume, Resume.id == newest.scalar_subquery())
        .where(SessionRow.phase.in_(LIVE), _is_no_job(SessionRow.run_id))
    )


def _active(engine: Engine, row: Sequence[Any], at: datetime) -> ActiveSession:
    *columns, machine, lease_expires_at = row
    is_leased = lease_expires_at is not None and lease_expires_at > at
    return ActiveSession._make([*columns, machine, fleet.is_elsewhere(engine, machine), is_leased])


def _is_no_job(run_id: Any) -> ColumnElement[bool]:
    """The run of this column has no Slurm job that waits or runs."""
    return ~select(SlurmJobRow.id).where(SlurmJobRow.run_id == run_id, SlurmJobRow.ended_at.is_(None)).exists()


def _newest(run_id: str) -> Select[Any]:
    return select(Resume).where(Resume.run_id == run_id).order_by(Resume.id.desc()).limit(1)


def _entries() -> Any:
    return select(Resume, Run.name, Run.number, Run.folder, Run.machine).join(Run, Run.id == Resume.run_id)


def _entry(row: Any) -> Entry:
    return Entry(to_info(ResumeInfo, row[0]), *row[1:])


def _claim_columns(orm: Orm, engine: Engine, claimant: Claimant, by: str) -> dict[str, Any]:
    process = {
        "claimant_pid": claimant.pid,
        "claimant_started_ticks": claimant.ticks,
        "claimant_boot_id": claimant.boot,
        "claimant_machine": claimant.machine,
    }
    return {**process, "claimed_by": by, "claimed_at": now(), "lease_expires_at": _lease_end(orm, engine)}


def _lease_end(orm: Orm, engine: Engine) -> datetime:
    """By the server's clock in a fleet, else by this machine's."""
    return fleet.lease_end(orm, engine) if fleet.settings(engine) else now() + LEASE


def _is_claimed_by(claimant: Claimant) -> tuple[Any, ...]:
    return (
        Resume.state == ResumeState.CLAIMED,
        Resume.claimant_pid == claimant.pid,
        Resume.claimant_started_ticks == claimant.ticks,
        Resume.claimant_boot_id == claimant.boot,
        Resume.claimant_machine == claimant.machine,
    )


def _count(result: Any) -> int:
    return int(result.rowcount)
