"""The checkpoints of a run in the database: recorded once verified, compared by a metric, and expired by the plan's rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.checkpoint import store
from kgorch.checkpoint.folder import read_manifest
from kgorch.checkpoint.manifest import Manifest
from kgorch.core.checkpoint import retention
from kgorch.core.codes import CheckpointState
from kgorch.db import checkpoints as rows
from kgorch.db.rows import CheckpointInfo
from kgorch.errors import CheckpointBroken, CheckpointUnreadable, KgorchError
from kgorch.plan import Plan

FREE_FOR_NEXT = 1.2
"""Free disk that the next checkpoint needs, as a multiple of the newest one's size."""


def record_verified(
    engine: Engine,
    run_id: str,
    session_id: int | None,
    manifest: Manifest,
    folder: Path,
    *,
    save_duration_s: float,
    blocking_s: float,
) -> None:
    """Insert the row of a checkpoint that was just verified.

    Args:
        session_id: in which it was found; None outside of any.
        save_duration_s: seconds from the hold-up of training until it was verified; 0 where that is not known.
        blocking_s: seconds for which training was held up.
    """
    rows.record(
        engine,
        run_id,
        str(folder),
        state=CheckpointState.VERIFIED,
        session_id=session_id,
        stage=manifest.stage,
        step=manifest.step,
        final=manifest.final,
        bytes=manifest.total_bytes,
        save_duration_s=save_duration_s,
        blocking_s=blocking_s,
        metrics=dict(manifest.metrics),
        measured=dict(manifest.measured),
        created_at=datetime.fromisoformat(manifest.created_at),
    )


def retention_rule(plan: Plan) -> retention.RetentionRule:
    """The plan's `[checkpoint.keep]` as core/checkpoint/retention.py takes it."""
    keep = plan.checkpoint.keep
    best = parse_best(keep.best) if keep.best else None
    return retention.RetentionRule(last=keep.last, every=keep.every, best=best, disk_bytes=plan.checkpoint.disk)


def parse_best(best: str) -> tuple[str, bool]:
    """`dice:max` as the metric's name, and whether the highest value is the best."""
    name, _, direction = best.rpartition(":")
    return name, direction == "max"


def best_checkpoint(
    engine: Engine, run_id: str, stage: str, metric: str, highest: bool
) -> retention.RetentionCandidate | None:
    """The best of the stage's verified checkpoints whose folders exist; None when none was measured."""
    return retention.best_of(
        [item for item in _present(engine, run_id, metric) if item.stage == stage],
        metric,
        highest,
    )


def best_for_ranks(engine: Engine, run_id: str, plan: Plan, stage: str) -> dict[str, Any] | None:
    """The value of LaunchSpec.best for the stage's next attempt; None where the plan names no metric."""
    if (rule := retention_rule(plan)).best is None:
        return None
    metric, highest = rule.best
    best = best_checkpoint(engine, run_id, stage, metric, highest)
    # a value that was reported at another step does not belong to the weights of this checkpoint
    value = best.metrics[metric] if best and best.measured.get(metric) == best.step else None
    return {"metric": metric, "highest": highest, "value": value}


def mark_best(engine: Engine, run_id: str, plan: Plan) -> None:
    """Record which checkpoint of each stage is its best now."""
    if (rule := retention_rule(plan)).best:
        present = _present(engine, run_id, rule.best[0])
        best_of_stages = (
            retention.best_of([item for item in present if item.stage == stage], *rule.best)
            for stage in {item.stage for item in present}
        )
        rows.mark_best(engine, run_id, {item.key: str(plan.checkpoint.keep.best) for item in best_of_stages if item})
    elif rows.best(engine, run_id):  # the plan names none any more
        rows.mark_best(engine, run_id, {})


