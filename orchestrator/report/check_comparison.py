"""The last check of a run's plan beside what the run has measured, for `kgorch history`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.core.codes import EventKind
from kgorch.db import samples, sessions
from kgorch.db.rows import RunInfo
from kgorch.report.json_fields import View
from kgorch.system.paths import check_result_path

MAX_SESSIONS = 50
"""Newest sessions of a run that are compared: its figures change with its plan, and a run may have thousands of sessions."""

MAX_EPOCHS = 1000


class Comparison(NamedTuple):
    """A figure that a check predicted, beside the one measured in the run; bytes or seconds."""

    stage: str
    what: str
    predicted: float
    measured: float
    is_bytes: bool = False


def compare_with_run(engine: Engine, run: RunInfo, home: Path) -> list[Comparison]:
    """The last check of the run's plan beside the run; empty without a check, or before the run has measured anything."""
    try:
        # Somebody may have edited the file: without a comparison `kgorch history` still shows the rest.
        path = check_result_path(home, run.plan_hash, run.name, run.workdir)
        view = json.loads(path.read_text())
        return [*_compare_epochs(engine, run, view["stages"]), *_compare_memory(engine, run, view["stages"])]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _compare_epochs(engine: Engine, run: RunInfo, stages: Sequence[View]) -> Iterator[Comparison]:
    events = sessions.events_of_kind(engine, run.id, EventKind.EPOCH, limit=MAX_EPOCHS)
    for stage in stages:
        every = [event.facts for event in events if event.facts["stage"] == stage["name"]]
        warm = [
            facts for facts in every if not facts.get("first")
        ] or every  # a session's first epoch reads a cold cache
        steps = sum(facts["steps"] for facts in warm)
        if steps and stage["time"] and stage["time"]["batches"]:
            epoch_s = sum(facts["lasted_s"] for facts in warm) * stage["time"]["batches"] / steps
            yield Comparison(stage["name"], "an epoch", stage["time"]["epoch_s"], epoch_s)


def _compare_memory(engine: Engine, run: RunInfo, stages: Sequence[View]) -> Iterator[Comparison]:
    """The peak of all stages together: a telemetry sample does not name its stage."""
    predicted = max((stage["memory"]["process"] for stage in stages if stage["memory"]), default=0)
    peaks = [
        value
        for row in sessions.of_run(engine, run.id, limit=MAX_SESSIONS)
        for sample in samples.series(engine, row.id, row.started_at - timedelta(hours=1), samples.HOUR)
        for key, value in sample.values.items()
        if re.fullmatch(r"rank\d+\.rss_peak\.max", key)
    ]
    if predicted and peaks:
        yield Comparison("", "a rank's process", predicted, max(peaks), is_bytes=True)
