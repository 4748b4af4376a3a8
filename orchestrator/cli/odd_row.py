"""Decides whether an exception comes from a database row that kgorch did not write, or from a bug of kgorch.

A bug must show its traceback and exit with 1; a user who edited a row should be told which one. That some row is odd proves
nothing: the exception may still be a bug. So a row is blamed only where the exception touched it:

- a record with an odd value was in a frame of the exception, or
- SQLAlchemy failed to convert a row, or
- an odd value of the run that the verb reads is among the values in the frames.

Rows of other runs are not read, and of a run only the newest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

MAX_ROWS = 2_000
"""Rows of each table that are read, the newest: as many as a verb shows, and read within 0.1 s."""

MAX_VALUES = 20_000
"""Values in the frames of an exception that are compared."""

MAX_DEPTH = 6
"""Of containers in each other."""

CONVERSIONS = ("engine/result.py", "engine/_result_cy.py", "engine/_py_row.py", "orm/loading.py")
"""Files of SQLAlchemy that convert rows into Python values."""


def odd_row(error: Exception) -> str | None:
    """The row that caused the exception, in words; None for a bug of kgorch. Never raises."""
    try:
        return _odd_row(error)
    except Exception:  # a second failure must not hide the first
        return None


def _odd_row(error: Exception) -> str | None:
    from kgorch.cli.lookup import open_state
    from kgorch.core.limits import quota_windows
    from kgorch.db import integrity_check
    from kgorch.system.paths import check_stored_folder

    readers: integrity_check.Readers = {"pools.resets": quota_windows.parse, "runs.folder": check_stored_folder}
    frames = list(_frames(error))
    values = list(_values(frames))
    records = [value for value in values if type(value).__module__ == "kgorch.db.rows"]
    for record in records:
        if invalid := integrity_check.invalid_field(record, readers):
            return invalid.description
    engine = open_state()[2]
    if _is_conversion(frames):
        candidates = list(integrity_check.invalid_values(engine, readers, newest=MAX_ROWS))
        in_message = [invalid for invalid in candidates if str(invalid.value)[:40] in str(error)]
        return next((invalid.description for invalid in (*in_message, *candidates)), None)
    words: set[object] = {value for value in values if isinstance(value, str)}
    words |= {getattr(record, "run_id", None) or getattr(record, "id", None) for record in records}
    run_ids = integrity_check.find_run_ids(engine, words, newest=MAX_ROWS)
    found = list(integrity_check.invalid_values_of_runs(engine, run_ids, readers, newest=MAX_ROWS))
    for invalid in found:
        if _is_among(invalid.value, values) or (len(str(invalid.value)) > 2 and str(invalid.value)[:40] in str(error)):
            return invalid.description
    # None is among the values of any error, and SQLAlchemy empties the objects of a transaction that has failed
    return next(
        (invalid.description for invalid in found if invalid.value in (None, "null") or isinstance(error, TypeError)),
        None,
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """From the command line down to the place where it was raised."""
    entry = error.__traceback__
    while entry:
        yield entry.tb_frame
        entry = entry.tb_next


def _is_conversion(frames: list[FrameType]) -> bool:
    """Whether SQLAlchemy failed to convert rows that it had fetched. For JSON columns it calls the json module."""
    paths = [Path(frame.f_code.co_filename).as_posix() for frame in frames]
    while paths and "/json/" in paths[-1]:
        paths.pop()
    is_inside = bool(paths) and ("sqlalchemy/" in paths[-1] or paths[-1].endswith("db/tables.py"))
    return is_inside and any("sqlalchemy/" in path and path.endswith(CONVERSIONS) for path in paths)


def _values(frames: Iterable[FrameType]) -> Iterator[Any]:
    """The locals of kgorch's own frames, and what containers and objects of kgorch among them hold, breadth first."""
    pending = [
        (value, 0)
        for frame in frames
        if Path(frame.f_code.co_filename).parts[-2:-1] != ("click",)
        and "/site-packages/" not in frame.f_code.co_filename
        for value in list(frame.f_locals.values())
    ]
    for _ in range(MAX_VALUES):
        if not pending:
            return
        value, depth = pending.pop(0)
        yield value
        if depth >= MAX_DEPTH:
            continue
        if isinstance(value, Mapping):
            pending += [(inner, depth + 1) for inner in list(value.values())[:MAX_ROWS]]
        elif isinstance(value, list | tuple | set):
            pending += [(inner, depth + 1) for inner in list(value)[:MAX_ROWS]]
        elif type(value).__module__.partition(".")[0] == "kgorch":
            pending += [(inner, depth + 1) for inner in _attributes(value)]


def _attributes(value: Any) -> list[Any]:
    """Of an object of kgorch's own, with slots or without."""
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _is_among(stored: Any, values: Iterable[Any]) -> bool:
    """Whether a value of the database, or what it is converted to, is one of those."""
    if isinstance(stored, int | float) and not isinstance(stored, bool):
        # the code may hold only what it computed from an odd number: infinity, nan, or a number out of range
        return any(isinstance(value, int | float) and (value == stored or not _is_ordinary(value)) for value in values)
    forms: list[Any] = [stored]
    if isinstance(stored, str):
        try:
            forms.append(json.loads(stored))
        except (ValueError, RecursionError):
            pass
    present = [form for form in forms if form is not None]
    prefix = str(stored)[:10] if len(str(stored)) >= 10 else None  # a datetime that was made of it prints the same date
    return any(
        any(type(value) is type(form) and value == form for form in present)
        or (prefix is not None and not isinstance(value, Mapping | list | tuple) and prefix in str(value)[:200])
        for value in values
    )


def _is_ordinary(number: float) -> bool:
    try:
        return math.isfinite(number) and abs(number) < 1e15
    except OverflowError:
        return False
