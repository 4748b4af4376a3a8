"""Verbs on the quota ledger: what sessions have used of a pool, what a person says has been used, what a pool allows.

Instants come from the caller: the ledger has a clock that nobody sets (limits/quota_ledger.py). Sums are made by the database:
after ten thousand sessions they take as long as at the beginning.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import ColumnElement, Engine, and_, func, or_, select, update
from sqlalchemy.orm import Session as Orm

from db.records import ChargeInfo, PoolInfo, SessionInfo
from db.runs import now, plain
from db.tables import Charge, Pool, Resume, Run, Session
from orchestrator.core.codes import Reason, ResumeState, RunState

LIVE = ("queued", "starting", "training", "saving", "stopping", "recovering", "diagnosing")
"""The phases of a session that may be using something."""

MAY_REACH = 64
"""Charges before an instant among which those are that reach over it: a piece a session that lived then."""

FAR_AHEAD = timedelta(days=35)
"""What lies less ahead soon does no more; a clock that is behind by so much is rare."""


class Own(NamedTuple):
    """The charges of a session from an instant on, which its ledger holds itself and does not want to be told."""

    session_id: int
    from_at: datetime


class Needs(NamedTuple):
    """What the runs of a pool that are not finished still need: the sum over those of which it is known, in session seconds."""

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
    """Bring pieces of use (from when on, seconds) up to what they are by now; writing them twice changes nothing."""
    with Orm(engine) as orm, orm.begin():
        for from_at, used_s in pieces:
            mine = Charge.session_id == session_id, Charge.from_at == from_at
            done = orm.execute(update(Charge).where(*mine).values(used_s=used_s, factor=factor))
            if not done.rowcount:  # type: ignore[attr-defined]
                orm.add(
                    Charge(
                        session_id=session_id,
                        pool=pool,
                        accelerator=accelerator[:64],
                        factor=factor,
                        from_at=from_at,
                        used_s=used_s,
                    )
                )


def correct(engine: Engine, pool: str, at: datetime, cost_s: float, why: str) -> None:
    """Write down that so many pool seconds more (or fewer) were used by `at` than the charges say."""
    with Orm(engine) as orm, orm.begin():
        orm.add(Charge(session_id=None, pool=pool, accelerator="", factor=1.0, from_at=at, used_s=cost_s, why=why))


def mend_clock(engine: Engine, at: datetime) -> int:
    """Have what a clock that ran far ahead has written down count from now on: else it would count in every window up to
    its date. How many there were.

    Not while a session lives, which would write its charge again; nor where all charges lie ahead: then it is our clock
    that is behind.
    """
    over = select(Session.id).where(Session.phase.not_in(LIVE))
    with Orm(engine) as orm, orm.begin():
        if orm.scalar(select(Charge.id).where(Charge.from_at <= at).limit(1)) is None:
            return 0
        ended = or_(Charge.session_id.is_(None), Charge.session_id.in_(over))
        found = orm.execute(update(Charge).where(Charge.from_at > at + FAR_AHEAD, ended).values(from_at=at))
        return int(found.rowcount)  # type: ignore[attr-defined]


def used_s(engine: Engine, pool: str, since: datetime, *, but: Own | None = None) -> float:
    """The pool seconds of all charges since then; of one that began before and reaches over it, the part after.

    Charges are cut at the edges of windows, but of those that held when they were made: a plan may move the edges.
    """
    mine = Charge.pool == pool, _not(but)
    with Orm(engine) as orm:
        total = orm.scalar(select(func.sum(Charge.used_s * Charge.factor)).where(*mine, Charge.from_at >= since))
        is_use = or_(Charge.session_id.is_not(None), Charge.why == "")  # a removed run's, too; a correction says why
        before = select(Charge.from_at, Charge.used_s, Charge.factor).where(*mine, is_use)
        before = before.where(Charge.from_at < since).order_by(Charge.from_at.desc()).limit(MAY_REACH)
        over = (
            max(0.0, span_s - (since - from_at).total_seconds()) * factor
            for from_at, span_s, factor in orm.execute(before)
        )
        return float(total or 0.0) + sum(over)


def since(
    engine: Engine, pool: str, at: datetime, *, but: Own | None = None
) -> list[tuple[datetime, float, float, bool]]:
    """The charges one by one, oldest first: when each began, its seconds, its pool seconds, whether it is a correction."""
    with Orm(engine) as orm:
        columns = Charge.from_at, Charge.used_s, Charge.used_s * Charge.factor, Charge.session_id, Charge.why
        chosen = select(*columns).where(Charge.pool == pool, Charge.from_at >= at, _not(but)).order_by(Charge.from_at)
        return [
            (from_at, span_s, cost_s, session_id is None and why != "")
            for from_at, span_s, cost_s, session_id, why in orm.execute(chosen)
        ]


def newest(engine: Engine, session_id: int) -> ChargeInfo | None:
    """The charge of a session that began last."""
    with Orm(engine) as orm:
        chosen = select(Charge).where(Charge.session_id == session_id).order_by(Charge.from_at.desc()).limit(1)
        row = orm.scalars(chosen).first()
        return plain(ChargeInfo, row) if row else None


def of_boot(engine: Engine, pool: str, boot_id: str, since: datetime) -> ChargeInfo | None:
    """The charge that began last among those of sessions of this boot, since then."""
    with Orm(engine) as orm:
        chosen = select(Charge).join(Session, Session.id == Charge.session_id)
        chosen = chosen.where(Charge.pool == pool, Charge.from_at >= since, Session.boot_id == boot_id)
        row = orm.scalars(chosen.order_by(Charge.from_at.desc()).limit(1)).first()
        return plain(ChargeInfo, row) if row else None


def unfinished(engine: Engine, pool: str) -> list[SessionInfo]:
    """Sessions of the pool that nobody has ended yet; whether they live their processes tell."""
    with Orm(engine) as orm:
        chosen = select(Session).where(Session.phase.in_(LIVE), Session.pool == pool).order_by(Session.id)
        return [plain(SessionInfo, row) for row in orm.scalars(chosen)]


def tell_pool(engine: Engine, run_id: str, told: PoolInfo) -> None:
    """What the pool of a run allows, as it is said now."""
    with Orm(engine) as orm, orm.begin():
        orm.merge(Pool(**told._asdict()))
        orm.execute(update(Run).where(Run.id == run_id).values(pool=told.name))


def pool(engine: Engine, name: str) -> PoolInfo | None:
    with Orm(engine) as orm:
        row = orm.get(Pool, name)
        return plain(PoolInfo, row) if row else None


def pools(engine: Engine) -> list[str]:
    """The names of all pools that are known, if only from charges."""
    with Orm(engine) as orm:
        charged = orm.scalars(select(Charge.pool).where(Charge.pool != "").distinct()).all()
        return sorted({*charged, *orm.scalars(select(Pool.name))})


def needs(engine: Engine, pool: str) -> Needs:
    """By the newest session of each run: the steps that are left of its stage, at the pace of its last step."""
    with Orm(engine) as orm:
        active = select(Run.id).where(Run.state == RunState.ACTIVE, Run.pool == pool)
        last = (
            select(Session.run_id, func.max(Session.number).label("number"))
            .where(Session.run_id.in_(active))
            .group_by(Session.run_id)
            .subquery()
        )
        to_go_s = (Session.steps_total - Session.step) * Session.step_s
        told = and_(Session.steps_total > 0, Session.step_s > 0)
        chosen = select(func.count(), func.sum(to_go_s)).select_from(Session)
        chosen = chosen.join(last, and_(last.c.run_id == Session.run_id, last.c.number == Session.number)).where(told)
        known, seconds = orm.execute(chosen).one()
        count = orm.scalar(select(func.count()).select_from(Run).where(Run.state == RunState.ACTIVE, Run.pool == pool))
        return Needs(count or 0, known, float(seconds or 0.0))


def wake(engine: Engine, pool: str) -> int:
    """Have the runs of a pool that wait for its hours looked at now; how many there are."""
    with Orm(engine) as orm, orm.begin():
        of_pool = select(Run.id).where(Run.pool == pool)
        waiting = Resume.state == ResumeState.DUE, Resume.reason == Reason.QUOTA, Resume.run_id.in_(of_pool)
        found = orm.execute(update(Resume).where(*waiting).values(due_at=now()))
        return int(found.rowcount)  # type: ignore[attr-defined]


def _not(own: Own | None) -> ColumnElement[bool]:
    if own is None:
        return Charge.id.is_not(None)
    return or_(Charge.session_id.is_(None), Charge.session_id != own.session_id, Charge.from_at < own.from_at)
