"""Verbs on telemetry. Every second of the newest hour is kept, before that a row a minute and a row an hour.

A row of a minute holds the mean of its samples, and beside it the greatest where that says more (`….max`). Minutes are
kept as far back as a bound on their bytes allows, hours always. What reads them reads a range of the index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, TypeAlias

from sqlalchemy import Engine, Select, delete, exists, func, insert, select

from db.records import SampleInfo
from db.tables import Sample, Session
from orchestrator.core.codes import OVER

SECOND, MINUTE, HOUR = 0, 60, 3600
SECONDS_KEPT = timedelta(hours=1)
MINUTES_BYTES = 150_000_000
"""Rows of minutes of all sessions together; about 130 sessions of nine hours with two GPUs and two ranks."""

ROW_BYTES = 110
"""What a row and its place in the index take besides its figures; measured, see tests/database/test_samples.py."""

PEAKS = ("mem_used", "temp_c", "reserved", "peak", "rss", "rss_peak", "step_s")
COUNTS = ("mem_total", "power_limit_w", "ecc", "processes", "cores", "total", "alloc_retries", "ooms")
MASKS = ("throttle",)

Measured: TypeAlias = tuple[datetime, Mapping[str, float]]


def write(engine: Engine, session_id: int, batch: Sequence[Measured]) -> None:
    """Samples of single seconds, in one transaction."""
    _insert(engine, session_id, SECOND, batch)


def roll_up(engine: Engine, session_id: int) -> None:
    """Seconds into minutes, minutes into hours, from the last row on, which may have been begun only; again to no effect."""
    for source, span_s in ((SECOND, MINUTE), (MINUTE, HOUR)):
        with engine.connect() as connection:
            begun_at = connection.scalar(_rows(session_id, span_s).with_only_columns(func.max(Sample.at)))
        found = series(engine, session_id, begun_at or datetime.min.replace(tzinfo=UTC), source)
        spans = groupby(found, key=lambda row: int(row.at.timestamp()) // span_s * span_s)
        rolled = [
            (datetime.fromtimestamp(begun_s, UTC), reduced([row.values for row in rows])) for begun_s, rows in spans
        ]
        _insert(engine, session_id, span_s, rolled, instead=True)


def reduced(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Several samples as one: means and peaks; of counts the highest, of bit masks all bits."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            columns[key].append(value)
    made: dict[str, float] = {}
    for key, values in columns.items():
        name = key.rpartition(".")[2]
        if name == "max":
            continue
        if name in MASKS:
            made[key] = _union(values)
        else:
            made[key] = max(values) if name in COUNTS else sum(values) / len(values)
        if name in PEAKS:
            made[f"{key}.max"] = max(columns.get(f"{key}.max", values))
    return made


def prune(engine: Engine, session_id: int) -> None:
    """Let go of seconds that are older than an hour."""
    with engine.begin() as connection:
        old = Sample.at < datetime.now(UTC) - SECONDS_KEPT
        connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == SECOND, old))


def tidy(engine: Engine, *, minutes_bytes: int = MINUTES_BYTES) -> None:
    """Of sessions that are over: let go of seconds, and of the oldest minutes beyond a bound on all of them."""
    with engine.connect() as connection:
        left = list(
            connection.scalars(
                select(Sample.session_id)
                .join(Session)
                .where(Sample.span_s == SECOND, Session.phase.in_(OVER))
                .distinct()
            )
        )
    for session_id in left:
        roll_up(engine, session_id)
        _delete(engine, session_id, SECOND)
    for session_id in _beyond(engine, minutes_bytes):
        _delete(engine, session_id, MINUTE)


def newest(engine: Engine, session_id: int) -> SampleInfo | None:
    """The last sample of a session; once its seconds are gone, its last minute."""
    with engine.connect() as connection:
        for span_s in (SECOND, MINUTE):
            row = connection.execute(newest_row(session_id, span_s)).first()
            if row:
                return SampleInfo(*row)
    return None


def newest_row(session_id: int, span_s: int) -> Select[Any]:
    return _rows(session_id, span_s).order_by(Sample.at.desc()).limit(1)


def series(engine: Engine, session_id: int, since: datetime, span_s: int) -> list[SampleInfo]:
    """Samples from `since` on, oldest first, of seconds, minutes or hours."""
    with engine.connect() as connection:
        chosen = _rows(session_id, span_s).where(Sample.at >= since).order_by(Sample.at)
        return [SampleInfo(*row) for row in connection.execute(chosen)]


def _rows(session_id: int, span_s: int) -> Select[Any]:
    chosen = select(Sample.at, Sample.span_s, Sample.values)
    return chosen.where(Sample.session_id == session_id, Sample.span_s == span_s)


def _insert(engine: Engine, session_id: int, span_s: int, rows: Iterable[Measured], *, instead: bool = False) -> None:
    made = [
        {
            "session_id": session_id,
            "at": at,
            "span_s": span_s,
            "values": {key: _short(value) for key, value in row.items()},
        }
        for at, row in rows
    ]
    if not made:
        return
    with engine.begin() as connection:
        if instead:
            old = Sample.at >= made[0]["at"]
            connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == span_s, old))
        connection.execute(insert(Sample), made)


def _delete(engine: Engine, session_id: int, span_s: int) -> None:
    with engine.begin() as connection:
        connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == span_s))


def _beyond(engine: Engine, bound_bytes: int) -> list[int]:
    """Sessions whose minutes go beyond the bound, counted from the newest up to it; their bytes are reckoned from one row each."""
    is_minute, total = Sample.span_s == MINUTE, 0
    each = select(Sample.session_id, func.count()).where(is_minute).group_by(Sample.session_id)
    with engine.connect() as connection:
        for session_id, count in connection.execute(each.order_by(Sample.session_id.desc())):
            figures = newest_row(session_id, MINUTE).with_only_columns(func.length(Sample.values))
            total += count * (ROW_BYTES + (connection.scalar(figures) or 0))
            if total > bound_bytes:
                has_minutes = exists().where(Sample.session_id == Session.id, is_minute)
                return list(connection.scalars(select(Session.id).where(Session.id <= session_id, has_minutes)))
    return []


def _union(values: Iterable[float]) -> int:
    bits = 0
    for value in values:
        bits |= int(value)
    return bits


def _short(value: float) -> float:
    """Six digits; whole numbers whole."""
    if value != int(value):
        value = float(f"{value:.6g}")
    return int(value) if value == int(value) else value
