"""In which objects attributes are looked at, and in which of their attributes: those that code of the script sets
(own_attributes.py)."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Set
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from kgorch.worker.audit.script_objects import CLOSED, frames_of_script
from kgorch.worker.audit.script_objects import variables_of as variables_of_frame
from kgorch.worker.data.loader_search import generator_types, parts_of
from kgorch.worker.integrations import attribute_values as values_of
from kgorch.worker.integrations import script_modules
from kgorch.worker.object_variables import has_own_count, shared_names_in, variables_of
from kgorch.worker.script_code import is_own_class, is_own_function
from kgorch.worker.wrappers import unwrapped

MOST_ITEMS = 100
"""Of a list or dict whose items are looked at as objects; a longer one is data."""

MOST_WRAPPED = 10
"""Decorators of a function that are looked through."""

MOST_OBJECTS = 2_000
"""That are looked at in each save, those of the model last."""

CODE = (ModuleType, type, FunctionType)
"""Whose variables are those of many things. Of a function they are those of outer functions."""

SCALARS = (bool, int, float, type(None))

DATA = (type, Dataset, Sampler, DataLoader)
"""Not looked at in what running functions hold: a resume reads batches again, which changes data once more."""

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that PyTorch gives each module, whatever else has one of their names: its tables, `training`."""


class Root(NamedTuple):
    """An object in which to look.

    Attributes:
        label: by which its state is found again.
        is_callback: whatever else it holds may be state.
        loader: of the training that reads by it; empty for none.
        of_library: its class need not be the script's.
        has_all: all of its variables count, and not only those that code of the script sets as attributes; of a module or class not
            the numbers that no function sets, and not what the data of the training use: a resume reads batches again, which
            changes it once more.
        is_running: held by a running function, and so perhaps the session's: none of its bools is state, which may say that this
            session is to end, and no iterator, for those over loaders are followed.
    """

    label: str
    thing: Any
    is_callback: bool = False
    loader: str = ""
    of_library: bool = False
    has_all: bool = False
    is_running: bool = False


class SearchItem(Protocol):
    """A Root, or what was made of one."""

    @property
    def thing(self) -> Any: ...

    @property
    def has_all(self) -> bool: ...


