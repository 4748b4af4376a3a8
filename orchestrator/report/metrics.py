"""A run's metrics over its steps, for `kgorch metrics` and for drawing."""

from __future__ import annotations

import contextlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import CurvePoint, Record
from kgorch.core.metrics.metric_trend import parse_target
from kgorch.db import runs
from kgorch.db.rows import RunInfo
from kgorch.errors import NotFound, nearest
from kgorch.report.json_fields import View
from kgorch.supervisor import metric_curves

Series = list[tuple[float, float]]
AXES = ("step", "epoch", "hours")


class RunMetrics(NamedTuple):
    """The metrics of a run over its steps.

    Attributes:
        created_at: when the run began.
        stages: records of each stage, of all its attempts merged; stages in the order of the plan.
        modes: `min` or `max`, whichever is better, of metrics for which the plan says so.
    """

    created_at: datetime
    stages: Mapping[str, Sequence[Record]]
    modes: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they were first reported."""
        return list({name: None for records in self.stages.values() for item in records for name in item.values})

    def only(self, *, stage: str | None = None, names: Sequence[str] = ()) -> RunMetrics:
        """The same, restricted to a stage and to some metrics; None and empty for all."""
        stages = {name: records for name, records in self.stages.items() if stage in (None, name)}
        if names:
            stages = {
                name: [rest for item in records if (rest := _only(item, names))] for name, records in stages.items()
            }
        return self._replace(stages=stages)

    def points(self) -> list[tuple[str, CurvePoint]]:
        """Pairs of stage and point, in the order of stages and steps."""
        return [(stage, point) for stage, records in self.stages.items() for point in metric_curve.points(records)]

    def series(self, stage: str, name: str, axis: str) -> Series:
        """Finite values of one metric over one of AXES. Hours count from the beginning of the run, pauses included."""
        records = self.stages[stage]
        pairs: Series
        if axis == "epoch":
            pairs = [(epoch, values[name]) for epoch, values in metric_curve.by_epoch(records) if name in values]
        else:
            began_s = self.created_at.timestamp()
            pairs = [
                ((point.at_s - began_s) / 3600 if axis == "hours" else point.step, point.values[name])
                for point in metric_curve.points(records)
                if name in point.values
            ]
        return [(x, y) for x, y in pairs if math.isfinite(y)]

    def steps(self) -> Series:
        """Pairs of hours since the run began and step of the stage."""
        began_s = self.created_at.timestamp()
        return [((point.at_s - began_s) / 3600, point.step) for _, point in self.points()]


def of_run(engine: Engine, run: RunInfo) -> RunMetrics:
    records = metric_curves.of_run(engine, run)
    order = [item.name for item in runs.stages(engine, run.id)]
    names = sorted(records, key=lambda name: order.index(name) if name in order else -1)
    return RunMetrics(run.created_at, {name: records[name] for name in names}, _modes(run))


def select(run: RunInfo, curve: RunMetrics, names: Sequence[str], stage: str | None = None) -> RunMetrics:
    """These metrics of this stage; all where nothing is named. Raises: NotFound."""
    if stage is not None and stage not in curve.stages:
        stages = list(curve.stages)
        raise NotFound(
            f"{run.name} has no metrics of a stage {stage!r}{nearest(stage, stages)}", *_name_list("stages", stages)
        )
    of_stage = curve.only(stage=stage)
    for name in names:
        if name not in of_stage.names:
            raise NotFound(
                f"{run.name} has no metric {name!r}{nearest(name, of_stage.names)}",
                *_name_list("reported metrics", of_stage.names),
            )
    return of_stage.only(names=names)


def _name_list(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(names[:20])}{' and more' if len(names) > 20 else ''}" if names else f"{what}: none"]


def _only(record: Record, names: Sequence[str]) -> Record | None:
    values = {name: value for name, value in record.values.items() if name in names}
    return record._replace(values=values) if values else None


def _modes(run: RunInfo) -> dict[str, str]:
    """Which way is better, by the plan's `keep.best` and `forecast.target`.

    Only these keys are read from the TOML: loading and validating a whole plan imports pydantic.
    """
    values: dict[str, Any] = {}
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError, AttributeError):
        plan = tomllib.loads(run.plan)
        values = {
            "checkpoint.keep.best": plan.get("checkpoint", {}).get("keep", {}).get("best"),
            "forecast.target": plan.get("forecast", {}).get("target"),
        }
    for item in run.overrides:
        key, _, text = item.partition("=")
        values[key.strip()] = text.strip(" \"'")
    modes = {}
    with contextlib.suppress(ValueError):
        target = parse_target(str(values.get("forecast.target")))
        modes[target.metric] = "max" if target.up else "min"
    name, _, mode = str(values.get("checkpoint.keep.best")).rpartition(":")
    if mode in ("min", "max"):
        modes[name] = mode
    return modes


def table(metrics: RunMetrics) -> list[View]:
    """One entry for each stage and metric: the last and the best value, and the step of each."""
    rows = []
    for stage, records in metrics.stages.items():
        for item in metric_curve.summaries(metric_curve.points(records), metrics.modes):
            last, best = _number(item.last), _number(item.best)
            rows.append({"stage": stage} | item._asdict() | {"last": last, "best": best})
    return rows


def as_json(run: RunInfo, metrics: RunMetrics) -> View:
    """The fields that `kgorch metrics --json` promises (docs/json.md)."""
    return {
        "run": run.name,
        "run_number": run.number,
        "metrics": table(metrics),
        "points": [
            {
                "stage": stage,
                "step": point.step,
                "epoch": point.epoch or None,
                "at": _stamp(point.at_s),
                "steps": point.steps,
                "values": {name: _number(value) for name, value in point.values.items()},
            }
            for stage, point in metrics.points()
        ],
    }


def as_rows(metrics: RunMetrics) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table: one row for each step, an empty cell where a metric was not reported."""
    names = metrics.names
    rows = [
        [
            stage,
            str(point.step),
            str(point.epoch or ""),
            _stamp(point.at_s),
            str(point.steps or ""),
            *(_text(point.values.get(name)) for name in names),
        ]
        for stage, point in metrics.points()
    ]
    return ["stage", "step", "epoch", "at", "steps", *names], rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    """`nan` for NaN and infinities, as programs that read CSV know it."""
    return "" if value is None else repr(value) if math.isfinite(value) else "nan"


def _stamp(at_s: float) -> str:
    """ISO 8601 of seconds since 1970; empty for a time that no date can hold: the file may be from elsewhere."""
    try:
        return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""
