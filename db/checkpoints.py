"""Rows of checkpoints. The folder with its manifest is authoritative; the row holds what was learned about it.

The order of a run's checkpoints is that of its stages and steps, never that of a clock, which may have been set back. The first
stage that is not finished comes last in it: the run goes on there, and later stages have checkpoints, too, where it is extended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Select, func, select, update
from sqlalchemy.orm import Session as Orm

from kgorch.core.codes import CheckpointState
from kgorch.db.rows import CheckpointInfo
from kgorch.db.runs import now, to_info
from kgorch.db.tables import Checkpoint, Stage

_POSITION = func.coalesce(Stage.position, -1)
_IN_STAGE = (Checkpoint.step, Checkpoint.final, Checkpoint.id)


def record(engine: Engine, run_id: str, path: str, *, state: CheckpointState, **columns: Any) -> None:
    """Insert or update the row of the checkpoint at `path`; paths are unique."""
    with Orm(engine) as orm, orm.begin():
        row = orm.scalars(select(Checkpoint).where(Checkpoint.path == path)).first()
        if row is None:
            row = Checkpoint(**{"run_id": run_id, "path": path, "created_at": now(), **columns})
            orm.add(row)
        row.state, row.why = state, ""
        for name, value in columns.items():
            setattr(row, name, value)
        if state == CheckpointState.VERIFIED:
            row.verified_at = now()


def set_state(engine: Engine, path: str, state: CheckpointState, why: str = "") -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(state=state, why=why))


def mark_dropped(engine: Engine, path: str) -> bool:
    """Mark a checkpoint that is about to be deleted. False if it is pinned: then it stays as it is."""
    with Orm(engine) as orm, orm.begin():
        query = update(Checkpoint).where(Checkpoint.path == path, Checkpoint.pinned.is_(False))
        result = orm.execute(query.values(state=CheckpointState.DROPPED, why="").returning(Checkpoint.id))
        return result.first() is not None


def set_pinned(engine: Engine, path: str, pinned: bool) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(pinned=pinned))


def set_metrics(engine: Engine, path: str, metrics: Mapping[str, float], measured: Mapping[str, int]) -> None:
    """Store metrics that were measured on its weights after it was recorded.

    Args:
        measured: metric → the step on whose weights it was measured.
    """
    with Orm(engine) as orm, orm.begin():
        columns = {"metrics": dict(metrics), "measured": dict(measured)}
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(**columns))


def mark_best(engine: Engine, run_id: str, best: Mapping[str, str]) -> None:
    """Mark the best checkpoint of each stage, and no other one of the run.

    Args:
        best: path → the plan's keep.best (`dice:max`).
    """
    with Orm(engine) as orm, orm.begin():
        changes = (Checkpoint.run_id == run_id) & ((Checkpoint.best != "") | Checkpoint.path.in_(best))
        for row in orm.scalars(select(Checkpoint).where(changes)):
            row.best = best.get(row.path, "")


def best(engine: Engine, run_id: str) -> CheckpointInfo | None:
    """The best checkpoint of the plan's last stage that has one."""
    query = _with_stages(run_id).order_by(_POSITION, *_IN_STAGE)
    query = query.where(Checkpoint.state == CheckpointState.VERIFIED, Checkpoint.best != "")
    with Orm(engine) as orm:
        rows = orm.scalars(query).all()
        return to_info(CheckpointInfo, rows[-1]) if rows else None


def set_path(engine: Engine, path: str, to: str) -> None:
    """Record that the folder was moved."""
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(path=to))


def supersede(engine: Engine, run_id: str, stage: str, *, before: datetime, why: str) -> None:
    """Mark the checkpoints of a stage from before it was restarted, whose weights no longer fit its settings."""
    with Orm(engine) as orm, orm.begin():
        usable = (
            Checkpoint.run_id == run_id,
            Checkpoint.stage == stage,
            Checkpoint.state.in_((CheckpointState.VERIFIED, CheckpointState.BROKEN)),
        )
        orm.execute(
            update(Checkpoint)
            .where(*usable, Checkpoint.created_at < before)
            .values(state=CheckpointState.SUPERSEDED, why=why)
        )


def of_run(engine: Engine, run_id: str, *states: str) -> list[CheckpointInfo]:
    """Checkpoints in these states, or in any, in the run's order. In a long run most are dropped."""
    query = _in_order(run_id)
    with Orm(engine) as orm:
        rows = orm.scalars(query.where(Checkpoint.state.in_(states)) if states else query)
        return [to_info(CheckpointInfo, row) for row in rows]


def is_recorded(engine: Engine, run_id: str, stage: str, folder: str) -> bool:
    """Whether there is a checkpoint of the stage in a folder of this name, wherever that lies."""
    in_folder = Checkpoint.path.endswith(f"/{folder}", autoescape=True)
    query = select(Checkpoint.id).where(Checkpoint.run_id == run_id, Checkpoint.stage == stage, in_folder).limit(1)
    with Orm(engine) as orm:
        return orm.scalar(query) is not None


