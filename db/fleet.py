"""The machines of a fleet: who they are, which of them live, and which sessions and runs are theirs.

Machines share a PostgreSQL. Only its clock is compared with leases, because the clocks of the machines may be minutes apart. A
process is looked for by its pid on its own machine alone; of another machine only leases tell whether it lives. In SQLite there
is one machine, whose name is empty, and no lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, func, select, text, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import LIVE, OVER
from kgorch.db.location import LEASE_S, Fleet
from kgorch.db.runs import machine_of, to_info
from kgorch.db.tables import Machine, Run, SessionRow


class MachineInfo(NamedTuple):
    name: str
    host: str
    boot_id: str
    home: str
    state_id: str
    version: str
    gpus: Sequence[str]
    daemon_pid: int | None
    seen_at: datetime


class FleetSession(NamedTuple):
    """A session that is not over, of any machine.

    Attributes:
        is_leased: its supervisor has renewed its lease in time.
    """

    machine: str
    run: str
    run_number: int
    number: int
    phase: str
    stage: str
    step: int
    steps_total: int
    started_at: datetime
    is_leased: bool


def settings(engine: Engine) -> Fleet | None:
    """None where the database is SQLite."""
    return getattr(engine.dialect, "kgorch_fleet", None)


def lease_of(engine: Engine) -> timedelta:
    """How long a machine of the fleet counts as alive without a sign of it."""
    fleet = settings(engine)
    return timedelta(seconds=fleet.lease_s if fleet else LEASE_S)


def extra_lease(engine: Engine) -> timedelta:
    """For how long after its lease a claimant on this machine, whose process lives, does not count as hanging."""
    return timedelta(seconds=max(0.0, LEASE_S - lease_of(engine).total_seconds()))


def lease_end(bind: Connection | Orm, engine: Engine) -> datetime:
    """When a lease that is renewed now expires, by the server's clock."""
    return utc_now(bind) + lease_of(engine)


def is_elsewhere(engine: Engine, machine: str) -> bool:
    """Whether that is another machine than this one. A row without a machine is taken to be of this one."""
    return machine not in ("", machine_of(engine))


def utc_now(bind: Connection | Orm) -> datetime:
    """The instant by the clock that all machines share: the server's; without a fleet this machine's."""
    connection = bind.connection() if isinstance(bind, Orm) else bind
    if connection.dialect.name != "postgresql":
        return datetime.now(UTC)
    now: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
    return now.astimezone(UTC)


def server_now(engine: Engine) -> datetime:
    """The same, for a caller without a transaction."""
    if settings(engine) is None:
        return datetime.now(UTC)
    with engine.connect() as connection:
        return utc_now(connection)


@contextmanager
def one_at_a_time(orm: Orm, key: str) -> Iterator[None]:
    """Until the transaction ends, no other connection is in a block of the same key. SQLite has one writer anyway."""
    if orm.connection().dialect.name == "postgresql":
        orm.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": f"kgorch:{key}"})
    yield


# Machines


def register(engine: Engine, columns: Mapping[str, Any]) -> MachineInfo | None:
    """Write that this machine lives. Returns the row as it was before; None for a new machine, or where there is no fleet.

    Args:
        columns: of the machine that differ from before; all of them the first time.
    """
    if not (name := machine_of(engine)):
        return None
    from sqlalchemy.dialects.postgresql import insert  # 40 ms, which a command without a fleet need not wait for

    with Orm(engine) as orm, orm.begin():
        before = orm.get(Machine, name)
        info = to_info(MachineInfo, before) if before else None
        values = {**columns, "seen_at": utc_now(orm)}
        statement = insert(Machine).values(name=name, **values)
        orm.execute(statement.on_conflict_do_update(index_elements=[Machine.name], set_=values))
        return info


def touch(engine: Engine) -> None:
    """Write that this machine, which is registered, lives."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Machine).where(Machine.name == machine_of(engine)).values(seen_at=utc_now(orm)))


def machines(engine: Engine) -> list[MachineInfo]:
    """All machines by name."""
    with Orm(engine) as orm:
        return [to_info(MachineInfo, row) for row in orm.scalars(select(Machine).order_by(Machine.name))]


def sharing_state(engine: Engine) -> frozenset[str]:
    """Names of the machines that have the same state folder as this one, itself among them; the files of their runs are here."""
    mine = machine_of(engine)
    with Orm(engine) as orm:
        state_id = select(Machine.state_id).where(Machine.name == mine).scalar_subquery()
        return frozenset({mine, *orm.scalars(select(Machine.name).where(Machine.state_id == state_id))})


def alive_machines(engine: Engine) -> frozenset[str]:
    """Names of the machines whose daemon, or a supervisor there, has written within a lease."""
    with Orm(engine) as orm:
        oldest_at = utc_now(orm) - lease_of(engine)
        return frozenset(orm.scalars(select(Machine.name).where(Machine.seen_at > oldest_at)))


def is_machine_alive(engine: Engine, name: str) -> bool:
    """Whether its daemon, or a supervisor there, has written within a lease."""
    return name in alive_machines(engine)


# Sessions


def renew_session(engine: Engine, session_id: int) -> bool:
    """Extend a session's lease. False where the session is over: another machine has taken its run."""
    with Orm(engine) as orm, orm.begin():
        live = SessionRow.id == session_id, SessionRow.phase.not_in(OVER)
        values = {"lease_expires_at": lease_end(orm, engine)}
        result = orm.execute(update(SessionRow).where(*live).values(**values))
        orm.execute(update(Machine).where(Machine.name == machine_of(engine)).values(seen_at=utc_now(orm)))
        return int(result.rowcount) == 1  # type: ignore[attr-defined]


def is_leased(engine: Engine, session_id: int) -> bool:
    """Whether the supervisor of a session has renewed its lease in time."""
    with Orm(engine) as orm:
        mine = SessionRow.id == session_id, SessionRow.lease_expires_at > utc_now(orm)
        return orm.scalar(select(SessionRow.id).where(*mine)) is not None


def live_sessions(engine: Engine) -> list[FleetSession]:
    """Sessions of all machines that are not over, by machine and run."""
    with Orm(engine) as orm:
        now = utc_now(orm)
        columns = (
            SessionRow.machine, Run.name, Run.number, SessionRow.number, SessionRow.phase, SessionRow.stage, SessionRow.step,
            SessionRow.steps_total, SessionRow.started_at, SessionRow.lease_expires_at,
        )  # fmt: skip
        query = select(*columns).join(Run, Run.id == SessionRow.run_id).where(SessionRow.phase.in_(LIVE))
        rows = orm.execute(query.order_by(SessionRow.machine, Run.name, Run.number)).all()
        return [FleetSession._make([*row[:-1], bool(row[-1] and row[-1] > now)]) for row in rows]
