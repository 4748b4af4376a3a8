"""Verbs on runs and their stages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import Engine, delete, func, select, update
from sqlalchemy.orm import Session as Orm

from db.records import RunInfo, StageInfo
from db.tables import Base, Resume, Run, Stage
from orchestrator.core.codes import ResumeState, RunState

Info = TypeVar("Info")


def plain(kind: type[Info], row: Base) -> Info:
    """A row as the record of that kind, whose fields are named as the columns."""
    return kind(**{name: getattr(row, name) for name in kind._fields})  # type: ignore[attr-defined]


def now() -> datetime:
    return datetime.now(UTC)


def create(engine: Engine, *, stages: Sequence[str], **columns: Any) -> RunInfo:
    with Orm(engine) as orm, orm.begin():
        run = Run(created_at=now(), state=RunState.ACTIVE, why="", **columns)
        orm.add(run)
        orm.flush()
        orm.add_all(Stage(run_id=run.id, position=position, name=name) for position, name in enumerate(stages))
        return plain(RunInfo, run)


def newest(engine: Engine, name: str) -> RunInfo | None:
    with Orm(engine) as orm:
        run = orm.scalars(select(Run).where(Run.name == name).order_by(Run.number.desc()).limit(1)).first()
        return plain(RunInfo, run) if run else None


def by_id(engine: Engine, run_id: str) -> RunInfo | None:
    with Orm(engine) as orm:
        run = orm.get(Run, run_id)
        return plain(RunInfo, run) if run else None


def of_name(engine: Engine, name: str) -> list[RunInfo]:
    """All runs of that name, the newest number first."""
    with Orm(engine) as orm:
        return [
            plain(RunInfo, run) for run in orm.scalars(select(Run).where(Run.name == name).order_by(Run.number.desc()))
        ]


def everyone(engine: Engine, *, limit: int | None = None) -> list[RunInfo]:
    """All runs, the newest first; those that no limit leaves out."""
    with Orm(engine) as orm:
        return [plain(RunInfo, run) for run in orm.scalars(select(Run).order_by(Run.created_at.desc()).limit(limit))]


def numbered(engine: Engine, name: str, number: int) -> RunInfo | None:
    with Orm(engine) as orm:
        run = orm.scalars(select(Run).where(Run.name == name, Run.number == number)).first()
        return plain(RunInfo, run) if run else None


def newest_in(engine: Engine, states: Sequence[RunState]) -> RunInfo | None:
    """The newest run in one of these states; one look into the index a state."""
    with Orm(engine) as orm:
        of_state = [select(Run).where(Run.state == state).order_by(Run.created_at.desc()).limit(1) for state in states]
        found = [run for chosen in of_state if (run := orm.scalars(chosen).first())]
        return plain(RunInfo, max(found, key=lambda run: run.created_at)) if found else None


def names(engine: Engine, *, beginning: str = "", limit: int) -> list[str]:
    """Names that begin so, in their order."""
    with Orm(engine) as orm:
        chosen = select(Run.name).where(Run.name >= beginning).order_by(Run.name).distinct().limit(limit)
        return [name for name in orm.scalars(chosen) if name.startswith(beginning)]


def count(engine: Engine) -> int:
    with Orm(engine) as orm:
        return orm.scalar(select(func.count()).select_from(Run)) or 0


def set_state(engine: Engine, run_id: str, state: RunState, why: str = "") -> None:
    with Orm(engine) as orm, orm.begin():
        finished_at = now() if state == RunState.FINISHED else None
        orm.execute(update(Run).where(Run.id == run_id).values(state=state, why=why, finished_at=finished_at))


def set_plan(engine: Engine, run_id: str, *, stages: Sequence[str], **columns: Any) -> None:
    """Take a changed plan; stages that it names anew come in, those that it drops go if they were never done."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Run).where(Run.id == run_id).values(**columns))
        known = {stage.name: stage for stage in orm.scalars(select(Stage).where(Stage.run_id == run_id))}
        for position, name in enumerate(stages):
            if name in known:
                known[name].position = position
            else:
                orm.add(Stage(run_id=run_id, position=position, name=name))
        orm.execute(delete(Stage).where(Stage.run_id == run_id, Stage.name.not_in(stages), Stage.finished_at.is_(None)))


def stages(engine: Engine, run_id: str) -> list[StageInfo]:
    with Orm(engine) as orm:
        return [
            plain(StageInfo, row)
            for row in orm.scalars(select(Stage).where(Stage.run_id == run_id).order_by(Stage.position))
        ]


def finish_stage(engine: Engine, run_id: str, name: str, note: str = "") -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(
            update(Stage).where(Stage.run_id == run_id, Stage.name == name).values(finished_at=now(), note=note)
        )


def reopen_stage(engine: Engine, run_id: str, name: str, note: str) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Stage).where(Stage.run_id == run_id, Stage.name == name).values(finished_at=None, note=note))


def supersede(engine: Engine, run_id: str, why: str) -> None:
    """A run that another has taken the place of: it is not gone on with by itself any more."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(
            update(Run)
            .where(Run.id == run_id, Run.state != RunState.FINISHED)
            .values(state=RunState.SUPERSEDED, why=why)
        )
        orm.execute(
            delete(Resume).where(Resume.run_id == run_id, Resume.state.in_((ResumeState.DUE, ResumeState.CLAIMED)))
        )


def remove(engine: Engine, run_id: str) -> None:
    """Delete a run with all rows that hang on it. What its sessions used of a pool stays, as use of no session."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(delete(Run).where(Run.id == run_id))
