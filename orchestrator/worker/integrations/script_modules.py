"""The modules that a script is made of, the classes that they define, and the names that its functions set and use."""

from __future__ import annotations

import functools
import itertools
import opcode
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.object_variables import variables_of
from kgorch.worker.script_code import is_of_script, is_own_class

MOST_MODULES, MOST_FUNCTIONS = 200, 1000

_STORES = opcode.opmap["STORE_ATTR"], opcode.opmap["STORE_GLOBAL"]


def modules_of(things: Iterable[Any]) -> dict[str, ModuleType]:
    """By name: those whose functions run now, or that define a class of one of these, and the script's own that they use."""
    found = dict[str, ModuleType]()
    names = [frame.f_globals.get("__name__", "") for frame in frames_of_script()]
    waiting = deque(["__main__", *names, *(str(type(thing).__module__) for thing in things)])
    while waiting and len(found) < MOST_MODULES:
        name = waiting.popleft()
        module = sys.modules.get(name)
        if name in found or not issubclass(type(module), ModuleType) or not _is_of_script(module, name):
            continue
        assert module is not None
        found[name] = module
        for value in list(variables_of(module).values()):
            if issubclass(type(value), ModuleType):
                waiting.append(str(variables_of(value).get("__name__")))
            elif issubclass(type(value), FunctionType | type):
                waiting.append(str(value.__module__))
    return found


def classes_in(modules: dict[str, ModuleType]) -> Iterator[tuple[str, type]]:
    """The classes that they define, by name."""
    for name, module in modules.items():
        for value in list(variables_of(module).values()):
            if issubclass(type(value), type) and value.__module__ == name and not issubclass(value, Enum):
                yield f"{name}.{value.__qualname__}", value


def names_set() -> set[str]:
    """Attributes that functions and methods of the script set, on any object, and global variables."""
    return set[str]().union(*map(_names_set_in, _codes_of_script()))


def names_set_on_others() -> set[str]:
    """Of them those that are set on other objects than a method's `self`, as far as the instructions tell."""
    return set[str]().union(*map(_names_set_on_others_in, _codes_of_script()))


def _codes_of_script() -> list[CodeType]:
    codes = [frame.f_code for frame in frames_of_script()]
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and _is_of_script(module, name):
            values = list(variables_of(module).values())
            codes += itertools.chain.from_iterable(_codes(value, name) for value in values)
    return codes


def names_used(things: Iterable[Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of variables and attributes that functions of these objects set, and that they name: their methods, the functions and
    objects that they hold, and functions of the script that these call by name."""
    sets, names = set[str](), set[str]()
    waiting, seen = deque(things), set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, FunctionType):
            if not is_of_script(thing.__code__.co_filename, str(thing.__module__)):
                continue
            sets |= _names_set_in(thing.__code__)
            used = _names_used_in(thing.__code__)
            names |= used
            below = [thing.__globals__.get(name) for name in used]
        else:
            below = [thing.__func__] if isinstance(thing, MethodType) else []
            below += [thing.func] if isinstance(thing, functools.partial) else []
            if own := [kind for kind in type(thing).__mro__ if is_own_class(kind)]:
                below += itertools.chain(variables_of(thing).values(), *(vars(kind).values() for kind in own))
        waiting += [value for value in below if isinstance(value, FunctionType) or is_own_class(type(value))]
    return frozenset(sets), frozenset(names)


@functools.cache
def _names_set_in(code: CodeType) -> frozenset[str]:
    """Attributes and global variables that a function sets, and those that are defined in it."""
    return frozenset(name for name, _ in _stores_in(code)).union(*map(_names_set_in, _codes_in(code)))


@functools.cache
def _names_set_on_others_in(code: CodeType) -> frozenset[str]:
    others = frozenset(name for name, is_on_self in _stores_in(code) if not is_on_self)
    return others.union(*map(_names_set_on_others_in, _codes_in(code)))


def _stores_in(code: CodeType) -> Iterator[tuple[str, bool]]:
    """The names that a function sets, and whether it sets an attribute of its `self`."""
    words, extended, before = code.co_code, 0, (opcode.EXTENDED_ARG, 0)
    for at in range(0, len(words), 2):
        word, argument = words[at], words[at + 1] | extended << 8
        extended = argument if word == opcode.EXTENDED_ARG else 0
        if word in _STORES and argument < len(code.co_names):
            yield code.co_names[argument], code.co_varnames[:1] == ("self",) and _loads_first(*before)
        if word != opcode.EXTENDED_ARG:
            before = word, argument


def _loads_first(word: int, argument: int) -> bool:
    """Whether an instruction loads the first variable last; that of two has both numbers in its argument."""
    name = opcode.opname[word]
    return name.startswith("LOAD_FAST") and (argument & 15 if name.count("LOAD_FAST") == 2 else argument) == 0


def _names_used_in(code: CodeType) -> frozenset[str]:
    """Variables of modules, and attributes, that a function names, and those that are defined in it."""
    return frozenset(code.co_names).union(*map(_names_used_in, _codes_in(code)))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (item for item in code.co_consts if isinstance(item, CodeType))


def _codes(value: Any, module: str) -> Iterator[CodeType]:
    if not issubclass(type(value), FunctionType | type) or value.__module__ != module:
        return
    for item in list(vars(value).values()) if isinstance(value, type) else [value]:
        functions = [item.fget, item.fset] if isinstance(item, property) else [getattr(item, "__func__", item)]
        for function in functions:
            while isinstance(function, FunctionType):
                yield function.__code__
                function = function.__dict__.get("__wrapped__")  # what torch.no_grad and the like have wrapped


def _is_of_script(module: Any, name: str) -> bool:
    file = variables_of(module).get("__file__")
    return name == "__main__" or (isinstance(file, str) and is_of_script(file, name))
