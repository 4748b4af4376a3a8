"""A run's metrics over its steps, for `kgorch metrics` and for drawing."""

from __future__ import annotations

import contextlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine

from db import runs
from db.records import RunInfo
from orchestrator.core import metric_curve
from orchestrator.core.metric_curve import Point, Record
from orchestrator.core.metric_trend import parse_target
from orchestrator.supervisor import metric_curves

View = dict[str, Any]
Series = list[tuple[float, float]]
AXES = ("step", "epoch", "hours")


class Curve(NamedTuple):
    """The merged curve of each stage, in the order of the plan. `modes`: `min` or `max` of metrics of which the plan says it."""

    created_at: datetime
    stages: Mapping[str, Sequence[Record]]
    modes: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Of all metrics, in the order in which they were first reported."""
        return list({name: None for records in self.stages.values() for item in records for name in item.values})

    def only(self, *, stage: str | None = None, names: Sequence[str] = ()) -> Curve:
        """Without other stages and other metrics."""
        chosen = {name: records for name, records in self.stages.items() if stage in (None, name)}
        if names:
            chosen = {
                name: [made for item in records if (made := _only(item, names))] for name, records in chosen.items()
            }
        return self._replace(stages=chosen)

    def points(self) -> list[tuple[str, Point]]:
        """Stage and point, in the order of stages and steps."""
        return [(stage, point) for stage, records in self.stages.items() for point in metric_curve.points(records)]

    def series(self, stage: str, name: str, axis: str) -> Series:
        """For drawing: one of AXES and the metric, what is no number left out. Hours since the run began, pauses included."""
        records = self.stages[stage]
        found: Series
        if axis == "epoch":
            found = [(epoch, values[name]) for epoch, values in metric_curve.by_epoch(records) if name in values]
        else:
            began_s = self.created_at.timestamp()
            found = [
                ((point.at_s - began_s) / 3600 if axis == "hours" else point.step, point.values[name])
                for point in metric_curve.points(records)
                if name in point.values
            ]
        return [(x, y) for x, y in found if math.isfinite(y)]

    def steps(self) -> Series:
        """Hours since the run began, and the step of the stage."""
        began_s = self.created_at.timestamp()
        return [((point.at_s - began_s) / 3600, point.step) for _, point in self.points()]


def of_run(engine: Engine, run: RunInfo) -> Curve:
    found = metric_curves.of_run(engine, run)
    order = [item.name for item in runs.stages(engine, run.id)]
    stages = {name: found[name] for name in sorted(found, key=lambda name: order.index(name) if name in order else -1)}
    return Curve(run.created_at, stages, _modes(run))


def _only(record: Record, names: Sequence[str]) -> Record | None:
    values = {name: value for name, value in record.values.items() if name in names}
    return record._replace(values=values) if values else None


def _modes(run: RunInfo) -> dict[str, str]:
    """Which way is better, by the plan's `keep.best` and `forecast.target`; read without the whole plan, which a verb that looks
    does not load."""
    told: dict[str, Any] = {}
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError, AttributeError):
        plan = tomllib.loads(run.plan)
        told = {
            "checkpoint.keep.best": plan.get("checkpoint", {}).get("keep", {}).get("best"),
            "forecast.target": plan.get("forecast", {}).get("target"),
        }
    for item in run.overrides:
        key, _, text = item.partition("=")
        told[key.strip()] = text.strip(" \"'")
    modes = {}
    with contextlib.suppress(ValueError):
        target = parse_target(str(told.get("forecast.target")))
        modes[target.metric] = "max" if target.up else "min"
    name, _, mode = str(told.get("checkpoint.keep.best")).rpartition(":")
    if mode in ("min", "max"):
        modes[name] = mode
    return modes


def table(found: Curve) -> list[View]:
    """One entry a stage and metric: the last and the best value, and the step of each."""
    rows = []
    for stage, records in found.stages.items():
        for item in metric_curve.summaries(metric_curve.points(records), found.modes):
            last, best = _number(item.last), _number(item.best)
            rows.append({"stage": stage} | item._asdict() | {"last": last, "best": best})
    return rows


def as_json(run: RunInfo, found: Curve) -> View:
    """The fields that `kgorch metrics --json` promises (docs/json.md)."""
    return {
        "run": run.name,
        "run_number": run.number,
        "metrics": table(found),
        "points": [
            {
                "stage": stage,
                "step": point.step,
                "epoch": point.epoch or None,
                "at": _stamp(point.at_s),
                "steps": point.steps,
                "values": {name: _number(value) for name, value in point.values.items()},
            }
            for stage, point in found.points()
        ],
    }


def as_rows(found: Curve) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of numbers: one row a step, empty where a metric was not reported."""
    names = found.names
    rows = [
        [
            stage,
            str(point.step),
            str(point.epoch or ""),
            _stamp(point.at_s),
            str(point.steps or ""),
            *(_text(point.values.get(name)) for name in names),
        ]
        for stage, point in found.points()
    ]
    return ["stage", "step", "epoch", "at", "steps", *names], rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    """`nan` as programs that read CSV know it."""
    return "" if value is None else repr(value) if math.isfinite(value) else "nan"


def _stamp(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""
