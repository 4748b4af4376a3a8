"""Which values of attributes a checkpoint can hold, what tells one from another, and how one is put back (own_attributes.py)."""

from __future__ import annotations

import array
import collections
import copy
import functools
import inspect
import io
import itertools
import operator
import random
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import PurePath
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kgorch.worker.audit.untracked_state import COMPARED, array_sample, content_of, is_array, storage_of
from kgorch.worker.data import batches, generator_states
from kgorch.worker.data.loader_search import generator_types, of_the_process
from kgorch.worker.integrations import metric_states
from kgorch.worker.script_code import is_own_class
from kgorch.worker.tagged_json import DTYPES

DEPTH, MOST_ITEMS, MOST_ARRAY_BYTES = 4, 10_000, 1 << 20
"""Of lists in lists; of all items of a value; of a NumPy array, which is kept as text. What is more is no plain value."""

LONGEST_LISTING = 1_000_000

SPECIAL_TABLES = (collections.OrderedDict, collections.defaultdict, collections.Counter)
TABLES = (dict, *SPECIAL_TABLES)
LISTS = (list, tuple, deque)
BYTES = (bytearray, array.array)


def is_value(value: Any) -> bool:
    """Whether it is None, a number, a tensor or array, or lists, tuples and dicts of these. A deque and the dicts of `collections`
    are, too, but not within others: a checkpoint does not hold their kind."""
    return _is_value(value, DEPTH, [MOST_ITEMS])


def _is_value(value: Any, depth: int, left: list[int]) -> bool:
    left[0] -= 1
    kind = type(value)
    if left[0] < 0 or value is None or kind in (bool, float):
        return left[0] >= 0
    if kind is int:
        return bool(abs(value) < 1 << 63)
    if kind in (torch.Tensor, nn.Parameter):
        is_dense = value.layout is torch.strided and value.dtype in DTYPES and not value.is_meta and not value.is_nested
        return bool(is_dense and value.grad_fn is None)
    if isinstance(value, np.ndarray | np.generic):
        return bool(value.dtype.kind in "biufc" and value.nbytes <= MOST_ARRAY_BYTES)
    kinds = (*LISTS, *TABLES) if depth == DEPTH else (list, tuple, dict)
    if depth == 0 or kind not in kinds or len(value) > MOST_ITEMS:
        return False
    if kind in TABLES and not all(type(key) in (str, int) for key in value):
        return False
    return all(_is_value(item, depth - 1, left) for item in (value.values() if kind in TABLES else value))


def is_special(value: Any) -> bool:
    """Whether a checkpoint does not hold its kind, so that it comes back only into one that is there."""
    return type(value) in (deque, *SPECIAL_TABLES)


def is_fixed(value: Any) -> bool:
    """Whether it is a text, a function, a class or a module of Python."""
    kinds = (inspect.isroutine, inspect.isclass, inspect.ismodule)
    return isinstance(value, str | bytes) or any(is_kind(value) for is_kind in kinds)


def is_generator(value: Any) -> bool:
    """Whether it is a random generator with a state, and none of the process's own."""
    has_state = isinstance(value, generator_types()) and not isinstance(value, random.SystemRandom)
    return has_state and id(value) not in of_the_process()


def has_state(value: Any) -> bool:
    """Whether it is an object of a library that gives its state and takes it back: an optimizer, a schedule, an average."""
    kind = type(value)
    if not all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not isinstance(value, (nn.Module, type, Dataset, DataLoader, Sampler)) and not is_own_class(kind)


def state_of(value: Any) -> Any:
    """The state of such an object, without its texts and functions; None where a checkpoint cannot hold it."""
    state = _without_fixed(value.state_dict())
    return saved(state) if type(state) is dict and is_value(state) else None


def set_state(value: Any, state: Any) -> None:
    """Give it a state of `state_of`, beside its present texts and functions."""
    now, groups = value.state_dict(), getattr(value, "param_groups", [])
    value.load_state_dict(_merged(now, {key: item for key, item in state.items() if key in now}))
    if groups:  # others may hold them, as an optimizer around this one
        for group, loaded in zip(groups, value.param_groups, strict=True):
            group.update(loaded)
        value.param_groups = groups


def _without_fixed(value: Any) -> Any:
    if type(value) in TABLES:
        return {key: _without_fixed(item) for key, item in value.items() if not is_fixed(item)}
    if type(value) in (list, tuple):
        return type(value)(None if is_fixed(item) else _without_fixed(item) for item in value)
    return value


