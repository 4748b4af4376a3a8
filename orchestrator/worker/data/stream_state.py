"""The place of a loader that keeps it by itself: a resume then reads nothing again.

Used where it loses nothing: torchdata's StatefulDataLoader, a loader of the script's own with `state_dict` and `load_state_dict`,
and a stream with both that a DataLoader without loading processes reads. A stream that shuffles in a buffer is read again instead:
its state does not hold the buffer. So is one that Accelerate's first rank reads for all: the others have no state of it.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from kgorch.errors import CannotRestore
from kgorch.worker import tagged_json

MOST_BYTES = 1 << 16
"""Limit of a state as JSON, which is a part of every checkpoint and snapshot; a larger one is not used."""

MOST_BACK = 8
"""Newest batches before which the state is known: those that a step has read before its boundary."""

TENSOR = "torch"
"""Key of a tensor: JSON has arrays of NumPy alone."""


class StreamState:
    """The states of one epoch.

    Args:
        world_size: number of ranks.
        records: a checkpoint may count the newest batches as not used, so the states before them are kept.

    Attributes:
        is_known: the loader has such a state, which could be stored whenever it was asked for and was another after each batch.
    """

    def __init__(self, loader: Any, world_size: int, *, records: bool) -> None:
        self._thing = _stateful(loader, world_size)
        self._ahead = loader if is_of_accelerate(loader) else None  # it reads a batch ahead, from the first one on
        self._records = records or self._ahead is not None
        self._states: deque[tuple[int, Any]] = deque(maxlen=MOST_BACK + 1)  # (batches that were read, the state then)

    @property
    def is_known(self) -> bool:
        return self._thing is not None

    def before_batch(self, given: int) -> None:
        """A batch is asked for next; `given`: those before it."""
        if self._thing is not None and (self._records or not self._states):
            is_ahead = self._ahead is not None and bool(self._states)
            self._states.append((given + is_ahead, self._encoded()))

    def after(self, used: int, given: int) -> Any:
        """The state after `used` of the `given` batches, as JSON; None where it is not known."""
        if self._thing is None or not used:
            return None
        if used == given and getattr(self._ahead, "end_of_dataloader", False):
            return None  # Accelerate's first rank fails where it has nothing to read
        is_now = used == given and self._ahead is None
        state = self._encoded() if is_now else dict(self._states).get(used)
        if any(read < used and state == at_that for read, at_that in self._states):  # it tells no place
            self._thing = state = None
        return state

    def load(self, saved: Any) -> None:
        """Continue there at the next iteration. Raises: CannotRestore."""
        try:
            assert self._thing is not None
            self._thing.load_state_dict(_with_tensors(tagged_json.decode(saved, "loader")))
        except Exception as error:  # code of a library or of the script
            raise CannotRestore(
                "a loader does not take the state that it had", f"{type(error).__name__}: {error}"[:300]
            ) from None

    def _encoded(self) -> Any:
        if self._thing is None:
            return None
        try:
            encoded = tagged_json.encode(_without_tensors(self._thing.state_dict()), "loader")
            if len(json.dumps(encoded)) <= MOST_BYTES:
                return encoded
        except Exception:  # code of a library or of the script; its batches are read again instead
            pass
        self._thing = None
        return None


def _stateful(loader: Any, world_size: int) -> Any:
    """The object that knows its place; None where there is none."""
    library, dataset = type(loader).__module__.partition(".")[0], getattr(loader, "dataset", None)
    if _has_state(loader) and (library == "torchdata" or not isinstance(loader, DataLoader)):
        return None if is_of_accelerate(loader) else loader  # whose state counts the batch that it reads ahead
    if is_of_accelerate(loader) and world_size > 1 and "Dispatcher" in type(loader).__name__:
        return None
    if isinstance(loader, DataLoader) and not loader.num_workers and isinstance(dataset, IterableDataset):
        return dataset if _has_state(dataset) and not _has_buffer(dataset) else None
    return None


def is_of_accelerate(loader: Any) -> bool:
    """Whether it is a loader of Accelerate's, which reads a batch ahead."""
    return type(loader).__module__.partition(".")[0] == "accelerate"


def _has_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _has_buffer(dataset: Any) -> bool:
    """Whether a stream of Hugging Face's datasets, or one of those that it mixes, shuffles in a buffer."""
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        if (source := waiting.pop()) is not None:
            if "Buffer" in type(source).__name__:
                return True
            waiting += [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    return False


def _without_tensors(state: Any) -> Any:
    return tree_map(lambda value: {TENSOR: value.cpu().numpy()} if isinstance(value, torch.Tensor) else value, state)


def _with_tensors(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {TENSOR}:
            return torch.tensor(state[TENSOR])  # a copy in PyTorch's own memory
        return {key: _with_tensors(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_with_tensors(value) for value in state)
    return state
