"""What the DataLoaders inside of a foreign loader read in an epoch: how many batches, ahead of the training or not, in which order.

A loader may hold more than it has given: Accelerate's reads one batch ahead, so that it knows the last one. With no
loading processes that batch was read under random states which are gone when the training saves. So the random states
before the newest reads are kept; a resume, which reads the epoch's batches again, sets them before the same reads.

How many are needed is told from the reads between the batches given. A loader that reads as many for each batch has
read those ahead that it read before the first one, less that number. One that does not may hold all that it has read
and not given.

Of the indices that samplers gave a checksum is kept. The same reads after a resume must have the same one, whatever
the samplers are: an order that is another one is seen. A stream has no indices. There the newest batch is read under the
states that it had, too, so it must come out as it was.

PyTorch has no hook for a read of a DataLoader, so three methods of it are wrapped, once for the whole process; they do
what they did, and then tell the Watch of the epoch, if their loader has one.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from orchestrator.worker.data.keyed_loader import without_sigterm

MOST_AHEAD = 8
"""Reads whose random states are kept: some 15 kB each in every checkpoint."""

SURE = 4
"""After so many batches a loader that has read one for each is taken to read none ahead."""

SAMPLED = 64
"""Elements of a tensor that its checksum is made of."""

_watches: weakref.WeakKeyDictionary[DataLoader[Any], weakref.ref[ReadWatch]] = weakref.WeakKeyDictionary()
_opening: list[ReadWatch] = []
"""Of the iterator that is being made: one with loading processes draws its first indices at once."""


class ReadWatch:
    """One epoch's reads.

    Args:
        read_states: the random states as they are now, in a form that is quick to get.
        set_states: sets random states of an earlier process.
        ahead: those, by the number of the read that they belong before.
        order: draws and checksum of an earlier process.
        records: whether reads may draw in the rank's own process.
    Attributes:
        reads: batches that the DataLoaders have read. given: batches that the training got, or that were thrown away.
        same_order: whether the indices were those of `order`; None: not known (yet).
        in_threads: whether another thread than the training's reads.
    """

    def __init__(
        self, read_states: Callable[[], Any], set_states: Callable[[Any], None], ahead: Mapping[int, Any],
        order: tuple[int, int] | None, *, records: bool = True,
    ) -> None:  # fmt: skip
        self.reads = self.given = 0
        self.same_order: bool | None = None
        self.in_threads = False
        self._read_states, self._set_states = read_states, set_states
        self._ahead, self._order = dict(ahead), order
        self._states: deque[tuple[int, Any]] = deque(maxlen=MOST_AHEAD)
        self._before_first = 0  # reads before the first batch was given
        self._each: int | None = None  # reads for each batch after it
        self._is_regular, self._draws, self._records = True, records, records
        self._indices = self._checksum = 0
        self._has_order = False
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._is_active = self._is_busy = False

    def begin(self, loaders: Iterable[DataLoader[Any]]) -> None:
        for loader in loaders:
            _wrap(type(loader), "_get_iterator", _opened)
            _watches[loader] = weakref.ref(self)
            if (iterator := getattr(loader, "_iterator", None)) is not None:  # kept from the epoch before
                _follow(iterator, self)

    def active(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls it; only what is read meanwhile counts, or in another thread."""
        self._is_active = True
        try:
            return function(*args)
        finally:
            self._is_active = False

    def _counts(self) -> bool:
        return os.getpid() == self._process and (self._is_active or threading.get_ident() != self._thread)

    def gave(self) -> None:
        """A batch came out of the loader."""
        self.given += 1
        if self.given == 1:
            self._before_first = self.reads
        elif self._each is None:
            self._each = self.reads - self._before_first
        elif self.reads != self._before_first + self._each * (self.given - 1):
            self._is_regular = False
        if self._has_order and self.given >= SURE and self.needed == 0:
            self._records = False
            self._states.clear()
        else:
            self._records = self._draws

    @property
    def needed(self) -> int:
        """How many of the newest reads a resume has to do under the random states that they had, for what they hold to come."""
        if self._is_regular and self._each is not None:
            return max(0, self._before_first - self._each)
        return min(self.reads, max(self.reads - self.given, self._before_first, 1))

    @property
    def is_exact(self) -> bool:
        """Whether the states of all reads that are needed are kept."""
        return not self._draws or len(self._states) >= self.needed

    @property
    def states(self) -> list[tuple[int, Any]]:
        """Numbers of the reads that are needed, and the states before them; without indices those of the newest batch, too."""
        newest = 0 if self._has_order else max(1, self._each or 0)
        return [item for item in self._states if item[0] > self.reads - self.needed - newest]

    @property
    def repeats_newest(self) -> bool:
        """Whether a resume can read the newest batch as it was: under the states that it had, or where nobody sees a read."""
        if self.reads == 0 or not self._draws:
            return True
        return len(self.states) > self.needed or (self.is_exact and self.needed == self.reads)

    @property
    def order(self) -> tuple[int, int] | None:
        """How many times indices were drawn, and their checksum; None where there are none (a stream)."""
        return (self._indices, self._checksum) if self._has_order else None

    def read(self, read: Callable[[], Any]) -> Any:
        """A DataLoader's batch; one that it reads out of another DataLoader is part of it."""
        if self._is_busy or not self._counts():
            return read()
        self.in_threads = self.in_threads or threading.get_ident() != self._thread
        if (states := self._ahead.pop(self.reads + 1, None)) is not None:
            self._set_states(states)
        if self._records:
            self._states.append((self.reads + 1, self._read_states()))
        self._is_busy = True
        try:
            batch = read()
        finally:
            self._is_busy = False
        self.reads += 1
        return batch

    def drew(self, index: Any) -> None:
        """A sampler has given an index, or a batch of them."""
        if not self._counts():
            return
        self._indices += 1
        self._checksum = zlib.crc32(_bytes_of(index), self._checksum)
        self._has_order = self._has_order or not _is_empty(index)
        if self._order and self._indices == self._order[0]:
            self.same_order = self._checksum == self._order[1]