def expired_folders(engine: Engine, run_id: str, plan: Plan) -> list[Path]:
    """Folders of the checkpoints that may be deleted now, oldest first: by the plan's rule, and to make room for the next."""
    rule = retention_rule(plan)
    present = _present(engine, run_id, rule.best[0] if rule.best else None)
    if present:
        used = sum(item.bytes for item in present)
        room = used + disk_free_bytes(Path(present[-1].key)) - int(FREE_FOR_NEXT * present[-1].bytes)
        rule = replace(rule, room_bytes=room)
    return [Path(key) for key in retention.to_drop(present, rule)]


def drop_expired(engine: Engine, run_id: str, plan: Plan, delete: Callable[[Path], bool]) -> None:
    """Delete the checkpoints that may go now. May be called again after the database has refused.

    Each row first: a row that is `verified` without a folder would stay so, and a folder whose row says `dropped` is verified and
    dropped by the next session.

    Args:
        delete: of a folder. False when it will not be deleted, because the session is over.
    """
    for folder in expired_folders(engine, run_id, plan):
        # a person may have pinned it since it was chosen
        if rows.mark_dropped(engine, str(folder)) and not delete(folder):  # the next session clears up
            rows.set_state(engine, str(folder), CheckpointState.VERIFIED)


def _present(engine: Engine, run_id: str, metric: str | None) -> list[retention.RetentionCandidate]:
    """The verified checkpoints whose folders exist, in the run's own order. `metric`: by which they will be compared."""
    present = [(number, row) for number, row in rows.verified_with_numbers(engine, run_id) if Path(row.path).is_dir()]
    if metric is not None:
        present = [(number, _with_measured(engine, row, metric)) for number, row in present]
    return [_kept(order, number, row) for order, (number, row) in enumerate(present)]


def _with_measured(engine: Engine, row: CheckpointInfo, metric: str) -> CheckpointInfo:
    """The row, with what its manifest has learned since it was recorded.

    A rank may measure a checkpoint's weights after it was verified (worker/checkpoint/best_checkpoint.py),
    perhaps with no supervisor alive. So a
    row without a measurement is compared with its manifest. These are few: what was not measured is soon deleted.
    """
    if row.measured.get(metric) == row.step:
        return row
    try:
        manifest = read_manifest(Path(row.path))
    except (CheckpointBroken, CheckpointUnreadable):
        return row
    if dict(manifest.measured) != dict(row.measured):
        rows.set_metrics(engine, row.path, manifest.metrics, manifest.measured)
        return row._replace(metrics=manifest.metrics, measured=manifest.measured)
    return row


def no_room_message(folder: Path, need_bytes: int, free_bytes: int) -> str:
    """The reason for not starting a training whose first save cannot fit."""
    return (
        f"there is no room for a checkpoint: it needs {need_bytes} bytes, {free_bytes} are free in {folder};"
        " free some space there, or name a folder on another disk as checkpoint.dir"
    )


def disk_free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist: a user may have moved it away."""
    status = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    return status.f_bavail * status.f_frsize


def _kept(order: int, number: int, row: CheckpointInfo) -> retention.RetentionCandidate:
    return retention.RetentionCandidate(
        key=row.path,
        stage=row.stage,
        step=row.step,
        bytes=row.bytes,
        order=float(order),
        number=number,
        verified=row.state == CheckpointState.VERIFIED,
        final=row.final,
        metrics=row.metrics,
        measured=row.measured,
        pinned=row.pinned,
    )


def drop(engine: Engine, run_id: str, row: CheckpointInfo, root: Path) -> None:
    """Delete a verified checkpoint that a user names.

    Args:
        root: the run's folder of checkpoints.
    Raises: KgorchError for the newest one, from which the run goes on, and for a pinned one.
    """
    newest = rows.newest_verified(engine, run_id)
    if newest is None or newest.path == row.path:
        raise KgorchError(
            f"step {row.step} of {row.stage} is the newest verified checkpoint, from which the run continues"
        )
    store.check_folder(Path(row.path), root)
    # the row first, as in drop_expired
    if not rows.mark_dropped(engine, row.path):
        raise KgorchError(
            f"step {row.step} of {row.stage} is pinned", next_step="unpin it first: kgorch checkpoints unpin"
        )
    store.delete(Path(row.path), root)
