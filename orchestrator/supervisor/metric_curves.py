"""The curves of a run's metrics, from where they lie: files in attempts' folders, rows of the database, journals of older versions.

An attempt's file says all that its rank 0 wrote, whether or not a supervisor lived. It is imported into the database from time to
time and at the attempt's end, because the database is what goes on to another machine. Whatever is read may be a stranger's:
core/metric_curve.py checks each line.
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

from db import curves, sessions
from db.imported import Columns
from db.records import AttemptInfo, EventInfo, RunInfo
from db.transfer import Rows
from orchestrator.core import metric_curve
from orchestrator.core.codes import EventKind
from orchestrator.core.metric_curve import FILE_NAME, Record, Stretch
from orchestrator.system.clock import boottime_s

IMPORT_S, IMPORT_SHARE = 60.0, 0.002
"""Seconds between two imports of an attempt that runs, and the share of the time that they take at most: the database of a machine
that is lost says all but the last minute, or the last minutes of a long attempt."""

READ_BYTES = 2 * metric_curve.MOST_BYTES
"""Of a file, the newest."""

EPOCH_EVENTS = 10_000


def of_run(engine: Engine, run: RunInfo) -> dict[str, list[Record]]:
    """The merged curve of each stage, by its name. Reads files besides the database."""
    stretches: dict[str, list[Stretch]] = defaultdict(list)
    attempts, imported = sessions.attempts(engine, run.id), curves.attempts_with_any(engine, run.id)
    found = {item.id: _of_attempt(engine, item, is_imported=item.id in imported) for item in attempts}
    silent = {item.session_id for item in attempts} - {item.session_id for item in attempts if found[item.id]}
    if silent:
        found |= _from_journal(engine, run, [item for item in attempts if item.session_id in silent])
    for item in attempts:
        stretches[item.stage].append(Stretch(item.first_step, found[item.id]))
    return {stage: metric_curve.merged(items) for stage, items in stretches.items()}


def _of_attempt(engine: Engine, attempt: AttemptInfo, *, is_imported: bool) -> list[Record]:
    return read(Path(attempt.folder)) or (
        metric_curve.decode(curves.of_attempt(engine, attempt.id)) if is_imported else []
    )


def _from_journal(engine: Engine, run: RunInfo, attempts: Sequence[AttemptInfo]) -> dict[int, list[Record]]:
    """Of sessions of versions that wrote no curve: what their supervisors noted at the ends of epochs, by attempt id."""
    found: dict[int, list[Record]] = {item.id: [] for item in attempts}
    for event in sessions.of_kind(engine, run.id, EventKind.EPOCH, limit=EPOCH_EVENTS):
        record = _of_event(event)
        mine = [
            item
            for item in attempts
            if item.session_id == event.session_id
            and item.stage == event.facts.get("stage")
            and item.started_at <= event.at
        ]
        if record and mine:
            found[mine[-1].id].append(record)
    return found


def _of_event(event: EventInfo) -> Record | None:
    facts: Mapping[str, Any] = event.facts
    told = {"s": facts.get("step"), "e": facts.get("epoch"), "t": event.at.timestamp(), "v": facts.get("metrics")}
    return metric_curve.record_of(told)


# Files


def read(folder: Path) -> list[Record]:
    """What rank 0 has written in an attempt's folder; nothing where there is none that can be read."""
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return []
            file.seek(max(0, found.st_size - READ_BYTES))
            return metric_curve.decode(file.read(READ_BYTES).decode(errors="replace"))
    except OSError:
        return []


def lines_of(records: Sequence[Record]) -> list[str]:
    """As they are kept in the database: checked, and bounded."""
    return [metric_curve.encode(record) for record in metric_curve.thinned(records, metric_curve.MOST_BYTES)]


def take_in(engine: Engine, attempt: AttemptInfo) -> None:
    """Import what the attempt has written until now. Raises: SQLAlchemyError."""
    if records := read(Path(attempt.folder)):
        curves.write(engine, attempt.id, lines_of(records))


class Import:
    """Of a supervisor: now and then, and at each attempt's end.

    Args:
        submit: has a slow job done beside the loop.
        write: has an entry written into the database, in its turn.
    """

    def __init__(
        self,
        engine: Engine,
        submit: Callable[[Callable[[], None]], object],
        write: Callable[[Callable[[], None]], None],
    ) -> None:
        self._engine, self._submit, self._write = engine, submit, write
        self._next_s = 0.0

    def look(self, attempt: AttemptInfo) -> None:
        """In the loop, at each beat."""
        if boottime_s() >= self._next_s:
            self._next_s = math.inf  # until that is done
            self._submit(lambda: self.read(attempt))

    def read(self, attempt: AttemptInfo) -> None:
        """Beside the loop, or at the session's end."""
        began_s = boottime_s()
        try:
            if records := read(Path(attempt.folder)):
                lines = lines_of(records)
                self._write(lambda: curves.write(self._engine, attempt.id, lines))
        finally:
            now_s = boottime_s()
            self._next_s = now_s + max(IMPORT_S, (now_s - began_s) / IMPORT_SHARE)


# From another machine


def brought(rows: Rows, folder: Path | None) -> Rows:
    """What a source's database says of curves, checked; completed by the files beside it, which know what no supervisor imported.

    Args:
        folder: of the attempts there; None where there is none.
    """
    lines: dict[int, list[str]] = defaultdict(list)
    for row in rows.curves:
        lines[row["attempt_id"]].append(row["lines"])
    numbers = {session["id"]: session["number"] for session in rows.sessions}
    kept: list[Columns] = []
    for attempt in rows.attempts:
        name = f"{numbers.get(attempt['session_id'])}.{attempt['number']}"
        in_file = read(folder / name) if folder and not (folder / name).is_symlink() else []
        in_rows = metric_curve.decode("\n".join(lines[attempt["id"]])[-READ_BYTES:])
        records = max(in_file, in_rows, key=_last_step)
        pieces = curves.pieces(lines_of(records))
        kept += [{"attempt_id": attempt["id"], "number": number, "lines": piece} for number, piece in enumerate(pieces)]
    return rows._replace(curves=kept)


def _last_step(records: Sequence[Record]) -> int:
    return max((record.step for record in records), default=-1)
