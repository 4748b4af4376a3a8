"""Sessions and bundles at other places. Each verb is one transaction, because a row is committed before the act that it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Engine, func, or_, select, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import REMOTE_OPEN, RemoteWait, RunState
from kgorch.db.queue import MAX_CLOCK_ERROR, count_of
from kgorch.db.rows import RemoteBundleInfo, RemoteSessionInfo
from kgorch.db.runs import machine_of, now, to_info
from kgorch.db.tables import RemoteBundle, RemoteSessionRow, Run

Columns = Mapping[str, Any]

LONGEST_PAUSE, LONGEST_QUOTA_WAIT = timedelta(days=2), timedelta(days=8)
"""No session is looked at later: 30 polls of a minute are usual, a place may ask for a day, and hours are renewed weekly."""


class DueRun(NamedTuple):
    """A run with a session at another place that is due."""

    run_id: str
    run: str
    folder: str
    due_at: datetime


def plan(engine: Engine, run_id: str, columns: Columns) -> RemoteSessionInfo:
    """Write the row of a session that is to be pushed.

    Raises: sqlalchemy.exc.IntegrityError where the run has an open one, or one of that number or name.
    """
    with Orm(engine) as orm, orm.begin():
        row = RemoteSessionRow(run_id=run_id, created_at=now(), **columns)
        orm.add(row)
        orm.flush()
        return to_info(RemoteSessionInfo, row)


def save(engine: Engine, session_id: int, changes: Columns) -> RemoteSessionInfo:
    """Write what has changed. `is_last` belongs to `mark_last`, which another process may call meanwhile.

    A session that is closed stays so: another run may have taken the place of this one while the place was asked.
    """
    mine = [RemoteSessionRow.id == session_id]
    if "state" in changes:
        mine.append(RemoteSessionRow.state.in_(REMOTE_OPEN))
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(RemoteSessionRow).where(*mine).values(**_without_flag(changes)))
        return to_info(RemoteSessionInfo, orm.get_one(RemoteSessionRow, session_id))


def save_unless_last(engine: Engine, session_id: int, changes: Columns) -> bool:
    """Write it only if the user has not stopped the run meanwhile. Returns: whether it was written."""
    mine = RemoteSessionRow.id == session_id, RemoteSessionRow.is_last.is_(False)
    with Orm(engine) as orm, orm.begin():
        result = orm.execute(update(RemoteSessionRow).where(*mine).values(**_without_flag(changes)))
        return int(result.rowcount) > 0  # type: ignore[attr-defined]


def close(
    engine: Engine, session_id: int, changes: Columns, following: Columns | None, run: Columns | None
) -> RemoteSessionInfo:
    """End a session, and write the one that follows it, in one transaction; nothing where it was closed meanwhile.

    Args:
        following: columns of the next session; it is left out where the user has stopped the run meanwhile.
        run: columns of the run that change.
    """
    with Orm(engine) as orm, orm.begin():
        mine = RemoteSessionRow.id == session_id, RemoteSessionRow.state.in_(REMOTE_OPEN)
        result = orm.execute(update(RemoteSessionRow).where(*mine).values(**_without_flag(changes)))
        row = orm.get_one(RemoteSessionRow, session_id)
        if not result.rowcount:  # type: ignore[attr-defined]
            return to_info(RemoteSessionInfo, row)
        if following and not row.is_last:
            orm.add(RemoteSessionRow(run_id=row.run_id, created_at=now(), **following))
        if run:
            orm.execute(update(Run).where(Run.id == row.run_id).values(**run))
        return to_info(RemoteSessionInfo, row)


def mark_last(engine: Engine, run_id: str) -> None:
    """No session follows the run's open one."""
    with Orm(engine) as orm, orm.begin():
        mine = RemoteSessionRow.run_id == run_id, RemoteSessionRow.state.in_(REMOTE_OPEN)
        orm.execute(update(RemoteSessionRow).where(*mine).values(is_last=True))


def hurry(engine: Engine, run_id: str) -> None:
    """Have the run's open session looked at now, and go on after it: a user has removed what it waited for."""
    with Orm(engine) as orm, orm.begin():
        mine = RemoteSessionRow.run_id == run_id, RemoteSessionRow.state.in_(REMOTE_OPEN)
        orm.execute(update(RemoteSessionRow).where(*mine).values(is_last=False, due_at=now()))


def of_run(engine: Engine, run_id: str) -> list[RemoteSessionInfo]:
    """All sessions of a run, by number."""
    with Orm(engine) as orm:
        query = select(RemoteSessionRow).where(RemoteSessionRow.run_id == run_id).order_by(RemoteSessionRow.number)
        return [to_info(RemoteSessionInfo, row) for row in orm.scalars(query)]


def newest(engine: Engine, run_id: str) -> RemoteSessionInfo | None:
    with Orm(engine) as orm:
        query = select(RemoteSessionRow).where(RemoteSessionRow.run_id == run_id)
        row = orm.scalars(query.order_by(RemoteSessionRow.number.desc()).limit(1)).first()
        return to_info(RemoteSessionInfo, row) if row else None


