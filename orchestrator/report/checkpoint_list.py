"""The checkpoints of a run in the fields that `checkpoints list --json` promises (docs/json.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgorch.core.codes import CheckpointState
from kgorch.db.rows import CheckpointInfo
from kgorch.report.json_fields import View, finite_metrics, stamp

FIELDS = ("stage", "step", "final", "state", "bytes", "save_duration_s", "blocking_s", "path", "pinned")


def entries(rows: Sequence[CheckpointInfo]) -> list[View]:
    return [
        {name: getattr(row, name) for name in FIELDS}
        | {"at": stamp(row.created_at), "metrics": finite_metrics(row.metrics), "source": row.source or None}
        | {"measured": dict(row.measured), "best": best_by(row) or None}
        for row in rows
    ]


def best_by(row: CheckpointInfo) -> str:
    """The plan's keep.best by which it is the best of its stage; empty if it is not."""
    return row.best if row.state == CheckpointState.VERIFIED else ""


def on_disk(rows: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those whose folders still exist."""
    return [row for row in rows if Path(row.path).is_dir()]
