"""The dicts, objects of its own classes and closures that variables of a script lead to, for script_numbers.py.

No code of theirs is run. Of one that also holds a list, a set, a tensor or an array that is changed, the numbers are left alone:
they may be places in it. Such an object is saved as a whole (own_attributes.py); a dict begins anew in each session.
"""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kgorch.worker import object_variables
from kgorch.worker.audit.script_objects import CLOSED
from kgorch.worker.audit.untracked_state import version_of
from kgorch.worker.script_code import is_own_class

MOST_OBJECTS, DEEPEST = 100, 3
"""Limits of a step: objects that are looked into, and how far they are from a variable."""

MOST_VARIABLES = 300
"""A dict or object with more is left alone."""

DICTS = (dict, defaultdict, OrderedDict, Counter)
TENSORS = (np.ndarray, torch.Tensor)

BUFFERS = (list, deque, set, *TENSORS)

_kinds: dict[int, tuple[type, bool]] = {}
"""By the type's id: it may have no hash. Whether its objects are looked into."""

MOST_KINDS = 4096


class Owner(NamedTuple):
    """A dict or object.

    Attributes:
        path: variables that lead to it from a running function, whose name comes first.
        thing: it.
        variables: a copy of its dict.
    """

    path: str
    thing: Any
    variables: dict[str, Any]


def owners(roots: Iterable[tuple[str, dict[str, Any]]], is_name: Callable[[Any], bool]) -> list[Owner]:
    """Those that are reached, each once, by its longest path: a short one is often a name for it that comes and goes.

    Args:
        roots: functions by name, and their variables.
        is_name: whether a variable of this name is followed.
    """
    found: dict[int, Owner] = {}
    level = list(roots)
    running = {path for path, _ in level}
    for _ in range(DEEPEST):
        level, outer = [], level
        for path, variables in outer:
            for name, value in variables.items():
                if not (_is_looked_into(value) or _counts_for_itself(value, running)) or not is_name(name):
                    continue
                inner = variables_of(value)
                if inner is None or (len(found) >= MOST_OBJECTS and id(value) not in found):
                    continue
                is_new = id(value) not in found
                owner = found[id(value)] = Owner(f"{path} {name}", value, dict(inner))
                if is_new:
                    level.append((owner.path, owner.variables))
    return list(found.values())


def variables_of(thing: Any) -> MutableMapping[str, Any] | None:
    """Those of a dict, object or function of `owners`; None for a large one."""
    found = thing if type(thing) in DICTS else object_variables.attributes_of(thing)
    is_table = type(found) in DICTS or isinstance(found, object_variables.Slots | object_variables.Closure)
    return found if is_table and len(found) <= MOST_VARIABLES else None


def buffers(variables: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    """The lists, sets, tensors and arrays that are held directly, and dicts of tensors and arrays (the average of the weights): the
    id of each, and what a change in place changes of it."""
    return {
        name: (id(value), _mark(value))
        for name, value in variables.items()
        if type(value) in BUFFERS or (type(value) in DICTS and _tensors_in(value))
    }


def _tensors_in(table: Mapping[str, Any]) -> list[Any]:
    """The tensors and arrays of a dict that is looked into."""
    return [] if len(table) > MOST_VARIABLES else [item for item in table.values() if type(item) in TENSORS]


def _mark(value: Any) -> Any:
    if type(value) is torch.Tensor:
        return version_of(value)
    if type(value) is np.ndarray:
        ends = [value.flat[at] for at in (0, -1) if value.size]
        return value.size, [id(item) if value.dtype.hasobject else item.tobytes() for item in ends]
    if type(value) in DICTS:
        return [(id(item), _mark(item)) for item in _tensors_in(value)]
    if type(value) is set:
        return len(value)
    return len(value), [id(value[at]) for at in (0, -1) if value]


def _is_looked_into(value: Any) -> bool:
    kind = type(value)
    known = _kinds.get(id(kind))
    if known is None:
        if len(_kinds) >= MOST_KINDS:  # a script that makes types without end
            _kinds.clear()
        known = _kinds[id(kind)] = kind, _may_own(kind)
    return known[1]


def _counts_for_itself(value: Any, running: Collection[str]) -> bool:
    """Whether it is a function that counts for itself, in variables of one that runs no more: those of a running one are known."""
    return object_variables.has_own_count(value) and value.__qualname__.rpartition(".<locals>.")[0] not in running


def _may_own(kind: type) -> bool:
    if any(kind is one for one in DICTS):
        return True
    is_own = issubclass(kind, types.SimpleNamespace | argparse.Namespace) or is_own_class(kind)
    return is_own and not issubclass(kind, (*CLOSED, nn.Module))
