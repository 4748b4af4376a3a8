"""How a run has gone over time: its metrics and its steps, for drawing."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from sqlalchemy import Engine

from db import sessions
from db.records import RunInfo

POINTS = 2000
"""The newest of each; more would not show."""

Series = list[tuple[float, float]]
"""Hours since the run was begun, and a value."""


class Course(NamedTuple):
    metrics: dict[str, Series]
    steps: Series


def of_run(engine: Engine, run: RunInfo) -> Course:
    """From the ends of epochs, and of sessions."""
    told = [
        (item.at, item.facts["step"], item.facts["metrics"])
        for item in sessions.of_kind(engine, run.id, "epoch", limit=POINTS)
    ]
    for row in sessions.of_run(engine, run.id, limit=POINTS):
        told.append((row.started_at, row.first_step, {}))
        if at := row.ended_at or row.beat_at:
            told.append((at, row.step, row.metrics))
    metrics: dict[str, Series] = defaultdict(list)
    steps: Series = []
    for at, step, values in sorted(told, key=lambda item: item[:2]):
        hours = (at - run.created_at).total_seconds() / 3600
        steps.append((hours, step))
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                metrics[name].append((hours, value))
    return Course(dict(metrics), steps)
