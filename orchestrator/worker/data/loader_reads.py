"""Observation of the DataLoaders inside a foreign loader: how many batches they read in an epoch, how far ahead, and in which
order.

A loader may hold more batches than it has given: Accelerate's reads one batch ahead, to know the last one. Without loading
processes that batch was read under random states that are gone when the training saves. So the random states before the newest
reads are kept. A resume reads the epoch's batches again, and sets these states before the same reads.

The number of reads whose states are needed follows from the reads between two batches. A loader that reads equally often for each
batch has read ahead what it read before the first one, less that number. Any other loader may hold all that it has read and
not given.

A checksum of the samplers' indices is kept. The same reads after a resume must have the same checksum, whatever the samplers
are, so a different order is detected. A stream has no indices: there the newest batch is read under the states that it had,
too, and must come out the same.

PyTorch has no hook for a read of a DataLoader. So three of its methods are wrapped, once for the whole process: they do what they
did, and then notify the ReadWatch of the epoch, if their loader has one. If it has none, as that of an evaluation, only the seed of
loading processes that stay is drawn elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from kgorch.worker.data.keyed_loader import keeping_states, without_sigterm
from kgorch.worker.data.worker_states import WorkerStates

MOST_AHEAD = 8
"""Limit of reads whose random states are kept: some 15 kB each in every checkpoint."""

SURE = 4
"""Batches after which a loader that has read one for each counts as not reading ahead."""

SAMPLED = 64
"""Elements of a tensor that go into its checksum."""

_LISTS = (list, tuple)

_watches: weakref.WeakKeyDictionary[DataLoader[Any], weakref.ref[ReadWatch]] = weakref.WeakKeyDictionary()
_opening: list[ReadWatch] = []
"""The watch of the iterator that is being created: one with loading processes draws its first indices at once."""


def wrap_starts() -> None:
    """See `_seeded_apart`: for the evaluation loaders of a training, which have no watch."""
    _wrap(DataLoader, "_get_iterator", _watching_start)


class ReadWatch:
    """The reads of one epoch.

    Args:
        read_states: returns the current random states, in a form that is quick to get.
        set_states: sets random states of an earlier process.
        ahead: those states, by the number of the read before which they are set.
        order: number and checksum of the indices of an earlier process.
        records: reads may draw random numbers in the rank's own process.

    Attributes:
        reads: batches that the DataLoaders have read.
        given: batches that the training has got, or that a resume has discarded.
        same_order: whether the indices were those of `order`; None where that is not known (yet).
        in_threads: another thread than the training's reads.
        back: of the batches that were given, those that a resume gives again.
        sizes: indices that the samplers have given for each batch that is still to come; 0 where they give none.
        skipped: batches of the epoch that this process has not read; they count among `reads` and `given`.
        lacking: of them, those that the samplers have not given: the epoch is shorter than it was.
        processes: where loading processes that start for the epoch keep their random states.
        is_exhausted: a read has found the samplers' end. They may have drawn random numbers there.
        to_skip: indices that are to be left out before the next read.
    """

    def __init__(
        self, read_states: Callable[[], Any], set_states: Callable[[Any], None], ahead: Mapping[int, Any],
        order: tuple[int, int] | None, *, records: bool = True,
    ) -> None:  # fmt: skip
        self.reads = self.given = self.back = self.skipped = self.lacking = 0
        self.same_order: bool | None = None
        self.in_threads = False
        self._read_states, self._set_states = read_states, set_states
        self._ahead, self._order = dict(ahead), order
        self._states: deque[tuple[int, Any]] = deque(maxlen=MOST_AHEAD)
        self._before_first = 0  # reads before the first batch was given
        self._each: int | None = None  # reads for each batch after it
        self._is_regular, self._draws, self._records = True, records, records
        self._indices = self._checksum = 0
        self.sizes: deque[int] = deque()
        self._has_order = self._has_no_order = False
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._is_active = self._is_busy = False
        self.to_skip, self._arrives_at = 0, -1
        self._drawn: Callable[[], None] = _nothing
        self._arrive: Callable[[], None] = _nothing
        self.processes: WorkerStates | None = None
        self.is_exhausted = self._arrives_at_end = False

    def begin(self, loaders: Iterable[DataLoader[Any]]) -> None:
        """Watch these loaders from now on."""
        for loader in loaders:
            _wrap(type(loader), "_get_iterator", _watching_start)
            _watches[loader] = weakref.ref(self)
            if (iterator := getattr(loader, "_iterator", None)) is not None:  # kept from the epoch before
                _follow(iterator, self)

    def skip(self, batches: int) -> None:
        """The loader begins after so many batches, by a state of its own: they count as read, and their order is not known."""
        self.reads = self.given = self.skipped = batches
        self._before_first = self._each = 1
        self._order, self._has_no_order = None, True

    def skip_indices(
        self, batches: int, reads: int, *, at_end: bool, drawn: Callable[[], None], arrive: Callable[[], None]
    ) -> None:
        """The samplers' indices of so many batches are drawn before the first read, and not read.

        Args:
            reads: batches that had been read when the place was kept.
            at_end: the samplers' end had been found after them.
            drawn: called when these indices are drawn.
            arrive: called when as much is read, found or left out.
        """
        self.reads = self.given = self.skipped = self.to_skip = batches
        self._arrives_at, self._arrives_at_end = reads, at_end
        self._drawn, self._arrive = drawn, arrive

    def draw_skipped(self, draw: Callable[[], Any]) -> int:
        """Draw the indices that are to be left out, before the first one that is not.

        Returns:
            Their number.

        Raises:
            StopIteration: there are fewer.
        """
        if not self._counts():
            return 0
        while self.to_skip:
            self.count_index(draw())
            self.sizes.pop()
            self.to_skip -= 1
        self._drawn()
        if self._is_busy:  # in the rank's own process: the first read goes on here
            self._begin_read()
        return self.skipped

    def end_skip(self) -> None:
        """The first batch is there, or there is none."""
        if self.to_skip:
            self._drawn()
        self.lacking, self.to_skip, self._arrives_at = self.to_skip, 0, -1
        self._drawn = self._arrive = _nothing

    def active(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function. Only reads inside of it count, and reads in other threads."""
        self._is_active = True
        try:
            return function(*args)
        finally:
            self._is_active = False

    @property
    def is_active(self) -> bool:
        """What is read now counts."""
        return self._counts()

    def _counts(self) -> bool:
        return os.getpid() == self._process and (self._is_active or threading.get_ident() != self._thread)

    def count_batch(self) -> None:
        """The loader has given a batch."""
        self.given += 1
        if self.sizes:
            self.sizes.popleft()
        given, reads = self.given - self.skipped, self.reads - self.skipped
        if given == 1:
            self._before_first = reads
        elif self._each is None:
            self._each = reads - self._before_first
        elif reads != self._before_first + self._each * (given - 1):
            self._is_regular = False
        if self._has_order and given >= SURE and self.needed == 0:
            self._records = False
            self._states.clear()
        else:
            self._records = self._draws

    @property
    def needed(self) -> int:
        """Number of the newest reads that a resume has to repeat under their random states, to get the batches that were read
        ahead."""
        if self._is_regular and self._each is not None:
            return max(0, self._before_first - self._each) + self.back * self._each
        return min(self.reads, max(self.reads - self.given, self._before_first, 1) + self.back)

    @property
    def is_exact(self) -> bool:
        """Whether the states of all needed reads are kept."""
        return not self._draws or len(self._states) >= self.needed

    @property
    def states(self) -> list[tuple[int, Any]]:
        """The needed reads by number, and the states before them; without indices those of the newest batch, too."""
        newest = 0 if self._has_order else max(1, self._each or 0)
        return [item for item in self._states if item[0] > self.reads - self.needed - newest]

    @property
    def repeats_newest(self) -> bool:
        """Whether a resume can repeat the read of the newest batch exactly, or cannot observe reads at all."""
        if self.reads == 0 or not self._draws:
            return True
        return len(self.states) > self.needed or (self.is_exact and self.needed == self.reads)

    @property
    def order(self) -> tuple[int, int] | None:
        """Number of draws of indices, and their checksum; None where there are none (a stream)."""
        return (self._indices, self._checksum) if self._has_order and not self._has_no_order else None

    def read(self, read: Callable[[Any], Any], iterator: Any) -> Any:
        """Read a DataLoader's batch: `read(iterator)`. A batch that it reads from another DataLoader is part of it."""
        if self._is_busy or not self._counts():
            return read(iterator)
        self.in_threads = self.in_threads or threading.get_ident() != self._thread
        if not self.to_skip:
            self._begin_read()
        self._is_busy = True
        try:
            batch = read(iterator)
        except StopIteration:
            if self._states and self._states[-1][0] > self.reads:
                self._states.pop()
            self.is_exhausted = True
            self._look_arrival()
            raise
        finally:
            self._is_busy = False
        self.reads += 1
        if self._arrives_at >= 0:
            self._look_arrival()
        return batch

    def _look_arrival(self) -> None:
        if self.reads == self._arrives_at and self.is_exhausted >= self._arrives_at_end:
            self._arrives_at = -1
            self._arrive()

    def _begin_read(self) -> None:
        if self._arrives_at >= 0:
            self._look_arrival()
        if (states := self._ahead.pop(self.reads + 1, None)) is not None:
            self._set_states(states)
        if self._records:
            self._states.append((self.reads + 1, self._read_states()))

    def count_index(self, index: Any) -> None:
        """A sampler has given an index, or a batch of indices."""
        if not self._counts():
            return
        is_batch, is_empty = isinstance(index, _LISTS), _is_empty(index)
        self._indices += 1
        self.sizes.append(len(index) if is_batch and not is_empty else 0)
        self._checksum = zlib.crc32(_bytes_of(index, is_batch=is_batch), self._checksum)
        self._has_order = self._has_order or not is_empty
        if self._order and self._indices == self._order[0]:
            self.same_order = self._checksum == self._order[1]


