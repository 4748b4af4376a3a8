"""Numbers that a script keeps in variables of its running functions, and in the dicts and objects of its own classes that these
hold: a count of steps, the best score, the sum of an epoch.

A script around Accelerate begins anew in each session, and goes on where a step begins: at a place where the same functions run as
in the session before. There the variables that have moved during the training get the values that they had. A number that never
moves is what the script has computed or was given in this session (a rank, a length, a rate), and stays; so do what is no
number, and readings of a clock, which belong to their session.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import inspect
import itertools
import sys
import time
import types
from collections import Counter
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

import numpy as np

from kgorch.worker.audit.script_objects import frames_of_script, variables_of
from kgorch.worker.integrations import script_owners
from kgorch.worker.session import Session

Number = int | float | np.generic | None
Numbers = dict[str, dict[str, Number]]
"""By function, or the path from one to an object, and variable. A bool is none: a checkpoint may be a stranger's, and a switch is
not for it to turn."""

MOST, LONGEST, LARGEST = 300, 64, 1 << 63
"""Limits of a step: numbers of the running functions, the innermost and the newest first; characters of a name; absolute value of
an integer. What is beyond them begins anew."""

MOST_PATHS = 1000
"""Functions and objects that are remembered; beyond them those are forgotten that are not there at a step."""

MOST_EPOCHS = 10_000
"""Epochs that are done and begin with the numbers of the first."""

MOST_TOLD = 5
"""Objects that are named, because `exactness` is part of every status."""

ANEW = (
    "numbers of objects begin anew in each session where a list, tensor or array in them changes, also a count of steps"
)

PLAIN = (int, float, type(None), np.generic)
NANOSECONDS = 10**9

EARLIER_S = 60.0
"""A clock may have been read so long before this module was imported."""


def _clocks() -> tuple[float, ...]:
    """What they show, in seconds."""
    return time.time(), time.monotonic()


_began = tuple(shown_s - EARLIER_S for shown_s in _clocks())


class ScriptNumbers:
    """Those of one training, over sessions. A checkpoint has those that have changed from one step to another, and the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._moved, self._still = (_numbers(session.resumed.get(key)) for key in ("moved", "still"))
        self._saved = self._moved, self._still
        self._names = {function: {*values} for function, values in self._moved.items()}
        """Of the variables that have moved."""
        self._first: Numbers = {}
        """Where the first epoch that is done began."""
        self._owners: dict[str, tuple[int, Any]] = {}
        """Of each object's path the id of what it led to first, and that one's lists as they were seen last."""
        self._left_alone: set[str] = set()
        """Paths that have led to different objects, and those of objects with a list that has changed."""
        self._with_lists: dict[str, tuple[list[str], dict[str, Number]]] = {}
        """Of these the lists, and the numbers that begin anew with them, as they were seen last."""
        self._held: set[int] = set()
        self.saves_objects = False
        """Objects are saved with all that they hold, where a list in them changes (own_attributes.py)."""
        self._told: set[str] = set()
        self._said: list[str] = []
        self._set_back = 0
        self._before: Numbers = {}
        self._clocks: dict[str, set[str]] = {}
        """Names of the variables that hold a reading of a clock, or perhaps a handle: neither is given back."""
        self._noted = _began  # what the clocks have shown where the step before began

    def set_back(self) -> None:
        """An epoch that is done begins: with the numbers that the first of them began with.

        All have the same weights, so a script that waits for a better score would end with them. What a `for` or a call has given
        stays. A loop over numbers of its own that does not come to its place so gets them back no more.
        """
        if not self._first:
            self._first = {function: values for function, _, values in self._now()}
            return
        self._set_back += 1
        for function, owner, now in self._now() if self._set_back < MOST_EPOCHS else ():
            given = _given(owner.f_code) if type(owner) is FrameType else ()
            first = self._first.get(function, {}).items()
            _set(owner, now, {name: value for name, value in first if name in now and name not in given})

    def restore(self) -> list[str]:
        """The session goes on. Returns: names of the variables that have got other values than they had."""
        (moved, still), self._saved, names = self._saved, ({}, {}), []
        for function, owner, now in self._now() if moved or still else ():
            first = self._first.get(function)
            changed = {name for name in now if first is not None and _differs(first, name, now[name], is_new=True)}
            values = {name: value for name, value in still.get(function, {}).items() if name in changed}
            path = "" if type(owner) is FrameType else f"{function.split()[-1]}."
            names += [path + name for name in _set(owner, now, values | moved.get(function, {}))]
        self._before = {function: values for function, _, values in self._now()}  # they are no readings of a clock
        self._first = {}
        return sorted(names)

    def _now(self) -> list[tuple[str, Any, dict[str, Number]]]:
        """The running functions, and the objects whose numbers may be given back, by path; the numbers of each."""
        found = _numbers_now()
        for path, owner, values in found:
            if type(owner) is FrameType or path in self._left_alone:
                continue
            buffers = script_owners.buffers(script_owners.variables_of(owner) or {})
            was, before = self._owners.setdefault(path, (id(owner), buffers))
            known = [(name, mark, before[name]) for name, mark in buffers.items() if name in before]
            changed = [name for name, now, then in known if now[0] == then[0] and now != then]
            if changed and was == id(owner):
                self._with_lists[path] = changed, values
            if was != id(owner) or changed:
                self._left_alone.add(path)
            self._owners[path] = was, {**before, **buffers}
        for path, owner, values in found:
            is_saved = self.saves_objects and type(owner) not in (*script_owners.DICTS, FunctionType)
            if path in self._with_lists and type(owner) is not FrameType and not is_saved:
                self._tell(path, values)
        kept = [(path, owner, values) for path, owner, values in found if path not in self._left_alone]
        self._held = {id(owner) for _, owner, _ in kept}
        return kept

    def has_numbers_of(self, thing: int) -> bool:
        """Whether the numbers of the object with this id are given back. Those of one are not whose lists change."""
        return thing in self._held

    def _tell(self, path: str, values: dict[str, Number]) -> None:
        """Tell of an object whose numbers change and begin anew."""
        lists, before = self._with_lists[path]
        names = sorted(name for name, value in values.items() if _differs(before, name, value))
        if names and path not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(path)
            name = path.split(" ")[-1]
            self._said.append(f"{name} ({', '.join(names[:3])}; {lists[0]} changes)")
            self._session.note_exactness(objects=f"{ANEW}: {', '.join(self._said)}")

    def note(self) -> None:
        """A step begins: checkpoints have the numbers of now."""
        moved, still, shown = {}, {}, _clocks()
        for function, owner, values in self._now():
            before, names = self._before.get(function, {}), self._names.setdefault(function, set())
            changed = {name for name, value in values.items() if _differs(before, name, value, is_new=True)}
            names |= changed & before.keys()
            read = {name for name in changed if _is_between(values[name], self._noted, shown)}
            if type(owner) is not FrameType:  # None that becomes an integer once may be a handle of this process
                read |= {name for name in changed & before.keys() if before[name] is None and type(values[name]) is int}
            clocks = self._clocks[function] = (self._clocks.get(function, set()) - changed) | read
            self._before[function] = values
            moved[function] = {name: value for name, value in values.items() if name in names - clocks}
            still[function] = {name: value for name, value in values.items() if name not in names | clocks}
        self._noted = shown
        for known in (self._owners, self._before, self._names, self._clocks, self._with_lists):
            if len(known) > MOST_PATHS:  # a dict whose names come and go
                for path in known.keys() - moved.keys():
                    del known[path]
        if len(self._left_alone) > MOST_PATHS:
            self._left_alone &= self._owners.keys()
        if moved != self._moved:
            self._moved = moved
            self._session.remember(moved={function: values for function, values in moved.items() if values})
        if still != self._still:
            self._still = still
            self._session.remember(still={function: values for function, values in still.items() if values})


