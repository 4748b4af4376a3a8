"""Quota usage: what sessions have used of a pool, corrections by the user, and what a pool allows.

Instants come from the caller, whose clock nobody can set (limits/quota_ledger.py). The database computes the sums on an index of
pool and instant, so that they take as long after ten thousand sessions as after one.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, Engine, and_, func, or_, select, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import LIVE, Phase, Reason, ResumeState, RunState
from kgorch.db import fleet
from kgorch.db.rows import ChargeInfo, PoolInfo, SessionInfo
from kgorch.db.runs import to_info
from kgorch.db.tables import Charge, Pool, Resume, Run, SessionRow

MAX_OVERLAPS = 64
"""Upper bound of the charges that start before an instant and reach beyond it: one for each session that ran then."""

MAX_CUT_OFF = 64
"""Upper bound of the sessions that a machine looks at again after an outage."""

MAX_CLOCK_ERROR = timedelta(days=35)
"""Charges further in the future are repaired. Others soon lie in the past, and our own clock is rarely behind by more."""


class OwnCharges(NamedTuple):
    """The charges of a session from an instant on. Its ledger knows them itself, so sums leave them out."""

    session_id: int
    started_at: datetime


class RemainingNeed(NamedTuple):
    """What the unfinished runs of a pool still need.

    Attributes:
        runs: number of them.
        known: of how many the need is known.
        seconds: session seconds of those together.
    """

    runs: int
    known: int
    seconds: float


def charge(
    engine: Engine,
    session_id: int,
    pool: str,
    pieces: list[tuple[datetime, float]],
    *,
    factor: float,
    accelerator: str,
) -> None:
    """Insert or update the charges of a session. Writing them again changes nothing.

    Args:
        pieces: for each charge, when it started and its seconds until now.
        factor: pool seconds that a session second costs.
    """
    with Orm(engine) as orm, orm.begin():
        for started_at, used_s in pieces:
            mine = Charge.session_id == session_id, Charge.started_at == started_at
            result = orm.execute(update(Charge).where(*mine).values(used_s=used_s, factor=factor))
            if not result.rowcount:  # type: ignore[attr-defined]
                piece = started_at, used_s
                orm.add_all(new_rows(session_id, pool, [piece], factor=factor, accelerator=accelerator))


def new_rows(
    session_id: int, pool: str, pieces: list[tuple[datetime, float]], *, factor: float, accelerator: str
) -> list[Charge]:
    """Charges to insert, for a caller with a transaction of its own. Args: as of `charge`."""
    columns = {"session_id": session_id, "pool": pool, "accelerator": accelerator[:64], "factor": factor}
    return [Charge(**columns, started_at=started_at, used_s=used_s) for started_at, used_s in pieces]


def correct(engine: Engine, pool: str, at: datetime, cost_s: float, why: str) -> None:
    """Record that at `at` the pool's usage was so many pool seconds more (or fewer, if negative) than the charges say."""
    with Orm(engine) as orm, orm.begin():
        orm.add(Charge(session_id=None, pool=pool, accelerator="", factor=1.0, started_at=at, used_s=cost_s, why=why))


def repair_future_timestamps(engine: Engine, at: datetime) -> int:
    """Move charges that a clock running far ahead has written to `at`, else they count in every window up to their date.

    Charges of a live session stay, because it would write them again. All stay where every charge lies in the future: then our
    own clock is behind. Returns the number of moved charges.
    """
    over = select(SessionRow.id).where(SessionRow.phase.not_in(LIVE))
    with Orm(engine) as orm, orm.begin():
        if orm.scalar(select(Charge.id).where(Charge.started_at <= at).limit(1)) is None:
            return 0
        ended = or_(Charge.session_id.is_(None), Charge.session_id.in_(over))
        result = orm.execute(
            update(Charge).where(Charge.started_at > at + MAX_CLOCK_ERROR, ended).values(started_at=at)
        )
        return int(result.rowcount)  # type: ignore[attr-defined]


def used_s(engine: Engine, pool: str, since: datetime, *, but: OwnCharges | None = None) -> float:
    """Pool seconds of all charges since then, except those in `but`. Of a charge that started before, the part after `since`.

    A ledger splits its charges at window edges, so few reach over one. They do where the plan has moved the edges since.
    """
    mine = Charge.pool == pool, _excluding(but)
    with Orm(engine) as orm:
        total = orm.scalar(select(func.sum(Charge.used_s * Charge.factor)).where(*mine, Charge.started_at >= since))
        # Corrections have no duration. They are told from the charges of deleted runs by their reason.
        is_usage = or_(Charge.session_id.is_not(None), Charge.why == "")
        before = select(Charge.started_at, Charge.used_s, Charge.factor).where(*mine, is_usage)
        before = before.where(Charge.started_at < since).order_by(Charge.started_at.desc()).limit(MAX_OVERLAPS)
        overlaps = (
            max(0.0, span_s - (since - started_at).total_seconds()) * factor
            for started_at, span_s, factor in orm.execute(before)
        )
        return float(total or 0.0) + sum(overlaps)


