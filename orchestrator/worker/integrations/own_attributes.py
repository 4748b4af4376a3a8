"""Numbers and tensors in attributes of the script's own objects, which its Trainer's library does not save: of callbacks, the
Trainer, the model's modules and data sets.

Only attributes count that code of the script sets. They are compared with what they were when the training had begun, so that a
session's own stay the session's. A callback that holds something else, too, which may be state, as a file, is left alone as a
whole, and named: half of its state would be worse than none. Texts are never put back: one may be a path.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import inspect
import itertools
import opcode
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.audit.untracked_state import content_of, storage_of
from kgorch.worker.data import batches
from kgorch.worker.script_code import is_of_script, is_own_class
from kgorch.worker.wrappers import unwrapped

DEPTH, MOST_ITEMS, MOST_OBJECTS = 4, 10_000, 200
"""Of lists in lists, of one list, and of objects that are looked at in each save. What is deeper or longer is no plain value."""

MOST_BYTES = 256 << 20
"""Of all tensors together, besides twice those of the trained model."""

TABLES = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
LISTS = (list, tuple, deque)

WHAT = "attributes that may hold more than numbers and tensors, and begin anew in each session"

NOT_THERE: Any = object()

_STORE = opcode.opmap["STORE_ATTR"]


class Root(NamedTuple):
    """An object in which to look.

    Attributes:
        label: by which its state is found again.
        is_callback: it is left alone as a whole if it holds anything that may be state and cannot be saved.
    """

    label: str
    thing: Any
    is_callback: bool = False


class _Object(NamedTuple):
    label: str
    thing: Any
    is_callback: bool
    begun: dict[str, Any]


class OwnAttributes:
    """The attributes of those objects whose class the script defines, and of a Trainer that its code sets.

    Args:
        roots: objects; modules in a model, and objects of the script's classes in attributes, are looked at as well.
        known: objects that are no state of another one: the Trainer, its arguments, its data.
        held: modules and optimizers whose tensors a checkpoint holds.
        without: names of attributes that are saved otherwise.
        device: where a tensor is put that this session has not made yet.
        note: is given what is not saved, in words; "" where nothing is left out any more.
    """

    def __init__(
        self, roots: Iterable[Root], known: Iterable[Any], held: Iterable[Any], device: torch.device | str,
        note: Callable[[str], None], without: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self._known, self._device, self._note, self._left = {id(item) for item in known}, device, note, list[str]()
        self._misfits: list[str] = []
        self._names, self._held = _names_that_are_set() - {*without}, list(held)
        self._objects = [
            _Object(root.label, root.thing, root.is_callback, self._begun(root.thing)) for root in self._found(roots)
        ]
        self._clocks = [(clock, clock()) for clock in (time.time, time.monotonic)]

    def state(self) -> list[list[Any]]:
        """(label, values that have changed since the training began, tensors of modules that have) of each object."""
        states, left, storages = [], list[str](), self._storages()
        room = MOST_BYTES + 2 * sum(tensor.nbytes for tensor in self._tensors())
        for item in self._objects:
            try:
                values, modules, others = self._changed(item, storages)
            except Exception as error:  # of a value's own code: no look may cost a run
                values, modules, others = {}, {}, [type(error).__name__]
            room -= sum(leaf.nbytes for leaf in pytree.tree_leaves([values, modules]) if isinstance(leaf, torch.Tensor))
            if others or room < 0:
                left.append(f"{item.label} ({', '.join(sorted(others or [*values, *modules])[:3])})")
            if room < 0 or (others and item.is_callback):
                values, modules = {}, {}
            states.append([item.label, values, modules])
        left += self._misfits
        if left != self._left:
            self._left = left
            self._note(f"{WHAT}: {', '.join(left)}" if left else "")
        return states

    def _changed(self, item: _Object, storages: set[int]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """The values and the tensors of modules that have changed, and names of what may have and cannot be saved."""
        values, modules, others = dict[str, Any](), dict[str, dict[str, torch.Tensor]](), list[str]()
        for name, value in self._attributes(item.thing).items():
            begun = item.begun.get(name, NOT_THERE)
            if isinstance(value, nn.Module) and id(value) not in self._known:
                if not _is_held(value, storages) and begun != content_of(_weights(value)):
                    modules[name] = _by_name(value)
            elif _is_value(value):
                if not _is_held(value, storages) and not self._is_instant(value) and begun != _mark(value):
                    values[name] = _saved(value)
            elif not self._is_no_state(value, begun, storages, is_callback=item.is_callback):
                others.append(name)
        is_counted = values or modules or _hold_tensors(item.thing, others) or not item.is_callback
        return values, modules, others if is_counted else []

    def state_dict(self) -> dict[str, Any]:
        """Of an object that is tracked by itself."""
        return {"objects": self.state()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.put_back(saved.get("objects"))

    def put_back(self, saved: Any) -> None:
        """Set what `state` has returned: numbers and tensors alone, whoever has written them."""
        left = [entry for entry in saved if _is_entry(entry)] if isinstance(saved, list) else []
        for item in self._objects:
            entry = next((entry for entry in left if entry[0] == item.label), None)
            if entry is None:
                continue
            left.remove(entry)
            values, modules = entry[1], entry[2] if len(entry) > 2 else {}
            for name in self._names & (values.keys() | modules.keys()):
                try:
                    self._put_back(item.thing, name, values.get(name, NOT_THERE), modules.get(name))
                    item.begun.pop(name, None)  # saved from now on, also where the session happened to begin with it
                except Exception:  # of a module that is another one, or of a value's own code
                    self._misfits.append(f"{item.label} ({name}: of another kind or size than it was)")

    def _put_back(self, thing: Any, name: str, value: Any, tensors: dict[str, torch.Tensor] | None) -> None:
        own = getattr(thing, "__dict__", {})
        if isinstance(module := own.get(name), nn.Module):
            if tensors is not None:
                module.load_state_dict(tensors)
        elif value is not NOT_THERE and _is_value(value) and _is_value(own.get(name)):
            own[name] = self._renewed(own.get(name), value)

    def _renewed(self, now: Any, value: Any) -> Any:
        """The value to set; what can be changed in place is, because others may hold it, too."""
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            if now.shape == value.shape and now.dtype == value.dtype and not now.requires_grad:
                return now.copy_(value)
            return value.to(now.device).requires_grad_(now.requires_grad)
        if isinstance(now, np.ndarray) and isinstance(value, np.ndarray) and now.shape == value.shape:
            now[...] = value
            return now
        value = batches.moved(value, torch.device(self._device))
        if type(now) in (list, deque) and type(value) in LISTS:
            items = list(value)  # it may be the very list
            now.clear()
            now.extend(items)
            return now
        if type(now) in TABLES and type(value) in TABLES:
            table = dict(value)
            now.clear()
            now.update(table)
            return now
        return value

    def _found(self, roots: Iterable[Root]) -> list[Root]:
        found, waiting = dict[int, Root](), deque(roots)
        while waiting and len(found) < MOST_OBJECTS:
            root = waiting.popleft()
            thing = unwrapped(root.thing)
            if isinstance(thing, nn.Module):
                parts = [(f"{root.label}.{path}".rstrip("."), part) for path, part in thing.named_modules()]
            else:
                parts = [(root.label, thing)]
            for label, part in parts:
                if id(part) in found or not (is_own_class(type(part)) or root.label == "trainer"):
                    continue
                found[id(part)] = Root(label, part, root.is_callback)
                waiting.extend(
                    Root(f"{label}.{name}", value, root.is_callback)
                    for name, value in self._attributes(part).items()
                    if not isinstance(value, type) and id(value) not in self._known
                    and (is_own_class(type(value)) or isinstance(value, nn.Module))
                )  # fmt: skip
        looked_at = (
            root.thing for root in found.values() if not isinstance(root.thing, nn.Module)
        )  # which have weights
        self._known |= {id(thing) for thing in looked_at}
        return list(found.values())

    def _attributes(self, thing: Any) -> dict[str, Any]:
        """Those that code of the script sets. Empty for an object that has none of its own, as with `__slots__`."""
        found: dict[str, Any] = getattr(thing, "__dict__", {})
        return {name: value for name, value in list(found.items()) if name in self._names}

    def _begun(self, thing: Any) -> dict[str, Any]:
        """Marks of the values, and what cannot change in place. Anything else would be kept alive."""
        begun = dict[str, Any]()
        for name, value in self._attributes(thing).items():
            with contextlib.suppress(Exception):  # of a value's own code: it counts as changed
                if isinstance(value, nn.Module):
                    begun[name] = content_of(_weights(value))
                elif _is_value(value):
                    begun[name] = _mark(value)
                elif _is_fixed(value):
                    begun[name] = value
                elif tensors := _tensors_in(value):
                    begun[name] = content_of(tensors)
        return begun

    def _tensors(self) -> Iterator[torch.Tensor]:
        for thing in self._held:
            if isinstance(thing, nn.Module):
                yield from _weights(thing)
            else:
                yield from (weight for group in thing.param_groups for weight in group["params"])

    def _storages(self) -> set[int]:
        return {storage_of(tensor) for tensor in self._tensors()}

    def _is_instant(self, value: Any) -> bool:
        """Whether a clock has shown it since the training began: the session's."""
        return type(value) is float and any(began_s <= value <= clock() for clock, began_s in self._clocks)

    def _is_no_state(self, value: Any, begun: Any, storages: set[int], *, is_callback: bool) -> bool:
        """Whether what cannot be saved has not changed with the training, or is the Trainer's. Of a callback any object counts."""
        if id(value) in self._known or (isinstance(value, torch.Tensor) and value.grad_fn is not None):
            return True
        if _is_fixed(value):
            return bool(value == begun)
        tensors = _tensors_in(value)
        is_same = not tensors or _is_held(value, storages) or begun == content_of(tensors)
        return is_same and not is_callback  # a Trainer, model or data set holds much that is no state