class AttributeSearch:
    """The objects of a training, and their attributes.

    Args:
        roots: where it begins.
        known: ids of objects that are no state of another one.
        without: names of attributes that do not count.

    Attributes:
        too_many: labels of objects that are not looked at, for there are more than MOST_OBJECTS.
    """

    def __init__(self, roots: Iterable[Root], known: set[int], without: Iterable[str]) -> None:
        self._roots, self._known = list(roots), known
        self._names, self._names_on_others = (
            script_modules.names_set() - {*without},
            script_modules.names_set_on_others(),
        )
        self._of_data = script_modules.names_used(root.thing for root in self._roots if root.loader)
        self.too_many: list[str] = []

    def names_of(self, item: SearchItem) -> Set[str]:
        """Names of attributes that may be state of the object. Of a library's module those that the script sets on other objects
        than its own, as `dropout.p`."""
        if item.has_all or isinstance(item.thing, FunctionType):
            return self.attributes(item).keys()
        if not isinstance(item.thing, nn.Module):
            return self._names
        return (self._names if is_own_class(type(item.thing)) else self._names & self._names_on_others) - OF_MODULES

    def objects(self, roots: Iterable[Root] | None = None, *, but: Collection[int] = ()) -> list[Root]:
        """The roots, modules in them, and objects of the script's classes in attributes.

        Args:
            roots: others than those of the beginning.
            but: ids of objects that are looked at already.
        """
        found = dict[int, Root]()
        self.too_many = []
        waiting = deque(
            sorted(
                self._roots if roots is None else roots, key=lambda root: isinstance(unwrapped(root.thing), nn.Module)
            )
        )
        while waiting:
            root = waiting.popleft()
            thing = unwrapped(root.thing)
            is_module = isinstance(thing, nn.Module)
            parts = thing.named_modules() if is_module else [("", thing)]
            for path, part in parts:
                one = root._replace(label=f"{root.label}.{path}" if path else root.label, thing=part)
                is_own = is_module or root.of_library or _is_own(part) or _is_closure(part)
                if id(part) in found or id(part) in but or not is_own or (is_module and not self.attributes(one)):
                    continue
                if len(found) == MOST_OBJECTS:
                    self.too_many.append(f"{one.label} (more than {MOST_OBJECTS} objects)")
                    waiting.clear()
                    break
                found[id(part)] = one
                waiting.extend(
                    Root(f"{one.label}.{path}", value, root.is_callback, root.loader, is_running=root.is_running)
                    for name, held in self.attributes(one).items()
                    for path, value in _with_items(name, held)
                    if not isinstance(value, DATA if root.is_running else type) and id(value) not in self._known
                    and not values_of.is_generator(value)
                    and (_is_own(value) or isinstance(value, nn.Module) or has_own_count(value))
                )  # fmt: skip
        return list(found.values())

    def attributes(self, item: SearchItem) -> dict[str, Any]:
        """Those that code of the script sets."""
        try:
            found = list(variables_of(item.thing).items())
        except Exception:  # of a dict of the script's own kind
            return {}
        if is_closure := isinstance(item.thing, FunctionType):
            shared = shared_names_in(item.thing.__code__)
        if item.has_all or is_closure:
            is_code, (set_by_data, named_by_data) = isinstance(item.thing, CODE), self._of_data
            names_set, without = (shared, ()) if is_closure else (self._names, set_by_data)
            return {
                name: value
                for name, value in found
                if _is_variable(name, value) and not (is_code and name in without)
                and (not is_code or (name in names_set if type(value) in SCALARS else name not in named_by_data))
            }  # fmt: skip
        names = self.names_of(item)
        is_library = isinstance(item.thing, nn.Module) and not is_own_class(type(item.thing))
        return {name: value for name, value in found if name in names and (not is_library or type(value) in SCALARS)}


def _with_items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, and the items of a short list or dict, as of meters."""
    yield name, value
    if isinstance(value, list | tuple | dict) and len(value) <= MOST_ITEMS:
        # by the built-in methods: those of a class of the script may do anything
        held: Any = value
        if isinstance(value, dict):
            items: Iterable[Any] = dict.items(held)
        else:
            items = enumerate(list.__iter__(held) if isinstance(value, list) else tuple.__iter__(held))
        yield from ((f"{name}.{key}", item) for key, item in list(items))


def _is_variable(name: str, value: Any) -> bool:
    """Whether it is more than the code of a module or class."""
    return (
        isinstance(name, str)
        and not name.startswith("__")
        and (isinstance(value, str | bytes) or not values_of.is_fixed(value) or has_own_count(value))
    )


def _is_own(thing: Any) -> bool:
    """Whether its attributes are the script's."""
    return issubclass(type(thing), SimpleNamespace | argparse.Namespace) or is_own_class(type(thing))


def _is_closure(thing: Any) -> bool:
    """Whether it is a function of the script with variables of outer ones; `super()` alone needs one, its class."""
    if type(thing) is not FunctionType or not is_own_function(thing):
        return False
    return not {"__class__"}.issuperset(thing.__code__.co_freevars)


