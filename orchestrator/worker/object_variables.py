"""The variables of an object, read and set without running any code of its class."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, MutableMapping
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType
from typing import Any

from kgorch.worker.script_code import is_own_function


def variables_of(thing: Any) -> MutableMapping[str, Any]:
    """The items of a dict; of anything else its attributes."""
    return thing if issubclass(type(thing), dict) else attributes_of(thing)


def attributes_of(thing: Any) -> MutableMapping[str, Any]:
    """Of an object, a module, a class; of a function the variables of outer functions that it uses.

    A module that is loaded when it is used is not loaded by this.
    """
    if type(thing) is FunctionType:
        return Closure(thing)
    is_class = issubclass(type(thing), type)  # `isinstance` may run code of the thing's
    try:
        found: Any = vars(thing) if is_class else object.__getattribute__(thing, "__dict__")
    except Exception:  # it has none
        found = None
    found = found if isinstance(found, dict | MappingProxyType) else None
    slots = {} if is_class else slots_of(type(thing))
    if slots:
        return Slots(thing, slots, found)
    return {} if found is None else found


@functools.cache
def shared_names_in(code: CodeType) -> frozenset[str]:
    """The variables of outer functions that a function sets (`nonlocal`), itself or in one that is defined in it."""
    own = {item.argval for item in dis.get_instructions(code) if item.opname == "STORE_DEREF"}
    inner = (shared_names_in(item) for item in code.co_consts if isinstance(item, CodeType))
    return frozenset(own.union(*inner)).intersection(code.co_freevars)


def has_own_count(thing: Any) -> bool:
    """Whether it is a function of the script that sets a variable of an outer one, as one that counts its calls."""
    is_closure = type(thing) is FunctionType and thing.__closure__ is not None
    return is_closure and is_own_function(thing) and bool(shared_names_in(thing.__code__))


def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots of objects of this class, by name."""
    tables = [table for base in reversed(kind.__mro__) if "__slots__" in (table := vars(base))]
    return {
        name: member for table in tables for name, member in table.items() if isinstance(member, MemberDescriptorType)
    }


class Slots(MutableMapping[str, Any]):
    """The variables of an object with slots: those in slots that are set, and those of its dict where it has one, too."""

    def __init__(self, thing: Any, slots: dict[str, MemberDescriptorType], own: dict[str, Any] | None) -> None:
        self._thing, self._slots, self._own = thing, slots, own

    def __getitem__(self, name: str) -> Any:
        if (slot := self._slots.get(name)) is None:
            return (self._own or {})[name]
        try:
            return slot.__get__(self._thing)
        except AttributeError:  # it is not set
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises: KeyError: there is no such slot, and no dict."""
        if (slot := self._slots.get(name)) is not None:
            slot.__set__(self._thing, value)
        elif self._own is not None:
            self._own[name] = value
        else:
            raise KeyError(name)

    def __delitem__(self, name: str) -> None:
        raise TypeError("variables are not deleted")

    def __iter__(self) -> Iterator[str]:
        return (name for name in [*self._slots, *(self._own or ())] if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Closure(MutableMapping[str, Any]):
    """The variables of outer functions that a function uses, as far as they have values."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it has no value
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("variables are not deleted")

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
