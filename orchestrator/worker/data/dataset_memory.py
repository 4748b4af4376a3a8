"""What a dataset remembers: all that may change as its samples are read, told by comparing two of these."""

from __future__ import annotations

import array
import dis
import functools
import itertools
import sys
import types
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from kgorch.errors import CannotRestore
from kgorch.worker.data import generator_states
from kgorch.worker.data.loader_search import (
    CONTAINERS,
    INNER,
    OF_LIBRARIES,
    SCALARS,
    LoaderSearch,
    SearchNode,
    parts_of,
)
from kgorch.worker.script_code import is_of_script, is_own_class

MOST_CONTENT_BYTES, SAMPLED_BYTES = 64 << 20, 1 << 12
"""Of the arrays and tensors of a dataset: whose whole content is compared, which takes some 50 ms; of each that is more, a sample,
for it may lie on a disk."""

MOST_REMEMBERED, MOST_ITEMS = 3_000, 1_000_000
"""Limits of a comparison: visited objects, which take 0.3 s; items of a container of which each is compared."""

COUNTED = (Dataset, types.SimpleNamespace, types.MethodType, functools.partial)
"""What may remember something, besides functions and objects of the script's own classes."""


def remembered_values(thing: Any) -> dict[str, Any]:
    """`plain_values` of what may remember something: datasets, functions, and objects of the script's own classes.

    With what their functions name among the variables of modules, the content of arrays, and what generators there are.
    An iterator differs from itself each time, for where it is cannot be seen. Of objects of libraries what they lead to counts.
    """
    values: dict[str, Any] = {}
    search = _MemorySearch(thing, values)
    if not search.is_whole:  # what was not looked at may change
        values[f"more than {MOST_REMEMBERED} objects"] = object()
    return values | search.parts.generators  # themselves: the id of one that is gone may be another one's


class _MemorySearch(LoaderSearch):
    """See `remembered_values`."""

    most_objects = MOST_REMEMBERED

    def __init__(self, thing: Any, values: dict[str, Any]) -> None:
        self._root, self._left_bytes = thing, MOST_CONTENT_BYTES
        self._known: set[int] | None = None
        super().__init__(thing, values)

    def _counts(self, node: SearchNode) -> bool:
        thing = node.thing
        if isinstance(thing, CONTAINERS):
            return node.is_own or is_own_class(type(thing))
        if isinstance(thing, types.FunctionType):
            return is_of_script(thing.__code__.co_filename, thing.__module__ or "")
        return isinstance(thing, COUNTED) or is_own_class(type(thing))

    def _below(self, node: SearchNode) -> Iterator[SearchNode]:
        node.is_own = self._counts(node)
        for below in itertools.chain(super()._below(node), self._of_code(node) if node.is_own else ()):
            below.is_own = node.is_own
            yield below

    def _of_code(self, node: SearchNode) -> Iterator[SearchNode]:
        """What an object's class holds, and what its functions, or a function, hold and name among variables of modules."""
        thing, functions = node.thing, []
        if isinstance(thing, types.FunctionType):
            functions = [thing]
        for kind in filter(is_own_class, type(thing).__mro__):
            for name, value in vars(kind).items():
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if isinstance(function, types.FunctionType):
                    functions.append(function)
                elif not name.startswith("__"):
                    yield from self._to_named(node, f"→{kind.__name__}.{name}", value)
        for function in functions:
            for name in ("__dict__", "__defaults__", "__kwdefaults__"):
                yield from self._to_named(node, f"→{function.__name__}.{name}", getattr(function, name))
            for name, value in _named_by(function):
                yield from self._to_named(node, f"→{name}", value)

    def _to_named(self, node: SearchNode, path: str, thing: Any) -> Iterator[SearchNode]:
        if not isinstance(thing, self._types):
            yield from self._to(node, path, thing, is_beyond=True)
        elif id(thing) not in self._kept_generators() | self._global:  # no checkpoint holds its state
            self._values[node.path + path] = _state_of(thing)  # type: ignore[index]

    def _kept_generators(self) -> set[int]:
        if self._known is None:
            self._known = {id(item) for item in parts_of(self._root).generators.values()}
        return self._known

    def _value(self, thing: Any) -> Any:
        if hasattr(type(thing), "__next__") and type(thing).__module__.partition(".")[0] not in OF_LIBRARIES:
            return object()
        if type(thing) in CONTAINERS and INNER < len(thing) <= MOST_ITEMS:
            items = thing.values() if isinstance(thing, dict) else thing
            return type(thing), len(thing), hash(tuple(item if type(item) in SCALARS else id(item) for item in items))
        return super()._value(thing) if (content := self._content(thing)) is None else content

    def _content(self, thing: Any) -> Any:
        """A checksum of an array or tensor, or of a sample of a large one; None of anything else, and of a large one in no row."""
        numpy = sys.modules.get("numpy")
        if type(thing) in (bytearray, array.array):
            size, is_row = memoryview(thing).nbytes, True
        elif numpy and type(thing) is torch.Tensor and thing.layout is torch.strided and thing.device.type == "cpu":
            size, is_row = thing.nbytes, thing.is_contiguous()
        elif numpy and type(thing) is numpy.ndarray and not thing.dtype.hasobject:
            size, is_row = thing.nbytes, thing.flags.c_contiguous
        else:
            return None
        is_large = size > self._left_bytes
        if not size or (is_large and not is_row):
            return None
        if isinstance(thing, torch.Tensor):
            flat: Any = thing.detach().contiguous().view(-1).view(torch.uint8).numpy()
        elif isinstance(thing, bytearray | array.array):
            flat = memoryview(thing).cast("B")
        else:
            flat = numpy.ascontiguousarray(thing).reshape(-1).view(numpy.uint8)  # type: ignore[union-attr]
        if is_large:
            return size, zlib.crc32(bytes(flat[:: size // SAMPLED_BYTES | 1]))  # odd: of numbers it meets each byte
        self._left_bytes -= size
        return size, zlib.crc32(flat)


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names among the variables of its module, and of other modules of the script."""
    own = function.__globals__
    for name in _globals_of(function.__code__):
        value = own[name] if name in own else sys.modules.get(name)
        if isinstance(value, types.ModuleType):
            if is_of_script(getattr(value, "__file__", None) or "<frozen>", value.__name__):
                members = vars(value)
                yield from ((f"{name}.{item}", members[item]) for item in _names_of(function.__code__) & members.keys())
        elif name in own:
            yield name, value


def _state_of(generator: Any) -> Any:
    try:
        return repr(generator_states.raw_state_of(generator))
    except CannotRestore:
        return object()


@functools.cache
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """The variables of its module that a function names, and the modules that it imports, with those of functions inside it."""
    used = ("LOAD_GLOBAL", "STORE_GLOBAL", "IMPORT_NAME")
    named = {item.argval for item in dis.get_instructions(code) if item.opname in used}
    return frozenset(named).union(*map(_globals_of, _codes_in(code)))


@functools.cache
def _names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(code.co_names).union(*map(_names_of, _codes_in(code)))


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (item for item in code.co_consts if isinstance(item, types.CodeType))
