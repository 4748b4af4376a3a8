"""Verbs on checkpoints. The folder with its manifest is the truth; a row remembers what was found out about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, Select, func, select, update
from sqlalchemy.orm import Session as Orm

from db.records import CheckpointInfo
from db.runs import now, plain
from db.tables import Checkpoint, Stage
from orchestrator.core.codes import CheckpointState

_IN_STAGE = (Checkpoint.step, Checkpoint.final, Checkpoint.id)


def record(engine: Engine, run_id: str, path: str, *, state: CheckpointState, **columns: Any) -> None:
    """What is known now of the checkpoint at `path`; a second record of it takes the place of the first."""
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


def set_measured(engine: Engine, path: str, metrics: Mapping[str, float], measured: Mapping[str, int]) -> None:
    """Its weights were measured after it was recorded."""
    with Orm(engine) as orm, orm.begin():
        changed = {"metrics": dict(metrics), "measured": dict(measured)}
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(**changed))


def mark_best(engine: Engine, run_id: str, best: Mapping[str, str]) -> None:
    """`best`: by the path of the best checkpoint of each stage, by what; no other one of the run is marked."""
    with Orm(engine) as orm, orm.begin():
        marked = (Checkpoint.run_id == run_id) & ((Checkpoint.best != "") | Checkpoint.path.in_(best))
        for row in orm.scalars(select(Checkpoint).where(marked)):
            row.best = best.get(row.path, "")


def best(engine: Engine, run_id: str) -> CheckpointInfo | None:
    """The best of the furthest stage that has one."""
    chosen = _in_order(run_id).where(Checkpoint.state == CheckpointState.VERIFIED, Checkpoint.best != "")
    with Orm(engine) as orm:
        rows = orm.scalars(chosen).all()
        return plain(CheckpointInfo, rows[-1]) if rows else None


def moved(engine: Engine, path: str, to: str) -> None:
    with Orm(engine) as orm, orm.begin():
        orm.execute(update(Checkpoint).where(Checkpoint.path == path).values(path=to))


def supersede(engine: Engine, run_id: str, stage: str, *, before: datetime, why: str) -> None:
    """Those of a stage that were made before it began anew."""
    with Orm(engine) as orm, orm.begin():
        mine = (
            Checkpoint.run_id == run_id,
            Checkpoint.stage == stage,
            Checkpoint.state.in_((CheckpointState.VERIFIED, CheckpointState.BROKEN)),
        )
        orm.execute(
            update(Checkpoint)
            .where(*mine, Checkpoint.created_at < before)
            .values(state=CheckpointState.SUPERSEDED, why=why)
        )


def of_run(engine: Engine, run_id: str, *states: str) -> list[CheckpointInfo]:
    """By the run's own order (stage, step), not by a clock; in these states alone, or in any: most of a long run's were dropped."""
    chosen = _in_order(run_id)
    with Orm(engine) as orm:
        rows = orm.scalars(chosen.where(Checkpoint.state.in_(states)) if states else chosen)
        return [plain(CheckpointInfo, row) for row in rows]


def standing(engine: Engine, run_id: str) -> list[tuple[int, CheckpointInfo]]:
    """The verified ones in the run's own order, each with how many of its stage come before it, dropped ones too:
    there are thousands of those in a long run, and after each save this is asked."""
    before = func.row_number().over(partition_by=Checkpoint.stage, order_by=_IN_STAGE) - 1
    numbers = select(Checkpoint.id, before.label("number")).where(Checkpoint.run_id == run_id).subquery()
    chosen = (
        _in_order(run_id)
        .join(numbers, numbers.c.id == Checkpoint.id)
        .where(Checkpoint.state == CheckpointState.VERIFIED)
    )
    with Orm(engine) as orm:
        return [
            (number, plain(CheckpointInfo, row)) for row, number in orm.execute(chosen.add_columns(numbers.c.number))
        ]


def dropped(engine: Engine, run_id: str, steps: Collection[int]) -> list[CheckpointInfo]:
    """Those of these steps that retention has let go."""
    mine = Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.DROPPED, Checkpoint.step.in_(steps)
    with Orm(engine) as orm:
        return [plain(CheckpointInfo, row) for row in orm.scalars(select(Checkpoint).where(*mine))]


def newest_verified(engine: Engine, run_id: str) -> CheckpointInfo | None:
    """The furthest in the run's own order: of its last stage that has one; of a stage that the plan lost, if of no other."""
    standing = select(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.VERIFIED)
    furthest = standing.order_by(Checkpoint.step.desc(), Checkpoint.final.desc(), Checkpoint.id.desc()).limit(1)
    with Orm(engine) as orm:
        stages = orm.scalars(select(Stage.name).where(Stage.run_id == run_id).order_by(Stage.position.desc())).all()
        looks = [Checkpoint.stage == name for name in stages] + [Checkpoint.stage.not_in(stages)]
        row = next((row for look in looks if (row := orm.scalars(furthest.where(look)).first())), None)
        return plain(CheckpointInfo, row) if row else None


def verified_paths(engine: Engine, run_id: str) -> set[str]:
    """Of those that stand; the dropped ones are many more."""
    with Orm(engine) as orm:
        chosen = select(Checkpoint.path).where(
            Checkpoint.run_id == run_id, Checkpoint.state == CheckpointState.VERIFIED
        )
        return set(orm.scalars(chosen))


def _in_order(run_id: str) -> Select[Any]:
    stage = (Stage.run_id == Checkpoint.run_id) & (Stage.name == Checkpoint.stage)
    chosen = select(Checkpoint).outerjoin(Stage, stage).where(Checkpoint.run_id == run_id)
    return chosen.order_by(func.coalesce(Stage.position, -1), *_IN_STAGE)


def saves(engine: Engine, run_id: str, *, limit: int) -> tuple[tuple[int, float], ...]:
    """Bytes and seconds of the run's newest saves, oldest of them first."""
    with Orm(engine) as orm:
        chosen = (
            select(Checkpoint.bytes, Checkpoint.took_s)
            .where(Checkpoint.run_id == run_id, Checkpoint.took_s > 0)
            .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
            .limit(limit)
        )
        return tuple((size, took_s) for size, took_s in reversed(orm.execute(chosen).all()))


def by_session(engine: Engine, session_ids: Sequence[int]) -> dict[int, CheckpointInfo]:
    """The last checkpoint that each of these sessions had verified."""
    with Orm(engine) as orm:
        chosen = (
            select(Checkpoint)
            .where(Checkpoint.session_id.in_(session_ids), Checkpoint.verified_at.is_not(None))
            .order_by(Checkpoint.created_at, Checkpoint.id)
        )
        return {row.session_id: plain(CheckpointInfo, row) for row in orm.scalars(chosen) if row.session_id is not None}


def metrics(engine: Engine, run_id: str, stage: str, *, limit: int) -> dict[int, dict[str, float]]:
    """What was reported last when each of a stage's newest checkpoints was made, by step; of those let go, too."""
    with Orm(engine) as orm:
        chosen = (
            select(Checkpoint.step, Checkpoint.metrics)
            .where(
                Checkpoint.run_id == run_id,
                Checkpoint.stage == stage,
                Checkpoint.state.in_((CheckpointState.VERIFIED, CheckpointState.DROPPED)),
            )
            .order_by(Checkpoint.step.desc())
            .limit(limit)
        )
        return {row.step: row.metrics for row in orm.execute(chosen)}
