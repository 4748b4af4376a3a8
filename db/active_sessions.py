"""Sessions that are not over, with what a daemon must know of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine, and_, func, or_, select, update
from sqlalchemy.orm import Session as Orm
from sqlalchemy.orm import aliased

from kgorch.core.codes import LIVE, REASON_TEXT, Reason, RunState
from kgorch.db import fleet
from kgorch.db.queue import WAITING, count_of, one_writer, queue_resume
from kgorch.db.tables import Resume, Run, SessionRow, SlurmJobRow


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


def all_of(engine: Engine) -> list[ActiveSession]:
    """Sessions that are not over by their rows, but for those that began in a Slurm job or whose run has one now: they belong to
    its node, and not to a daemon. Whether their processes live is for the caller to check."""
    with Orm(engine) as orm:
        at = fleet.utc_now(orm)
        return [_active(engine, tuple(row), at) for row in orm.execute(_active_query())]


def queue_lost(engine: Engine, session: ActiveSession, due_at: datetime) -> bool:
    """Put the run of a session whose supervisor has died into the queue. False where the session has ended or was adopted since
    it was looked at, or the run waits by now."""
    mine = (
        SessionRow.run_id == session.run_id,
        SessionRow.phase.in_(LIVE),
        SessionRow.supervisor_pid == session.pid,
        SessionRow.supervisor_started_ticks == session.ticks,
        SessionRow.boot_id == session.boot,
    )
    with Orm(engine) as orm, orm.begin():
        # An UPDATE, not a SELECT: it waits for a supervisor that is just ending the session, and holds up those that come after it.
        if not count_of(orm.execute(update(SessionRow).where(*mine).values(phase=SessionRow.phase))):
            return False
        waiting = select(Resume.id).where(Resume.run_id == session.run_id, Resume.state.in_(WAITING)).limit(1)
        with one_writer(orm, session.run_id):
            if orm.scalar(waiting):
                return False
        queue_resume(orm, session.run_id, reason=Reason.LOST, why=REASON_TEXT[Reason.LOST], due_at=due_at)
        return True


@functools.cache
def _active_query() -> Any:
    other, done = aliased(Resume), aliased(Resume)
    waiting = select(other.id).where(other.run_id == SessionRow.run_id, other.state.in_(WAITING)).exists()
    newest = select(func.max(done.id)).where(done.run_id == SessionRow.run_id, done.state.not_in(WAITING))
    began_in_it = and_(SlurmJobRow.submitted_at <= SessionRow.started_at, SlurmJobRow.ended_at >= SessionRow.started_at)
    of_a_job = (
        select(SlurmJobRow.id)
        .where(SlurmJobRow.run_id == SessionRow.run_id, or_(SlurmJobRow.ended_at.is_(None), began_in_it))
        .exists()
    )
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
        .where(SessionRow.phase.in_(LIVE), ~of_a_job)
    )


def _active(engine: Engine, row: Sequence[Any], at: datetime) -> ActiveSession:
    *columns, machine, lease_expires_at = row
    is_leased = lease_expires_at is not None and lease_expires_at > at
    return ActiveSession._make([*columns, machine, fleet.is_elsewhere(engine, machine), is_leased])
