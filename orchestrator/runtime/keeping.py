"""What the database knows of checkpoints, and which of them the plan's rule lets go."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine

from db import checkpoints as rows
from db.records import CheckpointInfo
from orchestrator.core import retention
from orchestrator.manifest import Manifest
from orchestrator.plan import Plan


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
        created_at=datetime.fromisoformat(found.created_at),
    )


def rule_of(plan: Plan) -> retention.Rule:
    best = plan.checkpoint.keep.best
    metric = None
    if best:
        name, _, way = best.rpartition(":")
        metric = (name, way == "max")
    return retention.Rule(last=plan.checkpoint.keep.last, best=metric, disk_bytes=plan.checkpoint.disk)


def doomed(engine: Engine, run_id: str, plan: Plan) -> list[Path]:
    """Folders of the checkpoints that may go now, oldest first."""
    present = [row for row in rows.of_run(engine, run_id) if row.state == "verified" and Path(row.path).is_dir()]
    return [
        Path(key)
        for key in retention.to_drop([_kept(number, row) for number, row in enumerate(present)], rule_of(plan))
    ]


def _kept(order: int, row: CheckpointInfo) -> retention.Kept:
    return retention.Kept(
        key=row.path,
        stage=row.stage,
        step=row.step,
        bytes=row.bytes,
        order=float(order),
        verified=row.state == "verified",
        final=row.final,
        metrics=row.metrics,
    )
