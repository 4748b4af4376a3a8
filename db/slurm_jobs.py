"""Verbs on the Slurm jobs that run sessions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import EventKind, ResumeState
from kgorch.db.rows import SlurmJobInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import EventRow, Resume, Run, SlurmJobRow


def newest(engine: Engine, run_id: str) -> SlurmJobInfo | None:
    with Orm(engine) as orm:
        query = select(SlurmJobRow).where(SlurmJobRow.run_id == run_id).order_by(SlurmJobRow.id.desc()).limit(1)
        row = orm.scalars(query).first()
        return to_info(SlurmJobInfo, row) if row else None


def of_number(engine: Engine, run_id: str, job: str) -> SlurmJobInfo | None:
    """The newest row of a job of that number."""
    with Orm(engine) as orm:
        query = select(SlurmJobRow).where(SlurmJobRow.run_id == run_id, SlurmJobRow.job == job)
        row = orm.scalars(query.order_by(SlurmJobRow.id.desc()).limit(1)).first()
        return to_info(SlurmJobInfo, row) if row else None


def open_job(engine: Engine, run_id: str) -> SlurmJobInfo | None:
    """The run's job that waits, runs, or is to run again."""
    row = newest(engine, run_id)
    return row if row and row.ended_at is None else None


def open_jobs(engine: Engine) -> list[tuple[str, int, SlurmJobInfo]]:
    """Name and number of the run of each job that waits, runs, or is to run again."""
    with Orm(engine) as orm:
        query = select(Run.name, Run.number, SlurmJobRow).join(Run, Run.id == SlurmJobRow.run_id)
        rows = orm.execute(query.where(SlurmJobRow.ended_at.is_(None)).order_by(SlurmJobRow.id))
        return [(name, number, to_info(SlurmJobInfo, row)) for name, number, row in rows]


def begin(
    engine: Engine, run_id: str, *, name: str, state: str, requeue: bool, follows: SlurmJobInfo | None = None
) -> SlurmJobInfo | None:
    """A job that is about to be submitted. None where the run has an open one.

    Args:
        follows: the job that it succeeds, which is closed in the same transaction.
    """
    at = now()
    try:
        with Orm(engine) as orm, orm.begin():
            if follows:
                closing = update(SlurmJobRow).where(SlurmJobRow.id == follows.id)
                orm.execute(closing.values(ended_at=at, why="another job follows it"))
            row = SlurmJobRow(
                run_id=run_id,
                name=name,
                state=state,
                requeue=requeue,
                follows=follows.job if follows else "",
                submitted_at=at,
                seen_at=at,
            )
            orm.add(row)
            orm.flush()
            return to_info(SlurmJobInfo, row)
    except IntegrityError:
        return None


def save(engine: Engine, row_id: int, **columns: Any) -> SlurmJobInfo:
    with Orm(engine) as orm, orm.begin():
        row = orm.get_one(SlurmJobRow, row_id)
        for name, value in columns.items():
            setattr(row, name, value)
        orm.flush()
        return to_info(SlurmJobInfo, row)


def close(engine: Engine, row: SlurmJobInfo, why: str, *, is_seen: bool = False, **columns: Any) -> SlurmJobInfo:
    """The job is over and none follows it: the run waits for a user, and no daemon starts it on another machine.

    Args:
        is_seen: by somebody who looked from outside. Nothing changes where the job is closed already: its own process knows why.
    """
    with Orm(engine) as orm, orm.begin():
        job = orm.get_one(SlurmJobRow, row.id, with_for_update=True)
        if job.ended_at and is_seen:
            return to_info(SlurmJobInfo, job)
        waits = Resume.run_id == row.run_id, Resume.state == ResumeState.DUE
        orm.execute(update(Resume).where(*waits).values(due_at=None))
        facts = {"job": row.job, "state": columns.get("state", row.state), "why": why}
        orm.add(EventRow(run_id=row.run_id, at=now(), kind=EventKind.SLURM_ENDED, phase="", facts=facts))
        job.ended_at, job.why = now(), why
        for name, value in columns.items():
            setattr(job, name, value)
        orm.flush()
        return to_info(SlurmJobInfo, job)


def forget(engine: Engine, row: SlurmJobInfo) -> None:
    """It was never submitted: Slurm refused it."""
    with Orm(engine) as orm, orm.begin():
        orm.delete(orm.get_one(SlurmJobRow, row.id))
