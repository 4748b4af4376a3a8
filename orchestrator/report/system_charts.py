"""Telemetry of a session as charts: GPUs, memory against its limit, power, waiting for data, step time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.db import samples
from kgorch.db.rows import SampleInfo, SessionInfo
from kgorch.report.json_fields import View, stamp

MAX_ROWS = 900
"""Of a chart; more are merged as samples are rolled up."""

RECENT = timedelta(minutes=10)
MIN_MINUTES = 10
"""A session with fewer samples of minutes is shown by seconds."""


class Chart(NamedTuple):
    """One chart and the keys of telemetry (docs/json.md) that it draws.

    Attributes:
        keys: a pattern; each key that matches is a line.
        limit: the pattern of the keys of their limits; the highest is drawn as one line.
        unit: `%`, `bytes`, `s`, `W`, `°C`, `bytes/s`.
        factor: from the unit of the sample.
    """

    name: str
    title: str
    keys: str
    unit: str
    limit: str = ""
    factor: float = 1.0


NODE = r"(node\d+\.)?"
CHARTS = (
    Chart("gpu", "GPU utilisation", rf"{NODE}gpu\d+\.util", "%"),
    Chart("gpu_memory", "GPU memory", rf"{NODE}gpu\d+\.mem_used", "bytes", rf"{NODE}gpu\d+\.mem_total"),
    Chart("power", "GPU power", rf"{NODE}gpu\d+\.power_w", "W", rf"{NODE}gpu\d+\.power_limit_w"),
    Chart("temperature", "GPU temperature", rf"{NODE}gpu\d+\.temp_c", "°C"),
    Chart("step", "Step time", r"rank\d+\.step_s", "s"),
    Chart("data_wait", "Waiting for data", r"rank\d+\.data_wait", "%", factor=100.0),
    Chart("cpu", "CPU", rf"{NODE}host\.cpu", "%"),
    Chart("rank_cpu", "CPU of each rank, of one core", r"rank\d+\.(cpu|loaders)", "%"),
    Chart("memory", "Host memory", rf"{NODE}host\.mem_used|rank\d+\.rss", "bytes", rf"{NODE}host\.mem_total"),
    Chart("disk", "Disk", r"host\.disk_(read|write)_bps", "bytes/s"),
)
MAX_LINES = 32
"""Of a chart: a machine may have many ranks."""


def of_session(engine: Engine, row: SessionInfo, *, recent: bool) -> View:
    """`session`, `span_s` of a sample, `t` (Unix time), `charts`: `name`, `title`, `unit`, `lines` (`key`, `y`), `limit`.

    Args:
        recent: the last ten minutes by seconds; else the session from its beginning.
    """
    rows = _recent(engine, row) if recent else _whole(engine, row)
    per = -(-len(rows) // MAX_ROWS)
    if per > 1:
        rows = [_merged(rows[at : at + per]) for at in range(0, len(rows), per)]
    keys = sorted({key for item in rows for key in item.values}, key=_natural)
    charts = []
    for chart in CHARTS:
        lines = [
            {"key": key, "y": [_scaled(item, key, chart.factor) for item in rows]}
            for key in [key for key in keys if re.fullmatch(chart.keys, key)][:MAX_LINES]
        ]
        if lines:
            limits = [
                item.values[key]
                for item in rows
                for key in keys
                if chart.limit and key in item.values and re.fullmatch(chart.limit, key)
            ]
            charts.append(
                {
                    "name": chart.name,
                    "title": chart.title,
                    "unit": chart.unit,
                    "lines": lines,
                    "limit": max(limits, default=None),
                }
            )
    return {
        "session": row.number,
        "span_s": rows[0].span_s * per if rows else None,
        "from": stamp(rows[0].at) if rows else None,
        "to": stamp(rows[-1].at) if rows else None,
        "t": [item.at.timestamp() for item in rows],
        "charts": charts,
    }


def _recent(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    newest = samples.newest(engine, row.id)
    if newest is None:
        return []
    return samples.series(engine, row.id, newest.at - RECENT, samples.SECOND) or _whole(engine, row)


def _whole(engine: Engine, row: SessionInfo) -> list[SampleInfo]:
    minutes = samples.series(engine, row.id, row.started_at - timedelta(minutes=1), samples.MINUTE)
    if len(minutes) >= MIN_MINUTES:
        return minutes
    return (
        samples.series(engine, row.id, row.started_at, samples.SECOND)
        or minutes
        or samples.series(engine, row.id, row.started_at - timedelta(hours=1), samples.HOUR)
    )


def _merged(rows: Sequence[SampleInfo]) -> SampleInfo:
    return SampleInfo(rows[0].at, rows[0].span_s, samples.roll_up_values([item.values for item in rows]))


def _scaled(item: SampleInfo, key: str, factor: float) -> float | None:
    value = item.values.get(key)
    return None if value is None else value * factor


def _natural(key: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
