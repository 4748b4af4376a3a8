"""State that a block may change in its forward, and that a recomputation must find unchanged: buffers, attributes, random
states."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class EntryTable:
    """Entries of a module's buffers or attributes. They are exchanged, not copied into, so those in use keep their versions."""

    def __init__(self, entries: dict[str, Any], names: Iterable[str] | None = None) -> None:
        self._entries, self._names = entries, names

    def take(self) -> dict[str, Any]:
        """Copies of the entries, by name."""
        names = self._entries if self._names is None else self._names
        return {name: copied_if_mutable(self._entries[name]) for name in names if name in self._entries}

    def changed_since(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The entries whose values have changed. Versions do not show it: BatchNorm's statistics keep theirs."""
        return {name: old for name, old in saved.items() if _differ(old, self._entries.get(name))}

    def only(self, names: Iterable[str]) -> EntryTable:
        """The same, reduced to these entries."""
        return EntryTable(self._entries, tuple(names))

    @contextmanager
    def restored(self, old: dict[str, Any]) -> Iterator[None]:
        """A context in which the entries have their old values."""
        now = self._entries.copy()
        self._entries.update({name: copied_if_mutable(value) for name, value in old.items()})
        try:
            yield
        finally:
            self._entries.update(now)


class HostRng:
    """The random states of python and NumPy; torch.utils.checkpoint keeps torch's."""

    def take(self) -> tuple[Any, Any]:
        numpy = sys.modules.get("numpy")
        return random.getstate(), numpy.random.get_state(legacy=False) if numpy else None

    def changed_since(self, saved: tuple[Any, Any]) -> tuple[Any, Any] | None:
        python, numpy = self.take()
        is_same = python == saved[0] and pickle.dumps(numpy) == pickle.dumps(saved[1])
        return None if is_same else saved

    def only(self, _: Any) -> HostRng:
        return self

    @contextmanager
    def restored(self, old: tuple[Any, Any]) -> Iterator[None]:
        now = self.take()
        self._set(old)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that requires a gradient if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def copied_if_mutable(value: Any) -> Any:
    """A copy of a tensor or generator, whose changes in place can be detected; other objects as they are."""
    if isinstance(value, torch.Tensor):
        return copied(value)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    return value


def _differ(old: Any, now: Any) -> bool:
    """Whether the values differ; objects that are neither tensor nor generator, by identity."""
    if isinstance(old, torch.Tensor) and isinstance(now, torch.Tensor):
        return old.dtype != now.dtype or old.device != now.device or not torch.equal(old, now)
    if isinstance(old, torch.Generator) and isinstance(now, torch.Generator):
        return not torch.equal(old.get_state(), now.get_state())
    return old is not now