def data_roots(name: str, data: Any) -> Iterator[Root]:
    """A data set, and those in it: of a Subset, a ConcatDataset, a DataLoader, a dict of them."""
    waiting, count = deque([(name, data)]), 0
    while waiting and (count := count + 1) < MOST_OBJECTS:
        name, data = waiting.popleft()
        if isinstance(data, dict | list | tuple):
            items = list(data.items() if isinstance(data, dict) else enumerate(data))[:MOST_OBJECTS]
            waiting.extend((f"{name}.{key}", item) for key, item in items if isinstance(item, Dataset | DataLoader))
        elif data is not None:
            inner = getattr(data, "__dict__", {})
            waiting.extend((f"{name}.{key}", inner[key]) for key in ("dataset", "datasets") if key in inner)
            if not isinstance(data, DataLoader):
                yield Root(name, data)


def _names_that_are_set() -> set[str]:
    """Attributes that functions and methods of the script set, on any object."""
    found, waiting, seen = set[str](), [frame.f_code for frame in frames_of_script()], set[CodeType]()
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType):
            variables = object.__getattribute__(
                module, "__dict__"
            )  # of one that is loaded later, any other look loads it
            file = variables.get("__file__")
            if name == "__main__" or (isinstance(file, str) and is_of_script(file, name)):
                waiting += itertools.chain.from_iterable(_codes(value, name) for value in list(variables.values()))
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        waiting += (item for item in code.co_consts if isinstance(item, CodeType))
        number, extended = code.co_code, 0
        for at in range(0, len(number), 2):
            word, argument = number[at], number[at + 1] | extended << 8
            extended = argument if word == opcode.EXTENDED_ARG else 0
            if word == _STORE and argument < len(code.co_names):
                found.add(code.co_names[argument])
    return found


