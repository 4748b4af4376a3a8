"""Telemetry samples at three resolutions: each second of the last hour, a row a minute, and a row an hour.

A row of a minute holds the mean of its samples, and also the maximum where the mean hides it (`….max`). Minutes are kept as far
back as a bound on their bytes allows, hours for ever. Queries read a range of the index (session, span, instant).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, TypeAlias

from sqlalchemy import Engine, Select, delete, exists, func, insert, select

from kgorch.core.codes import OVER
from kgorch.db.rows import SampleInfo
from kgorch.db.tables import Sample, SessionRow

SECOND, MINUTE, HOUR = 0, 60, 3600
MAX_AGE_OF_SECONDS = timedelta(hours=1)
MINUTES_BYTES = 150_000_000
"""Of all rows of minutes together; about 130 sessions of nine hours with two GPUs and two ranks."""

ROW_BYTES = 110
"""Of a row and its index entry, without its values; measured, see tests/db/test_samples.py."""

PEAKS = ("mem_used", "temp_c", "reserved", "peak", "rss", "rss_peak", "step_s")
"""Rolled up to the mean and, as `….max`, the maximum. These names are the last parts of the keys in docs/json.md."""

COUNTS = ("mem_total", "power_limit_w", "ecc", "processes", "cores", "total", "alloc_retries", "ooms")
"""Rolled up to the maximum: a mean of limits and counts says nothing."""

MASKS = ("throttle",)
"""Rolled up to all bits of the samples."""

Measurement: TypeAlias = tuple[datetime, Mapping[str, float]]


def write(engine: Engine, session_id: int, batch: Sequence[Measurement]) -> None:
    """Insert samples of single seconds, in one transaction."""
    _insert(engine, session_id, SECOND, batch)


def roll_up(engine: Engine, session_id: int) -> None:
    """Roll seconds up to minutes and minutes to hours. Calling it again changes nothing.

    It starts from the last row of the coarser span and replaces it: that row may cover only part of its span.
    """
    for source, span_s in ((SECOND, MINUTE), (MINUTE, HOUR)):
        with engine.connect() as connection:
            last_at = connection.scalar(_rows(session_id, span_s).with_only_columns(func.max(Sample.at)))
        rows = series(engine, session_id, last_at or datetime.min.replace(tzinfo=UTC), source)
        spans = groupby(rows, key=lambda row: int(row.at.timestamp()) // span_s * span_s)
        rolled = [
            (datetime.fromtimestamp(start_s, UTC), roll_up_values([row.values for row in span]))
            for start_s, span in spans
        ]
        _insert(engine, session_id, span_s, rolled, replace=True)


def roll_up_values(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The values of several samples as those of one: means and peaks, the maximum of counts, all bits of masks."""
    columns: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            columns[key].append(value)
    result: dict[str, float] = {}
    for key, values in columns.items():
        name = key.rpartition(".")[2]
        if name == "max":  # goes into the row with its key, below
            continue
        if name in MASKS:
            result[key] = _union(values)
        else:
            result[key] = max(values) if name in COUNTS else sum(values) / len(values)
        if name in PEAKS:
            result[f"{key}.max"] = max(columns.get(f"{key}.max", values))
    return result


def prune(engine: Engine, session_id: int) -> None:
    """Delete the seconds that are older than MAX_AGE_OF_SECONDS."""
    with engine.begin() as connection:
        old = Sample.at < datetime.now(UTC) - MAX_AGE_OF_SECONDS
        connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == SECOND, old))


def prune_ended_sessions(engine: Engine, *, minutes_bytes: int = MINUTES_BYTES) -> None:
    """Roll up and delete the seconds of sessions that are over, and delete the oldest minutes beyond the bound.

    A supervisor that was killed has left such seconds.
    """
    with engine.connect() as connection:
        with_seconds = list(
            connection.scalars(
                select(Sample.session_id)
                .join(SessionRow)
                .where(Sample.span_s == SECOND, SessionRow.phase.in_(OVER))
                .distinct()
            )
        )
    for session_id in with_seconds:
        roll_up(engine, session_id)
        _delete(engine, session_id, SECOND)
    for session_id in _sessions_beyond(engine, minutes_bytes):
        _delete(engine, session_id, MINUTE)


def newest(engine: Engine, session_id: int) -> SampleInfo | None:
    """The last sample of a session; once its seconds are deleted, its last minute."""
    with engine.connect() as connection:
        for span_s in (SECOND, MINUTE):
            row = connection.execute(newest_row(session_id, span_s)).first()
            if row:
                return SampleInfo(*row)
    return None


def newest_row(session_id: int, span_s: int) -> Select[Any]:
    return _rows(session_id, span_s).order_by(Sample.at.desc()).limit(1)


def series(engine: Engine, session_id: int, since: datetime, span_s: int) -> list[SampleInfo]:
    """Samples of seconds, minutes or hours from `since` on, oldest first."""
    with engine.connect() as connection:
        query = _rows(session_id, span_s).where(Sample.at >= since).order_by(Sample.at)
        return [SampleInfo(*row) for row in connection.execute(query)]


def _rows(session_id: int, span_s: int) -> Select[Any]:
    query = select(Sample.at, Sample.span_s, Sample.values)
    return query.where(Sample.session_id == session_id, Sample.span_s == span_s)


def _insert(
    engine: Engine, session_id: int, span_s: int, rows: Iterable[Measurement], *, replace: bool = False
) -> None:
    """`replace`: delete the rows from the first instant on before."""
    columns = [
        {
            "session_id": session_id,
            "at": at,
            "span_s": span_s,
            "values": {key: _round(value) for key, value in row.items()},
        }
        for at, row in rows
    ]
    if not columns:
        return
    with engine.begin() as connection:
        if replace:
            old = Sample.at >= columns[0]["at"]
            connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == span_s, old))
        connection.execute(insert(Sample), columns)


def _delete(engine: Engine, session_id: int, span_s: int) -> None:
    with engine.begin() as connection:
        connection.execute(delete(Sample).where(Sample.session_id == session_id, Sample.span_s == span_s))


def _sessions_beyond(engine: Engine, bound_bytes: int) -> list[int]:
    """Sessions whose minutes exceed the bound, when the newest sessions are counted first.

    The bytes of a session are estimated from its newest row.
    """
    is_minute, total = Sample.span_s == MINUTE, 0
    each = select(Sample.session_id, func.count()).where(is_minute).group_by(Sample.session_id)
    with engine.connect() as connection:
        for session_id, count in connection.execute(each.order_by(Sample.session_id.desc())):
            value_bytes = newest_row(session_id, MINUTE).with_only_columns(func.length(Sample.values))
            total += count * (ROW_BYTES + (connection.scalar(value_bytes) or 0))
            if total > bound_bytes:
                has_minutes = exists().where(Sample.session_id == SessionRow.id, is_minute)
                return list(connection.scalars(select(SessionRow.id).where(SessionRow.id <= session_id, has_minutes)))
    return []


def _union(values: Iterable[float]) -> int:
    bits = 0
    for value in values:
        bits |= int(value)
    return bits


def _round(value: float) -> float:
    """To six significant digits; a whole number as an int, because samples are many."""
    if value != int(value):
        value = float(f"{value:.6g}")
    return int(value) if value == int(value) else value
