"""A run's metrics as curves for a chart: over steps, hours or epochs, of all sessions, with few enough points to draw at once.

The values are those of report/metrics.py. Reading them parses a file of each attempt, so `CurveCache` keeps the result until one
of the files grows.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from pathlib import Path

from sqlalchemy import Engine

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.downsample import Point, smoothed, thin_series
from kgorch.core.metrics.metric_curve import FILE_NAME
from kgorch.db import sessions
from kgorch.db.rows import RunInfo
from kgorch.report import metrics
from kgorch.report.json_fields import View
from kgorch.report.metrics import RunMetrics

MAX_POINTS = 1200
"""Of one curve: more than a chart has pixels to tell apart."""

MAX_CURVES = 60
"""Of one answer; a run may report a thousand metrics, which are asked for by name."""

CACHED_RUNS = 16

AXES = metrics.AXES


class CurveCache:
    """The parsed metrics of the runs that were asked for last. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, tuple[object, RunMetrics]] = OrderedDict()

    def of_run(self, engine: Engine, run: RunInfo) -> RunMetrics:
        """As metrics.of_run; read again only after one of the attempts' files has changed."""
        version = _version(engine, run)
        with self._lock:
            known = self._runs.get(run.id)
        if known and known[0] == version:
            return known[1]
        read = metrics.of_run(engine, run)
        with self._lock:
            self._runs[run.id] = (version, read)
            self._runs.move_to_end(run.id)
            while len(self._runs) > CACHED_RUNS:
                self._runs.popitem(last=False)
        return read


def _version(engine: Engine, run: RunInfo) -> object:
    """Changes with every record that is written."""
    found = []
    for attempt in sessions.attempts(engine, run.id):
        try:
            status = Path(attempt.folder, FILE_NAME).lstat()
            found.append((attempt.id, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((attempt.id, 0, attempt.last_step))
    return (run.plan, tuple(run.overrides), tuple(found))


def charts(curve: RunMetrics, *, axis: str, smooth: float = 0.0, names: tuple[str, ...] = ()) -> View:
    """Each metric of each stage as points to draw.

    Args:
        axis: one of AXES. Hours count from the beginning of the run.
        smooth: weight of the past, 0 to 0.999.
        names: metrics to include; the first MAX_CURVES where it is empty.
    Returns: `axis`; `names` (all there are); `table` (as in `metrics --json`); `charts`: `name`, `mode` (by the plan), `series`:
        for each stage `stage`, `x`, `y` (None where it was not finite), `raw` (before smoothing), `points`, `not_finite` (counts).
    """
    every = curve.names
    shown = [name for name in (names or every) if name in every][:MAX_CURVES]
    of_stage = {stage: _points(curve, stage, axis) for stage in curve.stages}
    result = []
    for name in shown:
        series = [_series(stage, points[name], smooth) for stage, points in of_stage.items() if name in points]
        if series:
            result.append({"name": name, "mode": curve.modes.get(name), "series": series})
    return {
        "axis": axis,
        "names": every,
        "charts": result,
        "table": metrics.table(curve.only(names=shown)) if shown else [],
    }


def sparkline(curve: RunMetrics, name: str, *, points: int = 60) -> list[float]:
    """A metric of the last stage that reports it, over its steps: few points, finite ones alone."""
    for stage in reversed(list(curve.stages)):
        if series := curve.series(stage, name, "step"):
            return [y for _, y in thin_series(series, points) if y is not None]
    return []


def headline(curve: RunMetrics) -> str | None:
    """The metric that stands for the run: of the plan's target or `keep.best`, else a loss, else the first; None without any."""
    names = curve.names
    chosen = (
        [name for name in curve.modes if name in names] + [name for name in names if "loss" in name.lower()] + names
    )
    return chosen[0] if chosen else None


def _points(curve: RunMetrics, stage: str, axis: str) -> dict[str, list[Point]]:
    records, began_s = curve.stages[stage], curve.created_at.timestamp()
    found: dict[str, list[Point]] = {}
    if axis == "epoch":
        for epoch, values in metric_curve.by_epoch(records):
            for name, value in values.items():
                found.setdefault(name, []).append((epoch, _finite(value)))
        return found
    for point in metric_curve.points(records):
        x = (point.at_s - began_s) / 3600 if axis == "hours" else float(point.step)
        for name, value in point.values.items():
            found.setdefault(name, []).append((x, _finite(value)))
    if axis == "hours":  # a clock may have been set back between two sessions
        found = {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}
    return found


def _series(stage: str, points: list[Point], smooth: float) -> View:
    drawn = thin_series(points, MAX_POINTS)
    raw = None
    if smooth > 0:
        # Smoothed first: a mean over the points that are left would depend on how many fit the chart.
        by_x = dict(smoothed(points, smooth))
        raw, drawn = [y for _, y in drawn], [(x, by_x[x]) for x, _ in drawn]
    return {
        "stage": stage,
        "x": [x for x, _ in drawn],
        "y": [y for _, y in drawn],
        "raw": raw,
        "points": len(points),
        "not_finite": sum(y is None for _, y in points),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
