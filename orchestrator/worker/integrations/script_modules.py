"""The modules that a script is made of, and the classes that they define."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.script_code import is_of_script, is_own_class

MOST_MODULES, MOST_FUNCTIONS = 200, 1000


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


def variables_used(things: Iterable[Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Names of variables and attributes that functions of these objects set, and that they name: their methods, the functions and
    objects that they hold, and functions of the script that these call by name."""
    sets, names = set[str](), set[str]()
    waiting, seen = deque(things), set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if not isinstance(thing, FunctionType):
            held = getattr(thing, "__func__", None) or getattr(thing, "func", None)  # a bound method, a partial
            own = [value for kind in type(thing).__mro__ if is_own_class(kind) for value in vars(kind).values()]
            inner = vars(thing).values() if own and hasattr(thing, "__dict__") else ()
            waiting += [
                value for value in (held, *own, *inner) if isinstance(value, FunctionType) or is_own_class(type(value))
            ]
            continue
        if not is_of_script(thing.__code__.co_filename, str(thing.__module__)):
            continue
        for code in _codes_in(thing.__code__):
            names |= {*code.co_names}
            sets |= {
                str(one.argval) for one in dis.get_instructions(code) if one.opname in ("STORE_ATTR", "STORE_GLOBAL")
            }
            called = (thing.__globals__.get(name) for name in code.co_names)
            waiting += [value for value in called if isinstance(value, FunctionType) or is_own_class(type(value))]
    return frozenset(sets), frozenset(names)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _codes_in(item)


def variables_of(module: Any) -> dict[str, Any]:
    """Without running code of the module: of one that is loaded later, any other look loads it."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _is_of_script(module: Any, name: str) -> bool:
    file = variables_of(module).get("__file__")
    return name == "__main__" or (isinstance(file, str) and is_of_script(file, name))
