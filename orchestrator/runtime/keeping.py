"""What the database knows of checkpoints, and which of them the plan's rule lets go."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine

from db import checkpoints as rows
from db.records import CheckpointInfo
from orchestrator.core import retention
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
        created_at=datetime.fromisoformat(found.created_at),
    )


def rule_of(plan: Plan) -> retention.Rule:
    best = plan.checkpoint.keep.best
    metric = None
    if best:
        name, _, way = best.rpartition(":")
        metric = (name, way == "max")
    keep = plan.checkpoint.keep
    return retention.Rule(last=keep.last, every=keep.every, best=metric, disk_bytes=plan.checkpoint.disk)


def doomed(engine: Engine, run_id: str, plan: Plan) -> list[Path]:
    """Folders of the checkpoints that may go now, oldest first: by the plan's rule, and so that the next one finds room."""
    present = [
        _kept(order, number, row)
        for order, (number, row) in enumerate(rows.standing(engine, run_id))
        if Path(row.path).is_dir()
    ]
    rule = rule_of(plan)
    if present:
        used = sum(item.bytes for item in present)
        room = used + free_bytes(Path(present[-1].key)) - int(ROOM_FOR_NEXT * present[-1].bytes)
        rule = replace(rule, room_bytes=room)
    return [Path(key) for key in retention.to_drop(present, rule)]


def no_room(folder: Path, need_bytes: int, free_bytes: int) -> str:
    """Why no training begins whose first save cannot fit."""
    return (
        f"there is no room for a checkpoint: it needs {need_bytes} bytes, {free_bytes} are free in {folder};"
        " free some space there, or name a folder on another disk as checkpoint.dir"
    )


def free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
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
    )