def _merged(now: Any, state: Any) -> Any:
    if is_fixed(now):
        return now
    if type(now) in TABLES and type(state) in TABLES:
        table = copy.copy(now)
        table.clear()
        table.update((key, item) for key, item in now.items() if is_fixed(item))
        table.update((key, _merged(now.get(key), item)) for key, item in dict(state).items())
        return table
    if type(now) in (list, tuple) and type(state) in (list, tuple) and len(now) == len(state):
        return type(now)(itertools.starmap(_merged, zip(now, state, strict=True)))
    return state


def mark(value: Any) -> Any:
    """What tells a value from another: copies of its numbers, and samples of its tensors."""
    if isinstance(value, torch.Tensor):
        return content_of([value])
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    if type(value) in TABLES:
        return {key: mark(item) for key, item in value.items()}
    if type(value) in LISTS:
        return [mark(item) for item in value]
    return copy.copy(value)


def mark_of_other(value: Any, known: Collection[int]) -> Any:
    """What tells an object that is no value from another: a new one, a longer list, other numbers in its rows, other tensors and
    arrays, generators that have drawn, other states of its optimizers.

    Args:
        known: ids of objects that are saved by themselves.
    """
    size = len(value) if isinstance(value, (list, dict, set, deque, *BYTES)) or _is_frame(value) else 0
    items = list(items_of(value))
    generators = [generator_states.state_of(item) for item in items if is_generator(item)]
    states = [mark(state_of(item)) for item in items if id(item) not in known and has_state(item)]
    numbers = [item for item in items if type(item) in (bool, int, float)]
    arrays = [item for item in items if is_array(item)]
    samples = [array_sample(item) for item in arrays[:: max(1, len(arrays) // COMPARED)][:COMPARED]]
    states += [zlib.crc32(item) for item in items if isinstance(item, BYTES)]
    states += [mark(metric_states.states_of(item)) for item in items if metric_states.is_metric(item)]
    return id(value), size, numbers, samples, content_of(tensors_in(value)), generators, states


def _is_frame(value: Any) -> bool:
    """Whether it is a table of pandas, whose rows are counted, or an array of objects."""
    is_of_objects = isinstance(value, np.ndarray) and value.dtype.hasobject and value.ndim > 0
    return is_of_objects or (type(value).__module__.partition(".")[0] == "pandas" and hasattr(type(value), "iloc"))


def is_iterator(value: Any) -> bool:
    """Whether it gives its items one after another, as that of a loader. A file does, too, and is not meant."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def mark_of_iterator(value: Any) -> Any:
    """What tells one that has given further items, as far as it shows; another object each time where it does not."""
    if isinstance(value, _BaseDataLoaderIter):
        return id(value), value._num_yielded
    if isinstance(value, GeneratorType):
        state = inspect.getgeneratorstate(value)
        return (id(value), state) if state in (inspect.GEN_CREATED, inspect.GEN_CLOSED) else object()
    if isinstance(value, itertools.count):
        return repr(value)
    left = operator.length_hint(value, -1)
    return object() if left < 0 else (id(value), left)


def has_arrays(value: Any) -> bool:
    """Whether it is an array of NumPy, or holds some."""
    return any(map(is_array, items_of(value)))


class Listing:
    """A list of texts, or of rows of texts and numbers, as of the files of a data set and their labels. Its order may be state; its
    texts are none, and are never put back.

    Args:
        rows: as they are when the training begins.
    """

    def __init__(self, rows: list[Any]) -> None:
        self._list, self._rows = id(rows), list(rows)
        self._newest, self._order = list[Any](), torch.zeros(0, dtype=torch.int64)
        self._is_put_back = False

    @functools.cached_property
    def _sorted(self) -> list[Any]:
        """The rows in the order of their texts, which hangs on no session. Of rows by the million it takes seconds, which most
        trainings need not wait for."""
        return sorted(self._rows, key=repr)

    @functools.cached_property
    def _places(self) -> dict[int, int]:
        """Where each object is among the sorted rows."""
        return {id(row): place for place, row in enumerate(self._sorted)}

    @functools.cached_property
    def _places_of_texts(self) -> dict[str, int]:
        """The same for rows that the script has made anew, as by listing the files again."""
        return {repr(row): place for place, row in enumerate(self._sorted)}

    @functools.cached_property
    def _checksum(self) -> int:
        return functools.reduce(lambda crc, row: zlib.crc32(repr(row).encode(), crc), self._sorted, 0)

    def is_as_begun(self, rows: list[Any]) -> bool:
        """Whether nothing need be saved: a session that begins anew has these rows in this order."""
        is_same = len(rows) == len(self._rows) and all(map(operator.is_, rows, self._rows))
        return is_same and not self._is_put_back

    def order_of(self, rows: list[Any]) -> dict[str, Any] | None:
        """Where each row is among the sorted ones of the beginning; None where one is new."""
        if len(rows) != len(self._newest) or not all(map(operator.is_, rows, self._newest)):
            places = [self._places.get(id(row), -1) for row in rows]
            if -1 in places:
                places = [self._place_of(row) if place < 0 else place for row, place in zip(rows, places, strict=True)]
            self._newest, self._order = list(rows), torch.tensor(places, dtype=torch.int64)
        return None if bool((self._order < 0).any()) else {"order": self._order, "of": self._checksum}

    def _place_of(self, row: Any) -> int:
        return self._places_of_texts.get(repr(row), -1) if _is_row(row) else -1

    def in_order(self, now: list[Any], state: Any) -> list[Any]:
        """The rows in an order of `order_of`: in the list of the beginning, if it is still there. Raises: ValueError."""
        order = state.get("order")
        is_order = isinstance(order, torch.Tensor) and order.dtype == torch.int64 and order.ndim == 1
        if state.get("of") != self._checksum or not is_order or len(order) > LONGEST_LISTING:
            raise ValueError("another list")
        rows = [self._sorted[place] for place in order.tolist()]
        self._is_put_back = True
        if id(now) != self._list:
            return rows
        now[:] = rows
        return now


def is_listing(value: Any) -> bool:
    """Whether it is a list of which the order alone may be state."""
    return (
        type(value) is list and 0 < len(value) <= LONGEST_LISTING and not is_value(value) and all(map(_is_row, value))
    )


def _is_row(row: Any) -> bool:
    """And none that the script may change in place."""
    cells = row if type(row) is tuple else (row,)
    return all(isinstance(cell, str | bytes | int | float | PurePath | None) for cell in cells)


def saved(value: Any) -> Any:
    """In the types that a checkpoint has."""
    if type(value) in TABLES:
        return {key: saved(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(saved, value))
    return [saved(item) for item in value] if type(value) in LISTS else value


def renewed(now: Any, value: Any, device: torch.device, *, in_place: bool) -> Any:
    """The value to set.

    Args:
        now: what is there.
        device: for tensors where no tensor is there.
        in_place: what can be changed in place is, because others may hold it, too.
    """
    if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
        if in_place and now.shape == value.shape and now.dtype == value.dtype:
            with torch.no_grad():
                return now.copy_(value)
        return value.to(now.device, copy=True).requires_grad_(now.requires_grad)
    if isinstance(now, np.ndarray) and isinstance(value, np.ndarray) and now.shape == value.shape and in_place:
        now[...] = value
        return now
    value = copy.deepcopy(batches.moved(value, device))
    if type(now) in (list, deque) and type(value) in LISTS:
        target: Any = now if in_place else copy.copy(now)
        items = list(value)  # it may be the very list
        target.clear()
        target.extend(items)
        return target
    if type(now) in TABLES and type(value) in TABLES:
        target, table = now if in_place else copy.copy(now), dict(value)
        target.clear()
        target.update(table)
        return target
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Its tensors, and those of modules in it, of the first MOST_ITEMS items."""
    found = list[torch.Tensor]()
    for item in items_of(value):
        if isinstance(item, nn.Module):
            found += [*item.parameters(), *item.buffers()]
        elif isinstance(item, torch.Tensor):
            found.append(item)
    return found


def items_of(value: Any) -> Iterator[Any]:
    """It, or what is in it and in lists, tuples, sets and dicts there: the first MOST_ITEMS."""
    waiting, left = [value], MOST_ITEMS
    while waiting and left > 0:
        item, left = waiting.pop(), left - 1
        if isinstance(item, dict | list | tuple | set | deque):
            waiting += itertools.islice(item.values() if isinstance(item, dict) else item, left)
        else:
            yield item


def are_of_graph(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are results of a forward, which the next one makes anew."""
    return all(tensor.grad_fn is not None for tensor in tensors)


def by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of its state_dict, and its buffers that are in none."""
    tensors = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    return dict(module.named_buffers(remove_duplicate=False)) | tensors


def held(value: Any, storages: set[int]) -> list[bool]:
    """Of each tensor in the value, whether a checkpoint holds it under another name."""
    return [storage_of(tensor) in storages for tensor in tensors_in(value)]