def _differs(before: Mapping[str, Number], name: str, value: Number, *, is_new: bool = False) -> bool:
    """Whether a variable has another value than before. `is_new`: what is returned where it had none."""
    return is_new if name not in before else before[name] is not value and before[name] != value


def _numbers_now() -> list[tuple[str, object, dict[str, Number]]]:
    """The running functions of the script by name, then the variables of objects that they hold by path; the numbers of each."""
    counts: Counter[str] = Counter()
    functions = []
    for frame in reversed(frames_of_script()):
        name = frame.f_code.co_qualname
        counts[name] += 1
        functions.append((name if counts[name] == 1 else f"{name} {counts[name]}", frame))  # one that calls itself
    owners: list[tuple[str, Any, dict[str, Any]]] = [
        (name, frame, frame.f_globals.copy() if _is_module(frame) else variables_of(frame))
        for name, frame in reversed(functions)
    ]
    roots = [
        (name, {key: value for key, value in values.items() if key not in _targets(frame.f_code)})
        for name, frame, values in owners
    ]
    owners += script_owners.owners(roots, _is_name)
    result, left = [], MOST
    for path, owner, values in owners:
        kinds = map(type, values.values())
        numbers = [
            (name, value)
            for kind, (name, value) in zip(kinds, values.items(), strict=True)
            if issubclass(kind, PLAIN) and _is_name(name) and _is_number(value)
        ]
        result.append((path, owner, dict(numbers[max(0, len(numbers) - left) :])))
        left -= len(result[-1][2])
    return result


