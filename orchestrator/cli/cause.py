"""Whether a row that kgorch has not written ended a verb, or a bug of ours did.

The difference matters: a bug must show its traceback and exit with 1, and a person who has edited a row should be told which.
That some row is odd proves nothing. So a row is blamed only where the exception was in touch with it: a record with an odd value
was in the hands of the code that failed, the conversion of a row failed itself, or an odd value of the run that the verb
looked at is among the values that the code held. Nothing of other runs is read, and of a run only the newest rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

NEWEST = 2_000
"""Rows of each table that are looked at: as many as a verb shows, and read within 0.1 s."""

VALUES = 20_000
"""Values in the frames of an exception that are looked at."""

DEPTH = 6

FETCHES = ("engine/result.py", "engine/_result_cy.py", "engine/_py_row.py", "orm/loading.py")
"""Where SQLAlchemy makes values of rows."""


def odd_row(error: Exception) -> str | None:
    """The row that the exception comes from, in words; None for a bug of ours. Never raises."""
    try:
        return _odd_row(error)
    except Exception:  # a second failure must not hide the first
        return None


def _odd_row(error: Exception) -> str | None:
    from db import soundness
    from orchestrator.core import quota_windows
    from orchestrator.system.paths import check_stored_folder

    readers: soundness.Readers = {"pools.resets": quota_windows.parse, "runs.folder": check_stored_folder}
    frames = list(_frames(error))
    values = list(_values(frames))
    records = [value for value in values if type(value).__module__ == "db.records"]
    for record in records:
        if found := soundness.odd_field(record, readers):
            return found.told
    from orchestrator.cli.common import state

    if _is_conversion(frames):
        candidates = list(soundness.oddities(state()[2], readers, newest=NEWEST))
        alike = [oddity for oddity in candidates if str(oddity.kept)[:40] in str(error)]
        return next((oddity.told for oddity in (*alike, *candidates)), None)
    engine = state()[2]
    named: set[object] = {value for value in values if isinstance(value, str)}
    named |= {getattr(record, "run_id", None) or getattr(record, "id", None) for record in records}
    run_ids = soundness.runs_among(engine, named, newest=NEWEST)
    for oddity in soundness.oddities_of(engine, run_ids, readers, newest=NEWEST):
        if _is_among(oddity.kept, values) or (len(str(oddity.kept)) > 2 and str(oddity.kept)[:40] in str(error)):
            return oddity.told
    return None


def _frames(error: BaseException) -> Iterator[FrameType]:
    """From the command line down to where it was raised."""
    at = error.__traceback__
    while at:
        yield at.tb_frame
        at = at.tb_next


def _is_conversion(frames: list[FrameType]) -> bool:
    """Whether SQLAlchemy failed to make values of rows that it had fetched; json is what it calls for some of them."""
    paths = [Path(frame.f_code.co_filename).as_posix() for frame in frames]
    while paths and "/json/" in paths[-1]:
        paths.pop()
    is_inside = bool(paths) and ("sqlalchemy/" in paths[-1] or paths[-1].endswith("db/tables.py"))
    return is_inside and any("sqlalchemy/" in path and path.endswith(FETCHES) for path in paths)


def _values(frames: Iterable[FrameType]) -> Iterator[Any]:
    """What the frames of our own code held: locals, and what is in them."""
    left = [
        (value, 0)
        for frame in frames
        if Path(frame.f_code.co_filename).parts[-2:-1] != ("click",)
        and "/site-packages/" not in frame.f_code.co_filename
        for value in list(frame.f_locals.values())
    ]
    for _ in range(VALUES):
        if not left:
            return
        value, depth = left.pop(0)
        yield value
        if depth >= DEPTH:
            continue
        if isinstance(value, Mapping):
            left += [(inner, depth + 1) for inner in list(value.values())[:NEWEST]]
        elif isinstance(value, list | tuple | set):
            left += [(inner, depth + 1) for inner in list(value)[:NEWEST]]


def _is_among(kept: Any, values: Iterable[Any]) -> bool:
    """Whether a value of the database, or what comes of it, is among those."""
    if isinstance(kept, int | float) and not isinstance(kept, bool):
        return any(isinstance(value, int | float) and (value == kept or not _is_usual(value)) for value in values)
    forms: list[Any] = [kept]
    if isinstance(kept, str):
        try:
            forms.append(json.loads(kept))
        except (ValueError, RecursionError):
            pass
    plain = [form for form in forms if form is not None]
    beginning = str(kept)[:10] if len(str(kept)) >= 10 else None
    return any(
        any(type(value) is type(form) and value == form for form in plain)
        or (beginning is not None and not isinstance(value, Mapping | list | tuple) and beginning in str(value)[:200])
        for value in values
    )


def _is_usual(number: float) -> bool:
    try:
        return math.isfinite(number) and abs(number) < 1e15
    except OverflowError:
        return False