def data_roots(name: str, data: Any, *, loader: str = "") -> Iterator[Root]:
    """A data set, and those in it: of a Subset, a ConcatDataset, a DataLoader (and its `collate_fn`), a dict of them.

    Args:
        loader: of the training that reads by them.
    """
    waiting, count = deque([(name, data)]), 0
    while waiting and (count := count + 1) < MOST_OBJECTS:
        name, data = waiting.popleft()
        if isinstance(data, dict | list | tuple):
            items = list(data.items() if isinstance(data, dict) else enumerate(data))[:MOST_OBJECTS]
            waiting.extend((f"{name}.{key}", item) for key, item in items if isinstance(item, Dataset | DataLoader))
        elif data is not None:
            inner = getattr(data, "__dict__", {})
            waiting.extend((f"{name}.{key}", inner[key]) for key in ("dataset", "datasets") if key in inner)
            if isinstance(data, DataLoader):
                yield Root(f"{name}.collate_fn", data.collate_fn, loader=loader)
                yield from sampler_roots(name, data, loader=loader)
            else:
                yield Root(name, data, loader=loader)


def sampler_roots(name: str, data: DataLoader[Any], *, loader: str = "") -> Iterator[Root]:
    """Its samplers, as far as the place of the loader does not hold what they are: weights by which one draws, counts of epochs."""
    for path, part in parts_of(data).ordering.items():
        is_own, inner = is_own_class(type(part)), path.removeprefix("loader")
        if inner and not isinstance(part, DataLoader | Dataset) and (is_own or not hasattr(type(part), "set_epoch")):
            yield Root(f"{name}{inner}", part, loader=loader, of_library=True)


def script_roots(things: Iterable[Any]) -> Iterator[Root]:
    """The modules of the script, and its classes: of their variables those count that change while it trains. Also functions in
    variables of those that run now, and methods of the things: of what they share with the functions that they are defined in.

    Args:
        things: objects of the script; see `script_modules.modules_of`.
    """
    things = list(things)
    modules = script_modules.modules_of(things)
    for name, thing in itertools.chain(modules.items(), script_modules.classes_in(modules)):
        yield Root(f"{'class' if isinstance(thing, type) else 'module'} {name}", thing, of_library=True, has_all=True)
    values = itertools.chain.from_iterable(variables_of_frame(frame).values() for frame in frames_of_script())
    classes = dict.fromkeys(kind for thing in things for kind in type(thing).__mro__ if is_own_class(kind))
    methods = itertools.chain.from_iterable(vars(kind).values() for kind in classes)
    functions = {id(item): item for item in map(_unwrapped_function, (*values, *methods)) if _is_closure(item)}
    for function in functions.values():
        yield Root(f"function {function.__qualname__}", function, has_all=True)


def _unwrapped_function(thing: Any) -> Any:
    """What `functools.wraps` has wrapped, of a function."""
    for _ in range(MOST_WRAPPED):
        if type(thing) is not FunctionType or "__wrapped__" not in thing.__dict__:
            break
        thing = thing.__dict__["__wrapped__"]
    return thing


def running_roots(known: Collection[int]) -> Iterator[Root]:
    """What variables of the running functions hold: objects of the script's classes; modules, averages, schedules and random
    generators.

    The outer functions come first, and an object is known again by its class and variable: a training may go on in another one.

    Args:
        known: ids of what is left out.
    """
    counts, seen = Counter[str](), set(known)
    for frame in reversed(frames_of_script()):
        variables = variables_of_frame(frame) or (frame.f_globals if frame.f_code.co_name == "<module>" else {})
        others = dict[str, Any]()
        for name, value in list(variables.items()):
            kind: Any = type(value)  # `isinstance` may run code of the value's
            if name.startswith("__") or id(value) in seen or issubclass(kind, CLOSED):
                continue
            if issubclass(kind, (nn.Module, *generator_types())) or values_of.has_state(value):
                others[name] = value
            elif kind.__getattribute__ is object.__getattribute__ and _is_own(value):
                counts[label := f"{kind.__qualname__} {name}"] += 1
                yield Root(label if counts[label] == 1 else f"{label} {counts[label]}", value, is_running=True)
            else:
                continue
            seen.add(id(value))
        if others:
            label = f"variables of {frame.f_code.co_qualname}"
            yield Root(label, others, of_library=True, has_all=True, is_running=True)
