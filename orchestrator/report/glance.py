"""What a terminal shows of a run beside its state: how its metrics went, and the last lines of its log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.db import sessions
from kgorch.db.rows import RunInfo
from kgorch.report import curves, log_pages, metrics
from kgorch.report.metrics import RunMetrics

POINTS = 120
"""Of a trend: more than a terminal has columns for it."""

READ_S, READ_SHARE = 5.0, 0.05
"""Shortest time between two reads of the curves, and the largest share of the time that reads take: a long run has megabytes."""

LOG_LINES = 40


class Trend(NamedTuple):
    """A metric over the steps of its stage: finite values, oldest first, at most about POINTS."""

    name: str
    values: tuple[float, ...]


class Glance(NamedTuple):
    """Trends, the most important first; the log's last lines, oldest first."""

    trends: tuple[Trend, ...] = ()
    log: tuple[str, ...] = ()


class GlanceReader:
    """Reads glances of one run, its curves less often than its log."""

    def __init__(self) -> None:
        self._trends: tuple[Trend, ...] = ()
        self._next_read_s = 0.0

    def read(self, engine: Engine, run: RunInfo) -> Glance:
        began_s = time.monotonic()
        if began_s >= self._next_read_s:
            self._trends = trends(metrics.of_run(engine, run))
            took_s = time.monotonic() - began_s
            self._next_read_s = began_s + max(READ_S, took_s / READ_SHARE)
        return Glance(self._trends, log_tail(engine, run))


def trends(curve: RunMetrics) -> tuple[Trend, ...]:
    """The headline metric of the run, and the first loss."""
    losses = [name for name in curve.names if "loss" in name.lower()]
    chosen = dict.fromkeys(name for name in (curves.headline(curve), *losses[:1]) if name is not None)
    found = [Trend(name, tuple(curves.sparkline(curve, name, points=POINTS))) for name in chosen]
    return tuple(trend for trend in found if trend.values)


def log_tail(engine: Engine, run: RunInfo) -> tuple[str, ...]:
    """The last lines of rank 0 of the newest attempt, without empty ones."""
    row = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, row.id) if row else None
    if attempt is None:
        return ()
    try:
        lines = log_pages.page(Path(attempt.folder, "rank0.log"))["lines"]
    except OSError:
        return ()
    return tuple(text for line in lines[-LOG_LINES:] if (text := line.rstrip()))
