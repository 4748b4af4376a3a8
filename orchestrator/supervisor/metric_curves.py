"""The metric curves of a run, from files in the attempts' folders, rows of the database, and journals of older versions.

Rank 0 writes the file of its attempt, also while no supervisor runs. The supervisor imports it into the database at intervals and
at the attempt's end, because the database is what another machine continues from. All three sources may be untrusted:
core/metrics/metric_curve.py checks each line.
"""

from __future__ import annotations

import math
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.core.codes import EventKind
from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import FILE_NAME, AttemptRecords, Record
from kgorch.db import curves, sessions
from kgorch.db.import_run import RunRows
from kgorch.db.rows import AttemptInfo, EventInfo, RunInfo
from kgorch.db.untrusted_database import CURVE_BYTES, Columns
from kgorch.system.clock import boottime_s

IMPORT_S, IMPORT_SHARE = 60.0, 0.002
"""Shortest time between two imports of a running attempt, in seconds, and the largest share of the time that imports take. Each
import reads the whole file, about a megabyte after nine hours. If the machine is lost, the database lacks the last minute, or the
last minutes of a long attempt."""

READ_BYTES = 2 * metric_curve.MOST_BYTES
"""Bytes that are read at the end of a file. An untrusted one may be of any size."""

EPOCH_EVENTS = 10_000
"""Newest events `epoch` that are read from the journals of older versions."""


def of_run(engine: Engine, run: RunInfo) -> dict[str, list[Record]]:
    """The merged curve of each stage, by its name. Reads the attempts' files as well as the database."""
    attempts, imported = sessions.attempts(engine, run.id), curves.attempts_with_curves(engine, run.id)
    records = {item.id: _of_attempt(engine, item, is_imported=item.id in imported) for item in attempts}
    sessions_with_curves = {item.session_id for item in attempts if records[item.id]}
    # A journal has no attempts, only sessions: it is used for a session as a whole or not at all.
    without_curve = [item for item in attempts if item.session_id not in sessions_with_curves]
    if without_curve:
        records |= _from_journal(engine, run, without_curve)
    by_stage: dict[str, list[AttemptRecords]] = defaultdict(list)
    for item in attempts:
        by_stage[item.stage].append(AttemptRecords(item.first_step, records[item.id]))
    return {stage: metric_curve.merge(items) for stage, items in by_stage.items()}


def _of_attempt(engine: Engine, attempt: AttemptInfo, *, is_imported: bool) -> list[Record]:
    # The file first: it is as new as the rows, or newer.
    return read(Path(attempt.folder)) or (
        metric_curve.decode(curves.of_attempt(engine, attempt.id)) if is_imported else []
    )


def _from_journal(engine: Engine, run: RunInfo, attempts: Sequence[AttemptInfo]) -> dict[int, list[Record]]:
    """Records by attempt id, from events `epoch`: versions that wrote no curve noted the metrics there."""
    records: dict[int, list[Record]] = {item.id: [] for item in attempts}
    for event in sessions.events_of_kind(engine, run.id, EventKind.EPOCH, limit=EPOCH_EVENTS):
        record = _of_event(event)
        # An event names its session and stage. It is of the attempt in them that had started last.
        candidates = [
            item
            for item in attempts
            if item.session_id == event.session_id
            and item.stage == event.facts.get("stage")
            and item.started_at <= event.at
        ]
        if record and candidates:
            records[candidates[-1].id].append(record)
    return records


def _of_event(event: EventInfo) -> Record | None:
    facts: Mapping[str, Any] = event.facts
    fields = {"s": facts.get("step"), "e": facts.get("epoch"), "t": event.at.timestamp(), "v": facts.get("metrics")}
    return metric_curve.record_of(fields)


# Files


def read(folder: Path) -> list[Record]:
    """The records that rank 0 wrote into an attempt's folder; none without a readable file."""
    return metric_curve.decode(_text(folder, READ_BYTES))


def _text(folder: Path, most_bytes: int) -> str:
    """The end of the file in an attempt's folder; empty without a readable one."""
    try:
        # The folder may be an untrusted source's: a link could lead to any file, and a FIFO would block the open.
        descriptor = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return ""
            file.seek(max(0, status.st_size - most_bytes))
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def lines_of(records: Sequence[Record]) -> list[str]:
    """The records as lines for the database, thinned to the largest size of an attempt's."""
    return [metric_curve.encode(record) for record in metric_curve.thin(records, metric_curve.MOST_BYTES)]


def import_file(engine: Engine, attempt: AttemptInfo) -> None:
    """Import an attempt's file into the database. Safe to repeat. Raises: SQLAlchemyError."""
    if records := read(Path(attempt.folder)):
        curves.write(engine, attempt.id, lines_of(records))


class CurveImporter:
    """Imports the files of a supervisor's attempts, at intervals and at each attempt's end.

    Args:
        submit: runs a slow job outside the loop's thread.
        write: queues a write to the database, after those before it.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Callable[[], None]], object],
        write: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine, self._submit, self._write = engine, submit, write
        self._next_s = 0.0

    def submit_if_due(self, attempt: AttemptInfo) -> None:
        """Submit an import if the last one is long enough ago. The loop calls this at each heartbeat."""
        if boottime_s() >= self._next_s:
            self._next_s = math.inf  # no second import before the first is done
            self._submit(lambda: self.import_now(attempt))

    def import_now(self, attempt: AttemptInfo) -> None:
        """Import the attempt's file. Reads it in this thread, which is not the loop's except at the session's end."""
        began_s = boottime_s()
        try:
            if records := read(Path(attempt.folder)):
                lines = lines_of(records)
                self._write(lambda: curves.write(self._engine, attempt.id, lines))
        finally:
            now_s = boottime_s()
            self._next_s = now_s + max(IMPORT_S, (now_s - began_s) / IMPORT_SHARE)


# From another machine


def complete_curves(rows: RunRows, folder: Path | None) -> RunRows:
    """The rows of a source's database with their curves checked, and completed by the source's files.

    A file has records that no supervisor had imported yet. Of all files together the newest CURVE_BYTES are read.

    Args:
        folder: of the source's attempts; None without one.
    """
    lines: dict[int, list[str]] = defaultdict(list)
    for row in rows.curves:
        lines[row["attempt_id"]].append(row["lines"])
    numbers = {session["id"]: session["number"] for session in rows.sessions}
    columns, left = list[Columns](), CURVE_BYTES
    for attempt in reversed(rows.attempts):
        name, in_file = f"{numbers.get(attempt['session_id'])}.{attempt['number']}", list[Record]()
        if folder and left > 0 and not (folder / name).is_symlink():
            text = _text(folder / name, min(left, READ_BYTES))
            left -= len(text)
            in_file = metric_curve.decode(text)
        in_rows = metric_curve.decode("\n".join(lines[attempt["id"]])[-READ_BYTES:])
        records = max(in_file, in_rows, key=_last_step)
        pieces = curves.pieces(lines_of(records))
        columns += [
            {"attempt_id": attempt["id"], "number": number, "lines": piece} for number, piece in enumerate(pieces)
        ]
    return rows._replace(curves=columns)


def _last_step(records: Sequence[Record]) -> int:
    return max((record.step for record in records), default=-1)