def _codes(value: Any, module: str) -> Iterator[CodeType]:
    if not issubclass(type(value), FunctionType | type) or value.__module__ != module:
        return
    for item in list(vars(value).values()) if isinstance(value, type) else [value]:
        function = getattr(item, "__func__", getattr(item, "fget", item))  # of a class method, and of a property
        while isinstance(function, FunctionType):
            yield function.__code__
            function = function.__dict__.get("__wrapped__")  # what torch.no_grad and the like have wrapped


def _by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _weights(module: nn.Module) -> list[torch.Tensor]:
    return list(_by_name(module).values())


def _is_entry(entry: Any) -> bool:
    """Whether it has the form of one of `state`. An earlier version has written no modules."""
    is_list = isinstance(entry, list | tuple) and 2 <= len(entry) <= 3
    return is_list and isinstance(entry[0], str) and all(isinstance(part, dict) for part in entry[1:])


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """Its tensors, and those of modules in it."""
    leaves = value if isinstance(value, nn.Module) else pytree.tree_leaves(value)
    found = list[torch.Tensor]()
    for leaf in [leaves] if isinstance(leaves, nn.Module) else leaves:
        if isinstance(leaf, nn.Module):
            found += _weights(leaf)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def _is_held(value: Any, storages: set[int]) -> bool:
    """Whether a checkpoint holds tensors of the value, under another name."""
    return any(storage_of(tensor) in storages for tensor in _tensors_in(value))


def _hold_tensors(thing: Any, names: Iterable[str]) -> bool:
    own = getattr(thing, "__dict__", {})
    return any(_tensors_in(own.get(name)) for name in names)


def _saved(value: Any) -> Any:
    """In the types that a checkpoint has."""
    if type(value) in TABLES:
        return {key: _saved(item) for key, item in value.items()}
    if type(value) in LISTS:
        return type(value)(map(_saved, value)) if type(value) is tuple else [_saved(item) for item in value]
    return value


def _is_fixed(value: Any) -> bool:
    """Whether it is a text, a function, a class or a module of Python."""
    return (
        isinstance(value, str | bytes) or inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    )


def _mark(value: Any) -> Any:
    """What tells one value from another: copies of its numbers, and samples of its tensors."""
    if isinstance(value, torch.Tensor):
        return content_of([value])
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.ravel()[:: 1 + value.size // MOST_ITEMS].tobytes()
    if type(value) in TABLES:
        return {key: _mark(item) for key, item in value.items()}
    if type(value) in LISTS:
        return [_mark(item) for item in value]
    return copy.copy(value)


def _is_value(value: Any, depth: int = DEPTH) -> bool:
    """Whether it is None, a number, a tensor or array, or lists, tuples and dicts of these."""
    if value is None or type(value) in (bool, int, float):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.grad_fn is None and not value.is_meta
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind in "biufc"
    if depth == 0 or type(value) not in (*LISTS, *TABLES) or len(value) > MOST_ITEMS:
        return False
    if type(value) in TABLES:
        return all(type(key) in (str, int) and _is_value(item, depth - 1) for key, item in value.items())
    return all(_is_value(item, depth - 1) for item in value)