def checksum(batch: Any) -> int | None:
    """Of a batch's first elements; None for one on a GPU, which would have to be waited for, or of unknown parts."""
    found = 0
    try:
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.device.type != "cpu":
                    return None
                flat = leaf.detach().reshape(-1)
                leaf = (leaf.shape, flat[:: max(1, flat.numel() // SAMPLED)].tolist())
            elif not isinstance(leaf, str | bytes | int | float | bool | None):
                return None
            found = zlib.crc32(repr(leaf).encode(), found)
    except (RuntimeError, NotImplementedError):  # sparse, quantized
        return None
    return found


def _bytes_of(index: Any) -> bytes:
    try:
        return array("q", index if isinstance(index, list | tuple) else [index]).tobytes()
    except (TypeError, OverflowError):  # no whole numbers
        return repr(index).encode()


def _is_empty(index: Any) -> bool:
    """What the sampler of a stream gives."""
    return index is None or (isinstance(index, list) and all(item is None for item in index))


def _wrap(kind: type, name: str, wrapped: Callable[..., Any]) -> None:
    """The class that defines the method gets `wrapped(original, self)` in its place, once."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is None or hasattr(original := vars(owner)[name], "_is_watched"):
        return

    @functools.wraps(original)
    def method(self: Any) -> Any:
        return wrapped(original, self)

    method._is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _opened(original: Callable[[Any], Any], loader: Any) -> Any:
    watch = known() if (known := _watches.get(loader)) else None
    if watch is None:
        return original(loader)
    _wrap_iterators()
    _opening.append(watch)
    try:
        with without_sigterm(loader):
            iterator = original(loader)
    finally:
        _opening.remove(watch)
    _follow(iterator, watch)
    return iterator


def _wrap_iterators() -> None:
    base: type = torch.utils.data.dataloader._BaseDataLoaderIter
    for kind in (base, *base.__subclasses__()):
        _wrap(kind, "_next_index", _drawn)
        _wrap(kind, "_next_data", _read)


def _follow(iterator: Any, watch: ReadWatch) -> None:
    _wrap(type(iterator), "_next_index", _drawn)
    _wrap(type(iterator), "_next_data", _read)
    iterator._kgorch_watch = weakref.ref(watch)


def _watch_of(iterator: Any) -> ReadWatch | None:
    known = iterator.__dict__.get("_kgorch_watch")
    return known() if known else (_opening[-1] if _opening else None)


def _drawn(original: Callable[[Any], Any], iterator: Any) -> Any:
    index = original(iterator)
    if watch := _watch_of(iterator):
        watch.drew(index)
    return index


def _read(original: Callable[[Any], Any], iterator: Any) -> Any:
    watch = _watch_of(iterator)
    return watch.read(lambda: original(iterator)) if watch else original(iterator)
