"""Numbers that a script keeps in variables of its running functions: a count of steps, the best score, the sum of an epoch.

A script around Accelerate begins anew in each session, and goes on where a step begins: at a place where the same functions run as
in the session before. There the variables that have moved during the training get the values that they had. A number that never
moves is what the script has computed or was given in this session (a rank, a length, a rate), and stays; so do what is no
number, and readings of a clock, which belong to their session.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast

from kgorch.worker.audit.script_objects import frames_of_script, is_of_script, variables_of
from kgorch.worker.session import Session

Number = bool | int | float | None
Numbers = dict[str, dict[str, Number]]
"""By function and variable."""

MOST = 300
"""Limit of a function's numbers; those of the others begin anew."""

NEAR_S = 60.0
"""A number that no clock has shown since the process began, less so many seconds, is no reading of one."""

_began_s = time.monotonic()


class ScriptNumbers:
    """Those of one training, over sessions. A checkpoint has those that have changed from one step to another, and the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._moved, self._still = (_numbers(session.resumed.get(key)) for key in ("moved", "still"))
        self._saved = self._moved, self._still
        self._names = {function: {*values} for function, values in self._moved.items()}
        """Of the variables that have moved."""
        self._first: Numbers = {}
        self._before: Numbers = {}

    def look(self) -> None:
        """The script iterates its first loader: what has other values where it goes on got them in epochs that are done."""
        if self._session.resumed:
            self._first = {function: _numbers_of(frame) for function, frame in _functions()}

    def restore(self) -> list[str]:
        """The session goes on. Returns: names of the variables that have got other values than they had."""
        (moved, still), self._saved, names = self._saved, ({}, {}), []
        for function, frame in _functions() if moved or still else ():
            now, first = _numbers_of(frame), self._first.get(function)
            changed = {name for name in now if first is not None and _differs(first, name, now[name], is_new=True)}
            values = {name: value for name, value in still.get(function, {}).items() if name in changed}
            names += _set(frame, values | moved.get(function, {}))
        self._first = {}
        return sorted(names)

    def note(self) -> None:
        """A step begins: checkpoints have the numbers of now."""
        moved, still = {**self._moved}, {**self._still}
        for function, frame in _functions():
            values, before = _numbers_of(frame), self._before.get(function, {})
            names = self._names.setdefault(function, set())
            names |= {name for name, value in values.items() if _differs(before, name, value)}
            self._before[function] = values
            moved[function] = {name: value for name, value in values.items() if name in names}
            still[function] = {name: value for name, value in values.items() if name not in names}
        if moved != self._moved:
            self._moved = moved
            self._session.remember(moved={function: values for function, values in moved.items() if values})
        if still != self._still:
            self._still = still
            self._session.remember(still={function: values for function, values in still.items() if values})


def count_on(batches: int) -> None:
    """Have each `enumerate` around the loader that is asked for a batch count on, after so many batches.

    Its count is an integer behind the head of the object; it is written where the object says the same number.
    """
    frame, asked = inspect.currentframe(), set()
    while frame is not None and not is_of_script(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        asked.add(frame)
        frame = frame.f_back
    for item in gc.get_objects():
        if type(item) is not enumerate:
            continue
        around, count = cast(tuple[Any, int], item.__reduce__()[1])
        if getattr(around, "gi_frame", None) in asked:
            place = ctypes.c_ssize_t.from_address(id(item) + object.__basicsize__)
            if place.value == count:
                place.value += batches


def _differs(before: Mapping[str, Number], name: str, value: Number, *, is_new: bool = False) -> bool:
    """Whether a variable has another value than before. `is_new`: what is returned where it had none."""
    return is_new if name not in before else before[name] is not value and before[name] != value


def _functions() -> list[tuple[str, FrameType]]:
    """The running functions of the script by name, the outermost first; one that calls itself has a number besides."""
    counts: Counter[str] = Counter()
    result = []
    for frame in reversed(frames_of_script()):
        name = frame.f_code.co_qualname
        counts[name] += 1
        result.append((name if counts[name] == 1 else f"{name} {counts[name]}", frame))
    return result


def _numbers_of(frame: FrameType) -> dict[str, Number]:
    """The numbers that this function has in variables."""
    is_module = not _is_function(frame)
    values = (
        (name, float(value) if isinstance(value, float) else value)
        for name, value in (frame.f_globals if is_module else variables_of(frame)).copy().items()
        if (type(value) in (bool, int, type(None)) or isinstance(value, float)) and not name.startswith("__")
    )
    return dict(itertools.islice(((name, value) for name, value in values if not _is_clock(value)), MOST))


def _is_clock(value: Number) -> bool:
    """Whether a clock may have shown it since this process began."""
    if not isinstance(value, float) or value.is_integer():
        return False
    age_s = time.monotonic() - _began_s + NEAR_S
    return any(0 <= now_s - value <= age_s for now_s in (time.time(), time.monotonic()))


def _is_function(frame: FrameType) -> bool:
    """And not a module, whose variables are its globals."""
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)


def _set(frame: FrameType, values: Mapping[str, Number]) -> list[str]:
    """Give variables of a running function these values. Returns: the names of those that have changed.

    None of them takes the place of anything that is no number.
    """
    now = _numbers_of(frame)
    others = frame.f_globals.keys() if not _is_function(frame) else variables_of(frame).keys()
    new = {name: value for name, value in values.items() if name in now or name not in others}
    new = {name: value for name, value in new.items() if _differs(now, name, value, is_new=True)}
    if not _is_function(frame):
        frame.f_globals.update(new)
        return [*new]
    names = {*frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    new = {name: value for name, value in new.items() if name in names}
    variables = frame.f_locals
    variables.update(new)
    if sys.version_info < (3, 13):  # the variables are a copy
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        variables.clear()  # the frame keeps it, and with it a step's batch and graph
    return [*new]


def _numbers(saved: Any) -> Numbers:
    """Those of a checkpoint, which may be a stranger's."""
    return {
        function: {
            name: value
            for name, value in itertools.islice(values.items(), MOST)
            if isinstance(name, str) and name.isidentifier() and type(value) in (bool, int, float, type(None))
        }
        for function, values in (saved.items() if isinstance(saved, dict) else ())
        if isinstance(values, dict)
    }
