"""What Prometheus is told: the state of runs, quotas, queue and GPUs as metric families (docs/prometheus.md).

Names and units follow the conventions of Prometheus: base units (seconds, bytes, ratios), `_total` for counters, instants as
`_timestamp_seconds`. The number of series is bounded: runs that are active or ended within a day, at most MAX_RUNS of them, and
MAX_METRICS reported metrics of each. Text that a training writes is in label values only, cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch import __version__
from kgorch.core.codes import EventKind, Outcome, ResumeState, RunState
from kgorch.core.text import in_one_line
from kgorch.db import active_sessions, queue, runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.report import quota_view, run_view
from kgorch.report.json_fields import View

MAX_RUNS, MAX_METRICS, MAX_LABEL = 50, 20, 64
"""Bounds: runs, reported metrics of a run, characters of a label's value."""

ENDED_RECENTLY = timedelta(days=1)
"""A run that is over stays for so long: an alert needs to see that it has failed."""

RECENT_SAMPLE = timedelta(minutes=2)
"""An older sample of telemetry says nothing of now."""


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"


class Family(NamedTuple):
    """A metric with its description. A counter's name has no `_total`: the exposition adds it."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


RUN = ("run", "number")
FAMILIES = (
    Family("kgorch_build_info", Kind.GAUGE, "Version of kgorch; always 1.", ("version",)),
    Family("kgorch_runs", Kind.GAUGE, "Runs in the state folder.", ()),
    Family("kgorch_queued_runs", Kind.GAUGE, "Runs in the queue, by the state of their entry.", ("state",)),
    Family("kgorch_run_info", Kind.GAUGE, "State of a run; its phase and stage. Always 1.", (*RUN, "state", "phase", "stage")),
    Family("kgorch_run_training", Kind.GAUGE, "1 while the ranks of the run are alive.", RUN),
    Family("kgorch_run_supervised", Kind.GAUGE, "1 while a supervisor of the run is alive.", RUN),
    Family("kgorch_run_failed", Kind.GAUGE, "1 if the run has failed and is not retried.", RUN),
    Family("kgorch_run_step", Kind.GAUGE, "Optimizer steps that are done of the current stage.", RUN),
    Family("kgorch_run_planned_steps", Kind.GAUGE, "Optimizer steps of the current stage in all.", RUN),
    Family("kgorch_run_epoch", Kind.GAUGE, "Epochs that are done of the current stage.", RUN),
    Family("kgorch_run_step_duration_seconds", Kind.GAUGE, "Duration of the last step.", RUN),
    Family("kgorch_run_metric", Kind.GAUGE, "Last value of a metric that the training reported.", (*RUN, "metric")),
    Family("kgorch_run_heartbeat_timestamp_seconds", Kind.GAUGE, "When the ranks last reported.", RUN),
    Family("kgorch_run_checkpoint_timestamp_seconds", Kind.GAUGE, "When the newest verified checkpoint was saved.", RUN),
    Family("kgorch_run_checkpoint_size_bytes", Kind.GAUGE, "Size of the newest verified checkpoint.", RUN),
    Family("kgorch_run_checkpoint_step", Kind.GAUGE, "Step of the newest verified checkpoint.", RUN),
    Family("kgorch_run_end_timestamp_seconds", Kind.GAUGE, "Forecast: when the current stage ends.", RUN),
    Family("kgorch_run_sessions", Kind.COUNTER, "Sessions of the run.", RUN),
    Family("kgorch_run_attempts", Kind.COUNTER, "Attempts of the run that ended, by outcome.", (*RUN, "outcome")),
    Family("kgorch_run_save_failures", Kind.COUNTER, "Saves of the run that failed.", RUN),
    Family("kgorch_session_started_timestamp_seconds", Kind.GAUGE, "When the newest session began.", RUN),
    Family("kgorch_session_wall_timestamp_seconds", Kind.GAUGE, "Time limit of the session that trains.", RUN),
    Family("kgorch_quota_limit_seconds", Kind.GAUGE, "Accelerator time that a window of the quota allows.", ("pool",)),
    Family("kgorch_quota_used_seconds", Kind.GAUGE, "Accelerator time that is used of the current window.", ("pool",)),
    Family("kgorch_quota_left_seconds", Kind.GAUGE, "Accelerator time that is left, the reserve not included.", ("pool",)),
    Family("kgorch_quota_reset_timestamp_seconds", Kind.GAUGE, "When the current window ends.", ("pool",)),
    Family("kgorch_gpu_utilization_ratio", Kind.GAUGE, "Share of the time in which a kernel ran.", (*RUN, "gpu")),
    Family("kgorch_gpu_memory_used_bytes", Kind.GAUGE, "Memory in use, whoever uses it.", (*RUN, "gpu")),
    Family("kgorch_gpu_memory_size_bytes", Kind.GAUGE, "Memory of the GPU.", (*RUN, "gpu")),
    Family("kgorch_gpu_power_watts", Kind.GAUGE, "Power draw.", (*RUN, "gpu")),
    Family("kgorch_gpu_temperature_celsius", Kind.GAUGE, "Temperature.", (*RUN, "gpu")),
    Family("kgorch_host_memory_used_bytes", Kind.GAUGE, "Host memory in use.", RUN),
    Family("kgorch_host_disk_free_bytes", Kind.GAUGE, "Bytes that are free where checkpoints go.", RUN),
)  # fmt: skip
"""Every metric that is exported, in the order of the exposition."""

GPU_KEYS = {
    "util": ("kgorch_gpu_utilization_ratio", 0.01),
    "mem_used": ("kgorch_gpu_memory_used_bytes", 1.0),
    "mem_total": ("kgorch_gpu_memory_size_bytes", 1.0),
    "power_w": ("kgorch_gpu_power_watts", 1.0),
    "temp_c": ("kgorch_gpu_temperature_celsius", 1.0),
}
"""Key of the telemetry → metric, and the factor to its unit."""

HOST_KEYS = {"host.mem_used": "kgorch_host_memory_used_bytes", "host.disk_free": "kgorch_host_disk_free_bytes"}


class Point(NamedTuple):
    """One value of a family, with the values of its labels."""

    family: str
    labels: tuple[str, ...]
    value: float


def points(engine: Engine, *, now: datetime | None = None) -> list[Point]:
    """Every value as of now. Reads the database alone. Raises: SQLAlchemyError."""
    now = now or datetime.now(UTC)
    found = [Point("kgorch_build_info", (__version__,), 1.0), Point("kgorch_runs", (), float(runs.count(engine)))]
    waiting = [entry.resume.state for entry in queue.entries(engine)]
    for state in (ResumeState.DUE, ResumeState.CLAIMED):
        found.append(Point("kgorch_queued_runs", (state,), float(waiting.count(state))))
    for run in _current_runs(engine, now):
        found += _of_run(engine, run, now)
    for pool in quota_view.all_pools(engine, now):
        found += _of_pool(pool)
    return [point for point in found if math.isfinite(point.value)]


def _current_runs(engine: Engine, now: datetime) -> list[RunInfo]:
    """Runs with a session that is not over, then the newest that are active or were over a short while ago."""
    live = [runs.by_id(engine, item.run_id) for item in active_sessions.all_of(engine)[:MAX_RUNS]]
    current = {run.id: run for run in live if run}
    for run in runs.all_runs(engine, limit=10 * MAX_RUNS):
        if run.state == RunState.ACTIVE or now - runs.last_activity_at(engine, run) < ENDED_RECENTLY:
            current.setdefault(run.id, run)
    return list(current.values())[:MAX_RUNS]


def _of_run(engine: Engine, run: RunInfo, now: datetime) -> Iterator[Point]:
    view = run_view.of_run(engine, run, now=now)
    labels = (_label(run.name), str(run.number))
    session, checkpoint, forecast = view["session"] or {}, view["checkpoint"] or {}, view["forecast"] or {}
    info = (*labels, view["state"], view["phase"], _label(view["stage"]))
    yield Point("kgorch_run_info", info, 1.0)
    plain: Mapping[str, Any] = {
        "kgorch_run_training": bool(session.get("training_alive")),
        "kgorch_run_supervised": bool(session and session["supervisor"]["alive"]),
        "kgorch_run_failed": view["state"] == RunState.FAILED,
        "kgorch_run_step": view["step"],
        "kgorch_run_planned_steps": view["steps_total"],
        "kgorch_run_epoch": view["epoch"],
        "kgorch_run_step_duration_seconds": view["step_s"],
        "kgorch_run_heartbeat_timestamp_seconds": _seconds(session.get("heartbeat_at")),
        "kgorch_run_checkpoint_timestamp_seconds": _seconds(checkpoint.get("at")),
        "kgorch_run_checkpoint_size_bytes": checkpoint.get("bytes"),
        "kgorch_run_checkpoint_step": checkpoint.get("step"),
        "kgorch_run_end_timestamp_seconds": _seconds(forecast.get("end_at")),
        "kgorch_run_sessions": session.get("number", 0),
        "kgorch_run_save_failures": sessions.count_events(engine, run.id, EventKind.SAVE_FAILED),
        "kgorch_session_started_timestamp_seconds": _seconds(session.get("started_at")),
        "kgorch_session_wall_timestamp_seconds": None if session.get("ended_at") else _seconds(session.get("wall_at")),
    }
    for name, value in plain.items():
        if value is not None:
            yield Point(name, labels, float(value))
    outcomes = sessions.outcome_counts(engine, run.id)
    for outcome in Outcome:
        yield Point("kgorch_run_attempts", (*labels, outcome), float(outcomes.get(outcome, 0)))
    yield from _reported(labels, view["metrics"])
    yield from _telemetry(labels, view["telemetry"], now)


def _reported(labels: tuple[str, ...], metrics: Mapping[str, float | None]) -> Iterator[Point]:
    """The first of the reported metrics; two names that are equal once they are cut count as one."""
    values: dict[str, float] = {}
    for name, value in metrics.items():
        if value is not None and len(values) < MAX_METRICS:
            values.setdefault(_label(name), value)
    for name, value in values.items():
        yield Point("kgorch_run_metric", (*labels, name), value)


def _telemetry(labels: tuple[str, ...], sample: View | None, now: datetime) -> Iterator[Point]:
    if sample is None or now - datetime.fromisoformat(sample["at"]) > RECENT_SAMPLE:
        return
    for key, value in sample["values"].items():
        match = re.fullmatch(r"(?:node(\d+)\.)?gpu(\d+)\.(\w+)", key)
        if match and match[3] in GPU_KEYS:
            family, factor = GPU_KEYS[match[3]]
            yield Point(family, (*labels, f"{match[1]}:{match[2]}" if match[1] else match[2]), value * factor)
        elif key in HOST_KEYS:
            yield Point(HOST_KEYS[key], labels, value)


def _of_pool(pool: View) -> Iterator[Point]:
    labels = (_label(pool["pool"]),)
    values = {
        "kgorch_quota_limit_seconds": 3600 * pool["hours"] if pool["hours"] is not None else None,
        "kgorch_quota_used_seconds": pool["used_s"],
        "kgorch_quota_left_seconds": pool["left_s"],
        "kgorch_quota_reset_timestamp_seconds": _seconds(pool["resets_at"]),
    }
    for name, value in values.items():
        if value is not None:
            yield Point(name, labels, float(value))


def by_family(found: Sequence[Point]) -> Iterator[tuple[Family, list[Point]]]:
    """The values by family, in the order of FAMILIES; families without values are left out."""
    for family in FAMILIES:
        if mine := [point for point in found if point.family == family.name]:
            yield family, mine


def _label(text: str) -> str:
    return in_one_line(text)[:MAX_LABEL]


def _seconds(stamp: str | None) -> float | None:
    return datetime.fromisoformat(stamp).timestamp() if stamp else None