def list_since(
    engine: Engine, pool: str, at: datetime, *, but: OwnCharges | None = None
) -> list[tuple[datetime, float, float, bool]]:
    """The charges, oldest first: when each started, its seconds, its pool seconds, whether it is a correction."""
    with Orm(engine) as orm:
        columns = Charge.started_at, Charge.used_s, Charge.used_s * Charge.factor, Charge.session_id, Charge.why
        query = (
            select(*columns)
            .where(Charge.pool == pool, Charge.started_at >= at, _excluding(but))
            .order_by(Charge.started_at)
        )
        return [
            (started_at, span_s, cost_s, session_id is None and why != "")
            for started_at, span_s, cost_s, session_id, why in orm.execute(query)
        ]


def newest(engine: Engine, session_id: int) -> ChargeInfo | None:
    """The charge of a session that started last."""
    with Orm(engine) as orm:
        query = select(Charge).where(Charge.session_id == session_id).order_by(Charge.started_at.desc()).limit(1)
        row = orm.scalars(query).first()
        return to_info(ChargeInfo, row) if row else None


def newest_of_boot(engine: Engine, pool: str, boot_id: str, since: datetime) -> ChargeInfo | None:
    """The charge that started last, not before `since`, of a session of this boot of the machine."""
    with Orm(engine) as orm:
        query = select(Charge).join(SessionRow, SessionRow.id == Charge.session_id)
        query = query.where(Charge.pool == pool, Charge.started_at >= since, SessionRow.boot_id == boot_id)
        row = orm.scalars(query.order_by(Charge.started_at.desc()).limit(1)).first()
        return to_info(ChargeInfo, row) if row else None


def live_sessions(engine: Engine, pool: str) -> list[SessionInfo]:
    """Sessions of the pool that are not over by their rows. Whether their processes live is for the caller to check."""
    with Orm(engine) as orm:
        query = select(SessionRow).where(SessionRow.phase.in_(LIVE), SessionRow.pool == pool).order_by(SessionRow.id)
        return [to_info(SessionInfo, row) for row in orm.scalars(query)]


def cut_off_sessions(engine: Engine, machine: str, boot_id: str) -> list[SessionInfo]:
    """The newest sessions of this boot of a machine that use a pool and were cut off or lost, the newest first."""
    with Orm(engine) as orm:
        query = select(SessionRow).where(SessionRow.phase == Phase.CUT_OFF, SessionRow.pool != "")
        query = query.where(SessionRow.machine == machine, SessionRow.boot_id == boot_id)
        newest = query.order_by(SessionRow.id.desc()).limit(MAX_CUT_OFF)
        return [to_info(SessionInfo, row) for row in orm.scalars(newest)]


def save_pool(engine: Engine, pool: PoolInfo) -> None:
    """Insert or update a pool."""
    with Orm(engine) as orm, orm.begin():
        orm.merge(Pool(**pool._asdict()))


def set_pool(engine: Engine, run_id: str, pool: PoolInfo) -> None:
    """Insert or update a pool, and make it the pool of the run."""
    with Orm(engine) as orm, orm.begin():
        orm.merge(Pool(**pool._asdict()))
        orm.execute(update(Run).where(Run.id == run_id).values(pool=pool.name))


def pool(engine: Engine, name: str) -> PoolInfo | None:
    with Orm(engine) as orm:
        row = orm.get(Pool, name)
        return to_info(PoolInfo, row) if row else None


def pool_names(engine: Engine) -> list[str]:
    """Sorted names of all pools, also of those that only charges name."""
    with Orm(engine) as orm:
        charged = orm.scalars(select(Charge.pool).where(Charge.pool != "").distinct()).all()
        return sorted({*charged, *orm.scalars(select(Pool.name))})


def remaining_need(engine: Engine, pool: str) -> RemainingNeed:
    """Estimated from the newest session of each active run: its stage's remaining steps at the speed of the last step."""
    with Orm(engine) as orm:
        active = select(Run.id).where(Run.state == RunState.ACTIVE, Run.pool == pool)
        last = (
            select(SessionRow.run_id, func.max(SessionRow.number).label("number"))
            .where(SessionRow.run_id.in_(active))
            .group_by(SessionRow.run_id)
            .subquery()
        )
        remaining_s = (SessionRow.steps_total - SessionRow.step) * SessionRow.step_s
        is_known = and_(SessionRow.steps_total > 0, SessionRow.step_s > 0)
        query = select(func.count(), func.sum(remaining_s)).select_from(SessionRow)
        query = query.join(last, and_(last.c.run_id == SessionRow.run_id, last.c.number == SessionRow.number)).where(
            is_known
        )
        known, seconds = orm.execute(query).one()
        count = orm.scalar(select(func.count()).select_from(Run).where(Run.state == RunState.ACTIVE, Run.pool == pool))
        return RemainingNeed(count or 0, known, float(seconds or 0.0))


def wake_waiting_runs(engine: Engine, pool: str) -> int:
    """Make all runs due now that wait for this pool's quota. Returns their number."""
    with Orm(engine) as orm, orm.begin():
        of_pool = select(Run.id).where(Run.pool == pool)
        waiting = Resume.state == ResumeState.DUE, Resume.reason == Reason.QUOTA, Resume.run_id.in_(of_pool)
        result = orm.execute(update(Resume).where(*waiting).values(due_at=fleet.utc_now(orm)))
        return int(result.rowcount)  # type: ignore[attr-defined]


def _excluding(own: OwnCharges | None) -> ColumnElement[bool]:
    if own is None:
        return Charge.id.is_not(None)
    return or_(Charge.session_id.is_(None), Charge.session_id != own.session_id, Charge.started_at < own.started_at)