def _is_name(name: Any) -> bool:
    """Whether a variable of this name is noted."""
    return isinstance(name, str) and name.isascii() and len(name) <= LONGEST and not name.startswith("__")


def _is_number(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, np.generic):
        return value.dtype.kind in "iuf" and value.dtype.itemsize <= 8
    return -LARGEST < value < LARGEST if kind is int else kind in (float, type(None))


def _is_between(value: Number, earlier: tuple[float, ...], later: tuple[float, ...]) -> bool:
    """Whether one of the clocks has shown the value in between, in seconds or as an integer of nanoseconds."""
    if value is None or (isinstance(value, int) and value < NANOSECONDS):
        return False
    shown_s = value / NANOSECONDS if isinstance(value, int) else float(value)
    return any(first <= shown_s <= last for first, last in zip(earlier, later, strict=True))


@functools.lru_cache(maxsize=256)
def _given(code: types.CodeType) -> frozenset[str]:
    """The parameters of a function, and the targets of its `for` loops."""
    return _targets(code) | {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}


@functools.lru_cache(maxsize=256)
def _targets(code: types.CodeType) -> frozenset[str]:
    names, left = set[str](), 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            left = 1
        elif left and instruction.opname == "UNPACK_SEQUENCE":
            left += (instruction.arg or 1) - 1
        elif left and instruction.opname.startswith("STORE_"):
            value = instruction.argval
            names |= {*value} if isinstance(value, tuple) else {value}  # two instructions in one, since Python 3.13
            left -= 1
        else:
            left = 0
    return frozenset(names)


def _is_module(frame: FrameType) -> bool:
    """And not a function: its variables are its globals."""
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _set(owner: object, now: Mapping[str, Number], values: Mapping[str, Number]) -> list[str]:
    """Give variables of a running function or object these values. Returns: the names of those that have changed.

    None of them takes the place of anything that is no number, and no object gets a new attribute.

    Args:
        now: the numbers that it has.
    """
    if type(owner) is not FrameType:
        variables, is_dict = script_owners.variables_of(owner), type(owner) in script_owners.DICTS
        assert variables is not None
        allowed = {name for name in values if name in now or (is_dict and name not in variables)}
        changed = [name for name in sorted(allowed) if _differs(now, name, values[name], is_new=True)]
        for name in changed:  # a Counter's update adds
            variables[name] = values[name]
        return changed
    frame = owner
    others = frame.f_globals.keys() if _is_module(frame) else variables_of(frame).keys()
    new = {
        name: value
        for name, value in values.items()
        if (name in now or (name not in others and not _is_module(frame))) and _differs(now, name, value, is_new=True)
    }
    if _is_module(frame):
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
    found: Numbers = {}
    numbers = (
        (function, name, value)
        for function, values in (saved.items() if isinstance(saved, dict) else ())
        for name, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(function, str) and _is_name(name) and _is_number(value)
    )
    for function, name, value in itertools.islice(numbers, MOST):
        found.setdefault(function, {})[name] = value
    return found
