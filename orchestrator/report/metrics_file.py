"""A run's metrics as a Parquet file, in long form: one row a stage, step and metric.

Long, because columns that are named after metrics would be as many as a training likes (1,000), mostly empty, and another set in
each run; in long form files of several runs are read as one table. pyarrow writes it: the reference implementation, and what
pandas and Polars use.
"""

from __future__ import annotations

import errno
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kgorch.db.rows import RunInfo
from kgorch.errors import KgorchError
from kgorch.report.metrics import RunMetrics
from kgorch.system import files

COLUMNS = ("run", "run_number", "stage", "step", "epoch", "at", "steps", "metric", "value")
"""As in `kgorch metrics --json` (docs/json.md); `epoch` is null before the first, NaN stays NaN."""


def write_parquet(path: Path, run: RunInfo, metrics: RunMetrics) -> int:
    """Write the file, which takes the place of an older one when it is whole.

    Returns: its rows.
    Raises: KgorchError without pyarrow, or where the file cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise KgorchError(
            "--parquet needs pyarrow", next_step="pip install 'kgorch[parquet]'", error_code="KG902"
        ) from None
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for row in rows_of(run, metrics):
        for name, value in zip(COLUMNS, row, strict=True):
            columns[name].append(value)
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    types = {"run": text, "stage": text, "metric": text, "value": pyarrow.float64()}
    types |= {name: pyarrow.int64() for name in ("run_number", "step", "epoch", "steps")}
    types["at"] = pyarrow.timestamp("ms", tz="UTC")
    table = pyarrow.table({name: pyarrow.array(columns[name], types[name]) for name in COLUMNS})
    try:
        with files.replacement(path) as file:
            pyarrow.parquet.write_table(table, file, compression="zstd")
    except OSError as error:
        what = "there is no such folder" if error.errno == errno.ENOENT else str(error)
        raise KgorchError(f"{path} cannot be written", what, next_step="give another path") from None
    return int(table.num_rows)


def rows_of(run: RunInfo, metrics: RunMetrics) -> list[tuple[Any, ...]]:
    """The rows by COLUMNS, in the order of stages and steps."""
    return [
        (run.name, run.number, stage, point.step, point.epoch or None, _instant(point.at_s), point.steps, name, value)
        for stage, point in metrics.points()
        for name, value in point.values.items()
    ]


def _instant(at_s: float) -> datetime | None:
    """None for a time that no date can hold: the records may be from elsewhere."""
    try:
        return datetime.fromtimestamp(at_s, UTC)
    except (ValueError, OverflowError, OSError):
        return None