class SampledBatch:
    """A batch whose checksum is computed when it is asked for: saves ask for it, and steps do not wait for it."""

    def __init__(self, batch: Any) -> None:
        self._leaves = pytree.tree_leaves(batch)  # not the batch, from which a script may take something out
        self._versions = _versions(self._leaves)
        if self._versions is None:
            self._leaves = []

    def checksum(self) -> int | None:
        """A checksum of samples of it; None for a batch on a GPU, which would have to be waited for, for one of unknown types, and
        for one that the script has written to since."""
        crc = 0
        if self._versions is None or _versions(self._leaves) != self._versions:
            return None
        try:
            for leaf in self._leaves:
                if isinstance(leaf, torch.Tensor):
                    flat = leaf.detach().reshape(-1)
                    leaf = (leaf.shape, flat[:: max(1, flat.numel() // SAMPLED)].tolist())
                elif not isinstance(leaf, str | bytes | int | float | bool | None):
                    return None
                crc = zlib.crc32(repr(leaf).encode(), crc)
        except (RuntimeError, NotImplementedError):  # sparse, quantized
            return None
        return crc


def _versions(leaves: Iterable[Any]) -> list[int] | None:
    """PyTorch's count of the writes to each tensor; None where one is not on the CPU."""
    versions = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type != "cpu":
                return None
            versions.append(0 if leaf.is_inference() else leaf._version)
    return versions


def _bytes_of(index: Any, *, is_batch: bool) -> bytes:
    try:
        return array("q", index if is_batch else [index]).tobytes()
    except (TypeError, OverflowError):  # the indices are not integers
        return repr(index).encode()


def _is_empty(index: Any) -> bool:
    """Whether the index is that of a stream's sampler."""
    if index is None:
        return True
    return isinstance(index, list) and (not index or index[0] is None) and all(item is None for item in index)


def _wrap(kind: type, name: str, wrapped: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Replace the method, in the class that defines it, by `wrapped(original)`, once."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is None or hasattr(original := vars(owner)[name], "_is_watched"):
        return
    method = functools.wraps(original)(wrapped(original))
    method._is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _watching_start(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_iterator(loader: Any) -> Any:
        watch = known() if (known := _watches.get(loader)) else None
        if watch is None:
            with _seeded_apart(loader):
                return original(loader)
        _wrap_iterators()
        _opening.append(watch)
        try:
            with without_sigterm(loader), keeping_states(loader, watch.processes if watch.is_active else None):
                iterator = original(loader)
        finally:
            _opening.remove(watch)
        _follow(iterator, watch)
        return iterator

    return get_iterator


@contextlib.contextmanager
def _seeded_apart(loader: Any) -> Iterator[None]:
    """A context in which loading processes that stay are seeded by a generator of their own.

    They start once in a process, so once more in a resumed session. A draw from the training's generator would make later ones
    others.
    """
    before = loader.generator
    if loader.num_workers and loader.persistent_workers:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    try:
        yield
    finally:
        loader.generator = before


def _wrap_iterators() -> None:
    base: type = torch.utils.data.dataloader._BaseDataLoaderIter
    for kind in (base, *base.__subclasses__()):
        _wrap(kind, "_next_index", _watching_draw)
        _wrap(kind, "_next_data", _watching_read)


def _follow(iterator: Any, watch: ReadWatch) -> None:
    _wrap(type(iterator), "_next_index", _watching_draw)
    _wrap(type(iterator), "_next_data", _watching_read)
    iterator._kgorch_watch = weakref.ref(watch)


def _watch_of(iterator: Any) -> ReadWatch | None:
    known = iterator.__dict__.get("_kgorch_watch")
    return known() if known else (_opening[-1] if _opening else None)


def _watching_draw(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def next_index(iterator: Any) -> Any:
        if (watch := _watch_of(iterator)) is None:
            return original(iterator)
        if watch.to_skip and (skipped := watch.draw_skipped(lambda: original(iterator))) and iterator._num_workers:
            for _ in range(skipped % iterator._num_workers):  # each loading process reads what it would have read
                next(iterator._worker_queue_idx_cycle)
        index = original(iterator)
        watch.count_index(index)
        return index

    return next_index


def _watching_read(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def next_data(iterator: Any) -> Any:
        watch = _watch_of(iterator)
        return watch.read(original, iterator) if watch else original(iterator)

    return next_data


def _nothing() -> None: ...
