"""Claims of rows of the queue: which of several processes gets a row is decided by one UPDATE."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, Engine, Select, bindparam, func, select, update
from sqlalchemy.orm import Session as Orm
from sqlalchemy.orm import aliased

from kgorch.core.codes import ResumeState, RunState
from kgorch.db import fleet
from kgorch.db.queue import Claimant, Entry, count_of, entry_of, entry_query
from kgorch.db.runs import machine_of, now
from kgorch.db.tables import Resume, Run, SessionRow

LEASE = timedelta(minutes=5)
"""A claimant that has not renewed its lease for so long hangs, or its machine does."""

CLAIM_COLUMNS = (
    "claimant_pid", "claimant_started_ticks", "claimant_boot_id", "claimant_machine", "claimed_by", "claimed_at",
    "lease_expires_at",
)  # fmt: skip


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


def claimed_entries(engine: Engine, *, only_ours: bool = False) -> list[Entry]:
    """Rows that are claimed. Args: only_ours: of a fleet, those that this machine has claimed."""
    machine = machine_of(engine) if only_ours else ""
    with Orm(engine) as orm:
        query = _claimed_query(of_machine=bool(machine))
        return [entry_of(row) for row in orm.execute(query, {"machine": machine} if machine else {})]


@functools.cache
def _claimed_query(*, of_machine: bool) -> Any:
    query = entry_query().where(Resume.state == ResumeState.CLAIMED)
    return query.where(Resume.claimant_machine == bindparam("machine")) if of_machine else query


def newest_session_id(engine: Engine) -> int:
    """Of this machine; 0 before there is a session."""
    with Orm(engine) as orm:
        return orm.scalar(_newest_session(machine_of(engine) or None)) or 0


def _newest_session(machine: Any) -> Select[Any]:
    """Of one machine of a fleet, or of all for None."""
    query = select(func.max(SessionRow.id))
    return query if machine is None else query.where(SessionRow.machine == machine)


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
    newest_session = _newest_session(bindparam("machine") if is_fleet else None)
    first: Any = bindparam("first", type_=Resume.id.type)
    if is_fleet:
        ids = bindparam("ids", type_=ARRAY(Resume.id.type))
        claimed = claimed.where(other.claimant_machine == bindparam("machine"))
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
        return count_of(orm.execute(query.values(**_claim_columns(orm, engine, claimant, by)))) == 1


def renew(engine: Engine, resume_id: int, claimant: Claimant) -> bool:
    """Extend the lease. False where the claimant no longer has the claim."""
    with Orm(engine) as orm, orm.begin():
        query = update(Resume).where(Resume.id == resume_id, *_is_claimed_by(claimant))
        return count_of(orm.execute(query.values(lease_expires_at=_lease_end(orm, engine)))) == 1


def put_back(
    engine: Engine, resume_id: int, claimant: Claimant, *, due_at: datetime | None, failed_starts: int, error: str
) -> bool:
    """Give up a claim that led to no session: the row is due again at `due_at`. Without it, row and run have failed.

    False where the claimant no longer has the claim.
    """
    with Orm(engine) as orm, orm.begin():
        query = select(Resume).where(Resume.id == resume_id, *_is_claimed_by(claimant))
        row = orm.scalars(query.with_for_update()).first()  # a stop that ends the claim just now stays one
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
