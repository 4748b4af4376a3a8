"""Runs and their stages: create, find, change and delete their rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Engine, Update, delete, func, select, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import REMOTE_OPEN, RemoteState, RemoteWait, ResumeState, RunState
from kgorch.db.rows import RunInfo, StageInfo
from kgorch.db.tables import Base, EventRow, RemoteSessionRow, Resume, Run, SessionRow, SlurmJobRow, Stage

Info = TypeVar("Info")


def machine_of(engine: Engine) -> str:
    """The name of this machine in a fleet; empty without one."""
    fleet = getattr(engine.dialect, "kgorch_fleet", None)
    return fleet.machine if fleet else ""


def to_info(kind: type[Info], row: Base) -> Info:
    """An ORM object as a named tuple of db/rows.py, whose fields are columns of its table."""
    return kind(**{name: getattr(row, name) for name in kind._fields})  # type: ignore[attr-defined]


def now() -> datetime:
    return datetime.now(UTC)


def create(engine: Engine, *, stages: Sequence[str], **columns: Any) -> RunInfo:
    with Orm(engine) as orm, orm.begin():
        values = {"machine": machine_of(engine), **columns}
        run = Run(created_at=now(), state=RunState.ACTIVE, why="", **values)
        orm.add(run)
        orm.flush()
        orm.add_all(Stage(run_id=run.id, position=position, name=name) for position, name in enumerate(stages))
        return to_info(RunInfo, run)


def newest(engine: Engine, name: str) -> RunInfo | None:
    """The run of that name with the highest number."""
    with Orm(engine) as orm:
        run = orm.scalars(select(Run).where(Run.name == name).order_by(Run.number.desc()).limit(1)).first()
        return to_info(RunInfo, run) if run else None


def by_id(engine: Engine, run_id: str) -> RunInfo | None:
    with Orm(engine) as orm:
        run = orm.get(Run, run_id)
        return to_info(RunInfo, run) if run else None


def of_name(engine: Engine, name: str) -> list[RunInfo]:
    """All runs of that name, the highest number first."""
    with Orm(engine) as orm:
        query = select(Run).where(Run.name == name).order_by(Run.number.desc())
        return [to_info(RunInfo, run) for run in orm.scalars(query)]


def all_runs(engine: Engine, *, limit: int | None = None) -> list[RunInfo]:
    """All runs, newest first; with a limit the newest ones."""
    with Orm(engine) as orm:
        return [to_info(RunInfo, run) for run in orm.scalars(select(Run).order_by(Run.created_at.desc()).limit(limit))]


def by_number(engine: Engine, name: str, number: int) -> RunInfo | None:
    with Orm(engine) as orm:
        run = orm.scalars(select(Run).where(Run.name == name, Run.number == number)).first()
        return to_info(RunInfo, run) if run else None


def named(engine: Engine, name: str) -> RunInfo | None:
    """The newest run of this name, or NAME/NUMBER."""
    base, slash, number = name.rpartition("/")
    run = newest(engine, name)
    if run is None and slash and number.isdecimal() and len(number) < 10:
        run = by_number(engine, base, int(number))
    return run


def newest_in_states(engine: Engine, states: Sequence[RunState]) -> RunInfo | None:
    """The newest run in one of these states.

    One query for each state, because the index (state, created_at) answers only an equality with a single row.
    """
    with Orm(engine) as orm:
        queries = [select(Run).where(Run.state == state).order_by(Run.created_at.desc()).limit(1) for state in states]
        newest_of_each = [run for query in queries if (run := orm.scalars(query).first())]
        return to_info(RunInfo, max(newest_of_each, key=lambda run: run.created_at)) if newest_of_each else None


def names_with_prefix(engine: Engine, *, prefix: str = "", limit: int) -> list[str]:
    """Names of runs that begin so, sorted."""
    with Orm(engine) as orm:
        # A range of the index. LIKE ignores case in SQLite, so it would read the whole table.
        query = select(Run.name).where(Run.name >= prefix).order_by(Run.name).distinct().limit(limit)
        return [name for name in orm.scalars(query) if name.startswith(prefix)]


def count(engine: Engine) -> int:
    with Orm(engine) as orm:
        return orm.scalar(select(func.count()).select_from(Run)) or 0


def last_activity_at(engine: Engine, run: RunInfo) -> datetime:
    """When something last happened in a run: the latest of its creation, the end of a session or a Slurm job, an event (sessions
    at other places leave one as they end), and a start from the queue (which may leave none where it fails)."""
    ended = select(func.max(SessionRow.ended_at)).where(SessionRow.run_id == run.id)
    job = select(func.max(SlurmJobRow.ended_at)).where(SlurmJobRow.run_id == run.id)
    event = select(EventRow.at).where(EventRow.run_id == run.id).order_by(EventRow.id.desc()).limit(1)
    start = select(func.max(Resume.claimed_at)).where(Resume.run_id == run.id)
    with Orm(engine) as orm:
        return max(filter(None, (run.created_at, *(orm.scalar(query) for query in (ended, job, event, start)))))


def set_state(engine: Engine, run_id: str, state: RunState, why: str = "") -> None:
    with Orm(engine) as orm, orm.begin():
        finished_at = now() if state == RunState.FINISHED else None
        orm.execute(update(Run).where(Run.id == run_id).values(state=state, why=why, finished_at=finished_at))


def set_plan(engine: Engine, run_id: str, *, stages: Sequence[str], **columns: Any) -> None:
    """Store a changed plan. New stages are added; of those that it no longer has the finished ones are kept, before all others."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Run).where(Run.id == run_id).values(**columns))
        existing = {stage.name: stage for stage in orm.scalars(select(Stage).where(Stage.run_id == run_id))}
        for position, name in enumerate(stages):
            if name in existing:
                existing[name].position = position
            else:
                orm.add(Stage(run_id=run_id, position=position, name=name))
        gone = Stage.run_id == run_id, Stage.name.not_in(stages)
        orm.execute(delete(Stage).where(*gone, Stage.finished_at.is_(None)))
        orm.execute(update(Stage).where(*gone, Stage.position >= 0).values(position=-1))


