"""Several runs side by side: their plans, results and curves, for `kgorch compare`. The fields are in docs/json.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Engine

from kgorch.core.metrics import metric_curve
from kgorch.db.rows import RunInfo
from kgorch.report import run_report
from kgorch.report.json_fields import View

MAX_RUNS = 12
"""More are not told apart in a chart."""


def of_runs(engine: Engine, compared: Sequence[RunInfo], now: datetime | None = None) -> View:
    """What is equal and what differs in the plans, the result of each run, and the metrics that they report."""
    reports = [run_report.of_run(engine, run, now) for run in compared]
    plans = [{item["key"]: item["value"] for item in report["plan"]} for report in reports]
    keys = list(dict.fromkeys(key for plan in plans for key in plan if key != "name"))
    rows = [{"key": key, "values": [plan.get(key) for plan in plans]} for key in keys]
    return {
        "runs": [_result(report) for report in reports],
        "plan_differences": [row for row in rows if len(set(row["values"])) > 1],
        "plan_equal": [{"key": row["key"], "value": row["values"][0]} for row in rows if len(set(row["values"])) == 1],
        "metrics": _metrics(reports),
        "curves": _curves(reports),
    }


def label(report: Mapping[str, Any]) -> str:
    """NAME/NUMBER, as verbs take it."""
    return f"{report['run']}/{report['run_number']}"


def _result(report: View) -> View:
    status = report["status"]
    return {
        "run": report["run"],
        "run_number": report["run_number"],
        "label": label(report),
        "state": status["state"],
        "stage": status["stage"],
        "step": status["step"],
        "steps_total": status["steps_total"],
        "trained_s": report["trained_s"],
        "sessions": report["sessions_total"],
        "problems": report["problems_total"],
        "created_at": report["created_at"],
        "finished_at": report["finished_at"],
        "plan_error": report["plan_error"],
    }


def _metrics(reports: Sequence[View]) -> list[View]:
    """Each metric with its best value in each run, null where a run has not reported it; `winner`: index of the best run, where
    the metric's name or a plan's `keep.best` says which values are better."""
    by_plan = {best["by"].rpartition(":")[0] for report in reports if (best := report["status"]["best"])}
    by_run = [{(item["stage"], item["name"]): item for item in report["metrics"]} for report in reports]
    rows = []
    for stage, name in dict.fromkeys(key for metrics in by_run for key in metrics):
        found = [metrics.get((stage, name)) for metrics in by_run]
        mode = next(item["mode"] for item in found if item)
        best = [item["best"] if item else None for item in found]
        known = [(value, index) for index, value in enumerate(best) if value is not None]
        chosen = (min if mode == "min" else max)(known, default=None, key=lambda pair: pair[0])
        is_judged = name in by_plan or metric_curve.has_known_direction(name)
        is_distinct = (
            is_judged and chosen is not None and len(known) > 1 and [value for value, _ in known].count(chosen[0]) == 1
        )
        rows.append(
            {
                "stage": stage,
                "name": name,
                "mode": mode,
                "best": best,
                "last": [item["last"] if item else None for item in found],
                "winner": chosen[1] if chosen and is_distinct else None,
            }
        )
    return rows


def _curves(reports: Sequence[View]) -> list[View]:
    """Each stage's metric that a run has a curve of, those of most runs first: `lines` with the run's label, `x` (steps), `y`."""
    entries: dict[tuple[str, str], View] = {}
    for report in reports:
        for item in report["curves"]:
            for series in item["series"]:
                key = (series["stage"], item["name"])
                entry = entries.setdefault(key, {"stage": key[0], "name": key[1], "lines": []})
                entry["lines"].append({"run": label(report), "x": series["x"], "y": series["y"]})
    return sorted(entries.values(), key=lambda entry: -len(entry["lines"]))[: run_report.MAX_CURVES]
