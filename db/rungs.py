"""Rows of rungs: changes of memory settings (the memory ladder) and remedies for a diverging training."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import EventKind
from kgorch.db.rows import RungInfo, RunInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import EventRow, Run, RungRow


def add(engine: Engine, run_id: str, session_id: int, *, at: datetime | None = None, **columns: Any) -> None:
    """Insert a row and its event in one transaction.

    Args:
        at: when it was taken; None for now. A second call with the same one changes nothing.
    """
    row, event = new_rows(run_id, session_id, at=at or now(), **columns)
    with Orm(engine) as orm, orm.begin():
        if not at or not is_written(orm, event):
            orm.add_all((row, event))


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


def is_written(orm: Orm, event: EventRow) -> bool:
    """Whether an event is the newest of its kind in its session already.

    A connection may fail after a COMMIT was sent and before its answer came. Whoever writes the entry again cannot know that it is
    written. By its instant, which stays the same, it is recognized.
    """
    of_kind = EventRow.session_id == event.session_id, EventRow.kind == event.kind
    newest = select(EventRow.at).where(EventRow.run_id == event.run_id, *of_kind).order_by(EventRow.id.desc()).limit(1)
    return orm.scalar(newest) == event.at


def of_run(engine: Engine, run_id: str) -> list[RungInfo]:
    """All rows of a run, oldest first."""
    with Orm(engine) as orm:
        query = select(RungRow).where(RungRow.run_id == run_id).order_by(RungRow.id)
        return [to_info(RungInfo, row) for row in orm.scalars(query)]


def of_hardware(engine: Engine, run: RunInfo, *, stage: str, device: str, world_size: int) -> list[RungInfo]:
    """Changes of memory settings on that hardware, oldest first, of all runs of the plan. The last one holds what worked.

    Runs of a plan have its hash, and the name and folder of `run`: two projects may say no more than `entry = "train.py"`, which
    is the same hash. Remedies are left out: they have no `settings` of their own to start with.
    """
    of_plan = select(Run.id).where(Run.name == run.name, Run.workdir == run.workdir)
    with Orm(engine) as orm:
        query = select(RungRow).where(
            RungRow.plan_hash == run.plan_hash,
            RungRow.run_id.in_(of_plan),
            RungRow.stage == stage,
            RungRow.device == device,
            RungRow.world_size == world_size,
        )
        rows = orm.scalars(query.order_by(RungRow.id))
        return [to_info(RungInfo, row) for row in rows if "settings" in row.settings]