def stages(engine: Engine, run_id: str) -> list[StageInfo]:
    """In the order of the plan."""
    with Orm(engine) as orm:
        query = select(Stage).where(Stage.run_id == run_id).order_by(Stage.position)
        return [to_info(StageInfo, row) for row in orm.scalars(query)]


def finish_stage(engine: Engine, run_id: str, name: str, note: str = "") -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(stage_finished(run_id, name, note))


def stage_finished(run_id: str, name: str, note: str = "") -> Update:
    """The statement, for a transaction of the caller."""
    return update(Stage).where(Stage.run_id == run_id, Stage.name == name).values(finished_at=now(), note=note)


def reopen_stage(engine: Engine, run_id: str, name: str, note: str) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Stage).where(Stage.run_id == run_id, Stage.name == name).values(finished_at=None, note=note))


def supersede(engine: Engine, run_id: str, why: str) -> None:
    """Mark a run as replaced by another one and take it out of the queue, so that the daemon does not resume it.

    A session at another place, after which the user has stopped the run, is no longer followed: its row is closed.
    """
    with Orm(engine) as orm, orm.begin():
        orm.execute(
            update(Run)
            .where(Run.id == run_id, Run.state != RunState.FINISHED)
            .values(state=RunState.SUPERSEDED, why=why)
        )
        orm.execute(
            delete(Resume).where(Resume.run_id == run_id, Resume.state.in_((ResumeState.DUE, ResumeState.CLAIMED)))
        )
        followed = RemoteSessionRow.run_id == run_id, RemoteSessionRow.state.in_(REMOTE_OPEN)
        closed = {"state": RemoteState.STOPPED, "wait": RemoteWait.NONE, "why": why, "is_last": True}
        orm.execute(update(RemoteSessionRow).where(*followed).values(**closed))


def remove(engine: Engine, run_id: str) -> None:
    """Delete a run with all rows that refer to it.

    Its charges stay without a session (ON DELETE SET NULL): the quota was used, whatever becomes of the run.
    """
    with Orm(engine) as orm, orm.begin():
        orm.execute(delete(Run).where(Run.id == run_id))
