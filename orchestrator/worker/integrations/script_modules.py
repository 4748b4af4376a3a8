"""The modules that a script is made of, and the classes that they define."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.script_code import is_of_script

MOST_MODULES = 200


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
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"{name}.{value.__qualname__}", value


def variables_of(module: Any) -> dict[str, Any]:
    """Without running code of the module: of one that is loaded later, any other look loads it."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _is_of_script(module: Any, name: str) -> bool:
    file = variables_of(module).get("__file__")
    return name == "__main__" or (isinstance(file, str) and is_of_script(file, name))