def verified_with_numbers(engine: Engine, run_id: str) -> list[tuple[int, CheckpointInfo]]:
    """The verified checkpoints in the run's order, each with the number of those before it in its stage, dropped ones included.

    Retention asks for this after each save. The database counts, because a long run has thousands of dropped rows.
    """
    before = func.row_number().over(partition_by=Checkpoint.stage, order_by=_IN_STAGE) - 1
    numbers = select(Checkpoint.id, before.label("number")).where(Checkpoint.run_id == run_id).subquery()
    query = (
        _in_order(run_id)
        .join(numbers, numbers.c.id == Checkpoint.id)
        .where(Checkpoint.state == CheckpointState.VERIFIED)
    )
    with Orm(engine) as orm:
        return [
            (number, to_info(CheckpointInfo, row)) for row, number in orm.execute(query.add_columns(numbers.c.number))
        ]


def dropped_at_steps(engine: Engine, run_id: str, steps: Collection[int]) -> list[CheckpointInfo]:
    """The checkpoints of these steps that retention or a user has deleted.

    Those that only did not come here from another machine say so in `why`.
    """
    deleted = Checkpoint.state == CheckpointState.DROPPED, Checkpoint.why == ""
    with Orm(engine) as orm:
        query = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.step.in_(steps), *deleted)
        return [to_info(CheckpointInfo, row) for row in orm.scalars(query)]


def newest_verified(engine: Engine, run_id: str) -> CheckpointInfo | None:
    """The one from which the run goes on, the last in the run's order.

    One of a stage that the plan no longer has comes only where there is no other. One query for each stage, so that each ends at
    the first entry of the index.
    """
    verified = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.VERIFIED)
    last = verified.order_by(Checkpoint.step.desc(), Checkpoint.final.desc(), Checkpoint.id.desc()).limit(1)
    with Orm(engine) as orm:
        rows = orm.scalars(select(Stage).where(Stage.run_id == run_id).order_by(Stage.position.desc())).all()
        unfinished = [stage.name for stage in rows if stage.finished_at is None]
        stages = [*unfinished[-1:], *(stage.name for stage in rows)]
        conditions = [Checkpoint.stage == name for name in stages] + [Checkpoint.stage.not_in(stages)]
        row = next((row for condition in conditions if (row := orm.scalars(last.where(condition)).first())), None)
        return to_info(CheckpointInfo, row) if row else None


def verified_paths(engine: Engine, run_id: str) -> set[str]:
    """Paths of the verified checkpoints."""
    with Orm(engine) as orm:
        query = select(Checkpoint.path).where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.VERIFIED)
        return set(orm.scalars(query))


def _in_order(run_id: str) -> Select[Any]:
    unfinished = select(func.min(Stage.position)).where(Stage.run_id == run_id, Stage.finished_at.is_(None))
    goes_on = func.coalesce(unfinished.scalar_subquery(), -2) == _POSITION
    return _with_stages(run_id).order_by(goes_on, _POSITION, *_IN_STAGE)


def _with_stages(run_id: str) -> Select[Any]:
    stage = (Stage.run_id == Checkpoint.run_id) & (Stage.name == Checkpoint.stage)
    return select(Checkpoint).outerjoin(Stage, stage).where(Checkpoint.run_id == run_id)


def save_history(engine: Engine, run_id: str, *, limit: int) -> tuple[tuple[int, float], ...]:
    """Bytes and seconds of the run's newest saves, oldest of them first. Saves of unknown duration are left out."""
    with Orm(engine) as orm:
        query = (
            select(Checkpoint.bytes, Checkpoint.save_duration_s)
            .where(Checkpoint.run_id == run_id, Checkpoint.save_duration_s > 0)
            .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
            .limit(limit)
        )
        return tuple((size, save_duration_s) for size, save_duration_s in reversed(orm.execute(query).all()))


def newest_by_session(engine: Engine, session_ids: Sequence[int]) -> dict[int, CheckpointInfo]:
    """Session id → the last checkpoint that was verified in it, for each of these sessions that has one."""
    with Orm(engine) as orm:
        query = (
            select(Checkpoint)
            .where(Checkpoint.session_id.in_(session_ids), Checkpoint.verified_at.is_not(None))
            .order_by(Checkpoint.created_at, Checkpoint.id)
        )
        return {
            row.session_id: to_info(CheckpointInfo, row) for row in orm.scalars(query) if row.session_id is not None
        }


def metrics_by_step(engine: Engine, run_id: str, stage: str, *, limit: int) -> dict[int, dict[str, float]]:
    """Step → the metrics at that step's save, of a stage's newest checkpoints, deleted ones included."""
    with Orm(engine) as orm:
        query = (
            select(Checkpoint.step, Checkpoint.metrics)
            .where(
                Checkpoint.run_id == run_id,
                Checkpoint.stage == stage,
                Checkpoint.state.in_((CheckpointState.VERIFIED, CheckpointState.DROPPED)),
            )
            .order_by(Checkpoint.step.desc())
            .limit(limit)
        )
        return {row.step: row.metrics for row in orm.execute(query)}
