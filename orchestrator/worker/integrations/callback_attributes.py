"""Numbers that the script's own callbacks count with while a Trainer trains, and which its library does not save.

They are compared with what they were when the training had begun, so that a session's own stay the session's. A callback that may
hold more, as an average of the weights or a file, is left alone as a whole, and named: half of its state would be worse than none.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kgorch.worker.script_code import is_own_class

DEPTH, MOST_ITEMS = 4, 10_000
"""Of lists in lists, and of one list; what is deeper or longer is no plain value. They are looked at in each save."""


class CallbackAttributes:
    """Of those callbacks whose class the script defines.

    Args:
        known: objects that are no state of a callback: the Trainer, its arguments, its data.
        note: is given what is not saved, in words; "" where nothing is left out any more.
    """

    def __init__(self, callbacks: Iterable[Any], known: Iterable[Any], note: Callable[[str], None]) -> None:
        self._callbacks = [item for item in callbacks if is_own_class(type(item))]
        self._known, self._note, self._left = {id(item) for item in known}, note, list[str]()
        self._begun = [_begun(_attributes(item)) for item in self._callbacks]
        self._clocks = [(clock, clock()) for clock in (time.time, time.monotonic)]

    def state(self) -> list[list[Any]]:
        """(name of the class, numbers that have changed since the training began) of each callback."""
        states, left = [], []
        for callback, begun in zip(self._callbacks, self._begun, strict=True):
            name, changed = type(callback).__name__, {}
            for key, value in _attributes(callback).items():
                if _is_plain(value) and (key not in begun or value != begun[key]) and not self._is_instant(value):
                    changed[key] = value
            own = _attributes(callback)
            others = [key for key, value in own.items() if not self._is_no_state(value, begun.get(key))]
            if others and (changed or any(_has_tensors(own[key]) for key in others)):
                left.append(f"{name} ({', '.join(sorted(others)[:3])})")
                changed = {}
            states.append([name, changed])
        if left != self._left:
            self._left = left
            what = "attributes that may hold more than numbers, and begin anew in each session"
            self._note(f"{what}: {', '.join(left)}" if left else "")
        return states

    def put_back(self, saved: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Set what `state` has returned: numbers alone, whoever has written them."""
        left = list(saved)
        for callback in self._callbacks:
            entry = next((item for item in left if item[0] == type(callback).__name__), None)
            if entry is None:
                continue
            left.remove(entry)
            own = _attributes(callback)
            for name, value in entry[1].items():
                if not _is_plain(value) or not _is_plain(own.get(name)):
                    continue
                if type(value) is list and type(own.get(name)) is list:
                    own[name][:] = value  # in place: others may hold it, too
                elif type(value) is dict and type(own.get(name)) is dict:
                    own[name].clear()
                    own[name].update(value)
                else:
                    own[name] = value

    def _is_instant(self, value: Any) -> bool:
        """Whether a clock has shown it since the training began: the session's."""
        return type(value) is float and any(began_s <= value <= clock() for clock, began_s in self._clocks)

    def _is_no_state(self, value: Any, begun: Any) -> bool:
        """Whether a value that is no number cannot have changed with the training, or is the Trainer's."""
        if _is_plain(value) or id(value) in self._known:
            return True
        if (
            isinstance(value, str | bytes)
            or inspect.isroutine(value)
            or inspect.isclass(value)
            or inspect.ismodule(value)
        ):
            return bool(value == begun)
        return isinstance(value, nn.Module) and any(id(part) in self._known for part in value.modules())


def _attributes(callback: Any) -> dict[str, Any]:
    """Empty for one that has none of its own, as with `__slots__`."""
    found: dict[str, Any] = getattr(callback, "__dict__", {})
    return found


def _begun(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies of the numbers, and what cannot change in place. Anything else would be kept alive."""
    copies = {name: copy.deepcopy(value) for name, value in attributes.items() if _is_plain(value)}
    return copies | {name: value for name, value in attributes.items() if _is_fixed(value)}


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor | nn.Module) for leaf in pytree.tree_leaves(value))


def _is_fixed(value: Any) -> bool:
    """Whether it is a text, a function, a class or a module of Python."""
    return (
        isinstance(value, str | bytes) or inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    )


def _is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is None, a number, or lists, tuples and dicts of these."""
    if value is None or type(value) in (bool, int, float):
        return True
    if depth == 0 or type(value) not in (list, tuple, dict) or len(value) > MOST_ITEMS:
        return False
    if type(value) is dict:
        return all(type(key) in (str, int) and _is_plain(item, depth - 1) for key, item in value.items())
    return all(_is_plain(item, depth - 1) for item in value)
