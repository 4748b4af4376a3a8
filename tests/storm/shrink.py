"""A schedule that breaks something, made small: delta debugging (Zeller and Hildebrandt 2002, ddmin). Pure of what it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def smallest(items: Sequence[Item], still_fails: Callable[[Sequence[Item]], bool], *, tries: int = 1000) -> list[Item]:
    """A part of `items`, in their order, that still fails and of which nothing can be left out; as far as `tries` allow.

    Args: still_fails: asked for parts of `items`, which itself is known to fail; it may be costly, and is asked once for each.
    """
    known: dict[tuple[int, ...], bool] = {}

    def fails(part: Sequence[int]) -> bool:
        key = tuple(part)
        if key not in known:
            if len(known) >= tries:
                return False
            known[key] = still_fails([items[index] for index in part])
        return known[key]

    kept, pieces = list(range(len(items))), 2
    if kept and fails([]):
        return []
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        parts = [kept[start : start + size] for start in range(0, len(kept), size)]
        others = [[index for index in kept if index not in part] for part in parts]
        if found := next((part for part in parts if fails(part)), None):
            kept, pieces = found, 2
        elif found := next((part for part in others if len(others) > 2 and fails(part)), None):
            kept, pieces = found, max(pieces - 1, 2)
        elif pieces >= len(kept):
            break
        else:
            pieces = min(2 * pieces, len(kept))
    return [items[index] for index in kept]
