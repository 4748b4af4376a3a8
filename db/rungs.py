"""Rows of rungs: changes of memory settings (the memory ladder) and remedies for a diverging training."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import EventKind
from kgorch.db.rows import RungInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import EventRow, RungRow


def add(engine: Engine, run_id: str, session_id: int, **columns: Any) -> None:
    """Insert a row and its event in one transaction."""
    with Orm(engine) as orm, orm.begin():
        orm.add_all(new_rows(run_id, session_id, **columns))


def new_rows(run_id: str, session_id: int, **columns: Any) -> tuple[RungRow, EventRow]:
    """A rung and its event in the journal, for a transaction of the caller."""
    row = RungRow(
        **{"run_id": run_id, "session_id": session_id, "at": now(), "up": False, "changes_result": False, **columns}
    )
    return row, event_of(row)


def event_of(row: RungRow) -> EventRow:
    """The journal's event for a row."""
    facts = {name: getattr(row, name) for name in ("stage", "step", "rung", "why", "up", "changes_result")}
    return EventRow(run_id=row.run_id, session_id=row.session_id, at=row.at, kind=EventKind.RUNG_TAKEN, facts=facts)


def of_run(engine: Engine, run_id: str) -> list[RungInfo]:
    """All rows of a run, oldest first."""
    with Orm(engine) as orm:
        query = select(RungRow).where(RungRow.run_id == run_id).order_by(RungRow.id)
        return [to_info(RungInfo, row) for row in orm.scalars(query)]


def of_hardware(engine: Engine, *, plan_hash: str, stage: str, device: str, world_size: int) -> list[RungInfo]:
    """Changes of memory settings on that hardware, oldest first, of all runs of the plan. The last one holds what worked.

    Remedies are left out: they have no `settings` of their own to start with.
    """
    with Orm(engine) as orm:
        query = select(RungRow).where(
            RungRow.plan_hash == plan_hash,
            RungRow.stage == stage,
            RungRow.device == device,
            RungRow.world_size == world_size,
        )
        rows = orm.scalars(query.order_by(RungRow.id))
        return [to_info(RungInfo, row) for row in rows if "settings" in row.settings]
