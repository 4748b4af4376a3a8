"""Verbs on the rungs of the memory ladder that runs have taken."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session as Orm

from db.records import RungInfo
from db.runs import now, plain
from db.tables import EventRow, RungRow
from orchestrator.core.codes import EventKind


def add(engine: Engine, run_id: str, session_id: int, **columns: Any) -> None:
    """The rung, and its event in the journal."""
    with Orm(engine) as orm, orm.begin():
        row = RungRow(
            **{"run_id": run_id, "session_id": session_id, "at": now(), "up": False, "changes_result": False, **columns}
        )
        orm.add_all([row, told(row)])


def told(row: RungRow) -> EventRow:
    """What the journal says of it."""
    facts = {name: getattr(row, name) for name in ("stage", "step", "rung", "why", "up", "changes_result")}
    return EventRow(run_id=row.run_id, session_id=row.session_id, at=row.at, kind=EventKind.RUNG_TAKEN, facts=facts)


def of_run(engine: Engine, run_id: str) -> list[RungInfo]:
    """All of a run, oldest first."""
    with Orm(engine) as orm:
        chosen = select(RungRow).where(RungRow.run_id == run_id).order_by(RungRow.id)
        return [plain(RungInfo, row) for row in orm.scalars(chosen)]


def at(engine: Engine, *, plan_hash: str, stage: str, device: str, world: int) -> list[RungInfo]:
    """Changes of the settings there, oldest first, of all runs of that plan: the last is what worked."""
    with Orm(engine) as orm:
        chosen = select(RungRow).where(
            RungRow.plan_hash == plan_hash,
            RungRow.stage == stage,
            RungRow.device == device,
            RungRow.world == world,
        )
        rows = orm.scalars(chosen.order_by(RungRow.id))
        return [plain(RungInfo, row) for row in rows if "settings" in row.settings]