def open_sessions(engine: Engine) -> list[tuple[str, int, RemoteSessionInfo]]:
    """Name and number of the run, and its session that is not over; the one that is due first is first."""
    with Orm(engine) as orm:
        query = select(Run.name, Run.number, RemoteSessionRow).join(Run, Run.id == RemoteSessionRow.run_id)
        query = query.where(RemoteSessionRow.state.in_(REMOTE_OPEN)).order_by(RemoteSessionRow.due_at)
        return [(name, number, to_info(RemoteSessionInfo, row)) for name, number, row in orm.execute(query)]


def due_runs(engine: Engine, at: datetime) -> list[DueRun]:
    with Orm(engine) as orm:
        query = select(Run.id, Run.name, Run.folder, RemoteSessionRow.due_at).join(
            RemoteSessionRow, Run.id == RemoteSessionRow.run_id
        )
        query = query.where(RemoteSessionRow.state.in_(REMOTE_OPEN), RemoteSessionRow.due_at <= at)
        if machine := machine_of(engine):  # of a fleet, the machine that began the run pushes all of its sessions
            query = query.where(Run.machine.in_(("", machine)))
        return [
            DueRun._make(row)
            for row in orm.execute(query.where(Run.state == RunState.ACTIVE).order_by(RemoteSessionRow.due_at))
        ]


def repair_future_timestamps(engine: Engine, at: datetime) -> int:
    """Make sessions due at `at` that a clock running ahead has put off to its own date. Returns their number."""
    is_too_late = or_(
        RemoteSessionRow.due_at > at + LONGEST_QUOTA_WAIT,
        (RemoteSessionRow.wait != RemoteWait.QUOTA) & (RemoteSessionRow.due_at > at + LONGEST_PAUSE),
        (RemoteSessionRow.status_at > at + MAX_CLOCK_ERROR) & (RemoteSessionRow.due_at > at),
    )
    with Orm(engine) as orm, orm.begin():
        query = update(RemoteSessionRow).where(RemoteSessionRow.state.in_(REMOTE_OPEN), is_too_late)
        return count_of(orm.execute(query.values(due_at=at)))


def next_due_at(engine: Engine, after: datetime) -> datetime | None:
    with Orm(engine) as orm:
        query = select(func.min(RemoteSessionRow.due_at)).where(
            RemoteSessionRow.state.in_(REMOTE_OPEN), RemoteSessionRow.due_at > after
        )
        return orm.scalar(query)


def account_of_run(engine: Engine, run_id: str) -> str:
    """Whose account its first session was pushed to; empty before."""
    with Orm(engine) as orm:
        mine = RemoteSessionRow.run_id == run_id, RemoteSessionRow.pushed_at.is_not(None)
        query = select(RemoteSessionRow.account).where(*mine).order_by(RemoteSessionRow.number).limit(1)
        return orm.scalar(query) or ""


def other_sessions_since(engine: Engine, place: str, run_id: str, since: datetime) -> int:
    """Number of sessions of other runs at a place that may have used its hours since then."""
    with Orm(engine) as orm:
        others = RemoteSessionRow.place == place, RemoteSessionRow.run_id != run_id
        is_later = (RemoteSessionRow.state.in_(REMOTE_OPEN)) | (RemoteSessionRow.status_at >= since)
        return orm.scalar(select(func.count(RemoteSessionRow.id)).where(*others, is_later)) or 0


def bundle(engine: Engine, place: str, account: str, name: str) -> RemoteBundleInfo | None:
    with Orm(engine) as orm:
        row = orm.scalars(_bundle(place, account, name)).first()
        return to_info(RemoteBundleInfo, row) if row else None


def save_bundle(engine: Engine, key: tuple[str, str, str], reference: str, size: int, *, is_ready: bool) -> None:
    """Record that a bundle is stored, and whether sessions can attach it.

    Args:
        key: place, account, name.
    """
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(_bundle(*key)).first()
        if row is None:
            place, account, name = key
            row = RemoteBundle(place=place, account=account, name=name, stored_at=now())
            orm.add(row)
        row.reference, row.bytes = reference, size
        row.ready_at = (row.ready_at or now()) if is_ready else None


def forget_bundle(engine: Engine, place: str, reference: str) -> None:
    """A session did not find it: it is stored again before the next push."""
    with Orm(engine) as orm, orm.begin():
        mine = RemoteBundle.place == place, RemoteBundle.reference == reference
        orm.execute(update(RemoteBundle).where(*mine).values(ready_at=None))


def _bundle(place: str, account: str, name: str) -> Any:
    mine: Iterable[Any] = (
        RemoteBundle.place == place,
        RemoteBundle.account == account,
        RemoteBundle.name == name,
    )
    return select(RemoteBundle).where(*mine)


def _without_flag(changes: Columns) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name != "is_last"}
