"""Batches of any structure (tensors in tuples, named tuples, lists, dicts): length, division into parts, transfer to a device.

A batch is divided where it is certain what of it belongs to which sample. Either all its tensors have the samples along their first
axis, or lists and tuples hold one item a sample (sequences and images of different sizes, what detectors are trained on); beside
them tensors may have the samples along their axis. A list or tuple of the batch's length that holds no such tensor (text, numbers)
is divided in both cases; any other value is given to every part. Any other batch is left whole: a tensor that is cut along another
axis trains something else, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from kgorch.errors import KgorchError

AXIS, ITEMS, WHOLE = "axis", "items", "whole"
"""How a batch is divided: along the first axis of its tensors, by the items of its lists, or not at all."""

_FIELD, _UNSURE, _SAMPLES, _NEITHER = range(4)
"""What a part of a batch may be: it has the samples along its first axis; it may also be a list of samples; it can only be such a
list; none of both."""

_PLAIN = (str, bytes, int, float, type(None))
_LISTS = (list, tuple)  # each `list | tuple` makes a new type


class Division(NamedTuple):
    """How a batch is divided.

    Attributes:
        samples: of the batch.
        way: AXIS, ITEMS or WHOLE.
    """

    samples: int
    way: str

    def parts(self, batch: Any, size: int) -> list[Any]:
        """The batch in parts of `size` samples, in order; the last one may be smaller. Whole where it cannot be divided."""
        if size >= self.samples or self.way == WHOLE:
            return [batch]
        return [_part(batch, self, slice(start, start + size)) for start in range(0, self.samples, size)]


def division(batch: Any, declared: int = 0) -> Division:
    """How a batch is divided.

    Args:
        declared: samples that its loader has put into it; 0 where that is not known.
    Raises: KgorchError for a batch without a tensor that has an axis.
    """
    axes = _first_axes(batch, {})
    if not axes:
        for leaf in pytree.tree_leaves(batch):  # of types that scripts have taught PyTorch's tree
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                return Division(leaf.shape[0], WHOLE)
        raise KgorchError(
            f"a batch without a tensor cannot be counted: {type(batch).__name__}",
            next_step="give session.backward() what the loader gave",
        )
    first = next(iter(axes))
    if len(axes) == 1 and declared in (0, first):
        return Division(first, AXIS)
    samples = declared or first
    if _reading(batch, samples) == _SAMPLES and not _may_be_fields(batch, samples):
        return Division(samples, ITEMS)
    return Division(first, AXIS) if len(axes) == 1 else Division(samples, WHOLE)


def length(batch: Any, declared: int = 0) -> int:
    """Samples of a batch. Args, Raises: see `division`."""
    return division(batch, declared).samples


def split(batch: Any, size: int, declared: int = 0) -> list[Any]:
    """The batch in parts of `size` samples (Division.parts)."""
    return division(batch, declared).parts(batch, size)


def size(batch: Any) -> int:
    """Bytes of a batch's tensors."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device, in new lists and dicts. The copy does not block where memory is pinned."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if kind is dict:
        return {
            key: value if type(value) is torch.Tensor and value.device == device else moved(value, device)
            for key, value in batch.items()
        }
    if kind is list or kind is tuple:
        return kind(moved(value, device) for value in batch)
    return pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf, batch
    )


def _first_axes(value: Any, axes: dict[int, None]) -> dict[int, None]:
    """Adds the sizes of the first axes of all tensors in it, in their order. Takes 2 µs for a pair of tensors, and 20 as PyTorch's
    tree."""
    items: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        items = (value,)
    elif isinstance(value, _LISTS):
        # Not each of a thousand tokens.
        if value and not (isinstance(value[0], _PLAIN) and isinstance(value[-1], _PLAIN)):
            items = value
    elif type(value) is dict or isinstance(value, Mapping):
        items = value.values()
    for item in items:
        if not isinstance(item, torch.Tensor):
            _first_axes(item, axes)
        elif item.ndim:
            axes[item.size(0)] = None
    return axes


def _reading(value: Any, samples: int) -> int:
    """What a part of a batch of so many samples may be."""
    if isinstance(value, torch.Tensor):
        return _FIELD if not value.ndim or value.shape[0] == samples else _NEITHER
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    inner = max((_reading(item, samples) for item in items), default=_FIELD)
    if not _is_list(value, samples) or not _are_alike(value) or not _first_axes(value, {}):
        return inner
    # Where its items hold such lists as well, either may be those of the samples: the pairs of two samples, or two of each kind.
    return {_FIELD: _UNSURE, _NEITHER: _SAMPLES}.get(inner, _NEITHER)


def _may_be_fields(batch: Any, samples: int) -> bool:
    """Whether a batch that reads as a list of samples may have as many fields: `[images, boxes of all images]` of two samples."""
    return _is_list(batch, samples) and any(
        isinstance(item, torch.Tensor) and _reading(item, samples) == _FIELD for item in batch
    )


def _is_list(value: Any, samples: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == samples and not hasattr(value, "_fields")


def _are_alike(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether the items may be samples of one kind."""
    return len({_kind(item) for item in items} - {()}) == 1


def _kind(item: Any) -> Any:
    """An empty list is of any kind."""
    if isinstance(item, torch.Tensor):
        return item.dtype, item.ndim
    if isinstance(item, list | tuple):
        return (type(item), _kind(item[0])) if item else ()
    return type(item)


def _part(value: Any, division: Division, span: slice) -> Any:
    if isinstance(value, torch.Tensor):
        return value[span] if value.ndim else value
    if isinstance(value, Mapping):
        return type(value)({key: _part(item, division, span) for key, item in value.items()})  # type: ignore[call-arg]
    if not isinstance(value, list | tuple):
        return value
    by_items = division.way == ITEMS and _are_alike(value) if _first_axes(value, {}) else True
    if _is_list(value, division.samples) and by_items:
        return value[span]
    items = [_part(item, division, span) for item in value]
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items
