"""What the database knows of checkpoints, and which of them the plan's rule lets go."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import checkpoints as rows
from db.records import CheckpointInfo
from orchestrator import manifest
from orchestrator.core import retention
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable
from orchestrator.manifest import Manifest
from orchestrator.plan import Plan

ROOM_FOR_NEXT = 1.2
"""Of the newest one's size: what is to be free on the disk for the next."""


def record_verified(
    engine: Engine,
    run_id: str,
    session_id: int | None,
    found: Manifest,
    folder: Path,
    *,
    took_s: float,
    blocking_s: float,
) -> None:
    rows.record(
        engine,
        run_id,
        str(folder),
        state="verified",
        session_id=session_id,
        stage=found.stage,
        step=found.step,
        final=found.final,
        bytes=found.total_bytes,
        took_s=took_s,
        blocking_s=blocking_s,
        metrics=dict(found.metrics),
        measured=dict(found.measured),
        created_at=datetime.fromisoformat(found.created_at),
    )


def rule_of(plan: Plan) -> retention.Rule:
    keep = plan.checkpoint.keep
    best = metric_and_way(keep.best) if keep.best else None
    return retention.Rule(last=keep.last, every=keep.every, best=best, disk_bytes=plan.checkpoint.disk)


def metric_and_way(best: str) -> tuple[str, bool]:
    """`dice:max` as the metric's name and whether the highest is the best."""
    name, _, way = best.rpartition(":")
    return name, way == "max"


def best_of(engine: Engine, run_id: str, stage: str, metric: str, highest: bool) -> retention.Kept | None:
    """Of the stage's verified checkpoints that lie there; None when none was measured."""
    return retention.best_of(
        [item for item in _present(engine, run_id, metric) if item.stage == stage],
        metric,
        highest,
    )


def best_for_ranks(engine: Engine, run_id: str, plan: Plan, stage: str) -> dict[str, Any] | None:
    """What the ranks of the stage's next attempt are told (wire.Launch.best)."""
    if (rule := rule_of(plan)).best is None:
        return None
    metric, highest = rule.best
    found = best_of(engine, run_id, stage, metric, highest)
    value = found.metrics[metric] if found and found.measured.get(metric) == found.step else None
    return {"metric": metric, "highest": highest, "value": value}


def mark_best(engine: Engine, run_id: str, plan: Plan) -> None:
    """Write down which checkpoint of each stage is its best now."""
    if (rule := rule_of(plan)).best:
        present = _present(engine, run_id, rule.best[0])
        found = (
            retention.best_of([item for item in present if item.stage == stage], *rule.best)
            for stage in {item.stage for item in present}
        )
        rows.mark_best(engine, run_id, {item.key: str(plan.checkpoint.keep.best) for item in found if item})
    elif rows.best(engine, run_id):  # the plan names none any more
        rows.mark_best(engine, run_id, {})


def doomed(engine: Engine, run_id: str, plan: Plan) -> list[Path]:
    """Folders of the checkpoints that may go now, oldest first: by the plan's rule, and so that the next one finds room."""
    rule = rule_of(plan)
    present = _present(engine, run_id, rule.best[0] if rule.best else None)
    if present:
        used = sum(item.bytes for item in present)
        room = used + free_bytes(Path(present[-1].key)) - int(ROOM_FOR_NEXT * present[-1].bytes)
        rule = replace(rule, room_bytes=room)
    return [Path(key) for key in retention.to_drop(present, rule)]


def _present(engine: Engine, run_id: str, metric: str | None) -> list[retention.Kept]:
    """The verified ones whose folders are there, in the run's own order. `metric`: by which they are to be compared."""
    standing = [(number, row) for number, row in rows.standing(engine, run_id) if Path(row.path).is_dir()]
    if metric is not None:
        standing = [(number, _with_measured(engine, row, metric)) for number, row in standing]
    return [_kept(order, number, row) for order, (number, row) in enumerate(standing)]


def _with_measured(engine: Engine, row: CheckpointInfo, metric: str) -> CheckpointInfo:
    """A manifest may learn of a measurement after its checkpoint was read back (worker/checkpoint/best_checkpoint.py), perhaps with
    no supervisor alive: so a row that knows of none is compared with it. They are few, for what was not measured is soon
    dropped."""
    if row.measured.get(metric) == row.step:
        return row
    try:
        found = manifest.described(Path(row.path))
    except (CheckpointBroken, CheckpointUnreadable):
        return row
    if dict(found.measured) != dict(row.measured):
        rows.set_measured(engine, row.path, found.metrics, found.measured)
        return row._replace(metrics=found.metrics, measured=found.measured)
    return row


def no_room(folder: Path, need_bytes: int, free_bytes: int) -> str:
    """Why no training begins whose first save cannot fit."""
    return (
        f"there is no room for a checkpoint: it needs {need_bytes} bytes, {free_bytes} are free in {folder};"
        " free some space there, or name a folder on another disk as checkpoint.dir"
    )


def free_bytes(folder: Path) -> int:
    """On the disk of a folder, which need not be there: a person may have moved it away."""
    room = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return room.f_bavail * room.f_frsize


def _kept(order: int, number: int, row: CheckpointInfo) -> retention.Kept:
    return retention.Kept(
        key=row.path,
        stage=row.stage,
        step=row.step,
        bytes=row.bytes,
        order=float(order),
        number=number,
        verified=row.state == "verified",
        final=row.final,
        metrics=row.metrics,
        measured=row.measured,
    )
