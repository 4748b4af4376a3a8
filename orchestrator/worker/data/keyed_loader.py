"""A DataLoader whose order does not depend on the machine.

The samples of global batch b of epoch e are a function of (seed, e, b) alone; each rank takes its slice, whatever the number of
ranks. Before a sample is read, the random generators of the reading process are seeded from (seed, epoch, sample). So augmentations
are the same with any number of ranks and workers, before and after a resume. Before a `collate_fn` of the script is called they are
seeded from (seed, epoch, first sample): it computes the same wherever the batch has the same samples, so with the same number of
ranks. A resume starts at a batch by its number, and reads nothing in vain.

Generators that dataset or collate_fn hold are seeded in the same way, each with a number of its own, those that are made later than
with the first batch of a process excepted.

The seeding takes some 15 µs a sample: nothing beside a picture, a seventh of the step of a small network on windows of prices.
Hence `is_random=False` for a dataset that draws nothing, which also lets its `__getitems__` read a batch at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker import rng_state
from kgorch.worker.data import generator_states
from kgorch.worker.data.loader_search import parts_of, plain_values
from kgorch.worker.data.worker_states import WorkerStates
from kgorch.worker.ranks.virtual_ranks import VirtualRanks

Key = tuple[int, int]  # epoch, index of the sample

MOST_NAMED = 3
"""Limit of sentences about what cannot be seeded, because they are part of every status."""


class SampleOrder:
    """The samples of each global batch, and their division between the ranks.

    Also the batch sampler of a DataLoader: it yields, of each global batch, one slice for each rank that this process plays.

    Attributes:
        epoch, used: where the next iteration starts: after so many samples of that epoch.
        shift: samples by which the epoch's batches begin later than they would: another global batch was in force when it began.
        size: samples of the dataset.
        batches: global batches of an epoch.
        global_batch: samples of a global batch.
        ranks: returns the virtual ranks that this process plays.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        *,
        ranks: Callable[[], VirtualRanks],
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        self.global_batch, self.epoch, self.used, self.shift = global_batch, 0, 0, 0
        self.size, self.ranks, self._seed = size, ranks, seed
        self.shuffle, self._drop_last = shuffle, drop_last
        self.batches = self._batches_of(size)

    def _batches_of(self, samples: int) -> int:
        return samples // self.global_batch if self._drop_last else -(-samples // self.global_batch)

    @property
    def batch(self) -> int:
        """Number of the next iteration's first batch. The batches that are left of an epoch keep the last numbers."""
        return self.batches - self._batches_of(max(0, self.size - self.used))

    def start_after(self, used: int) -> None:
        """Start after so many samples of the epoch."""
        self.used = min(used, self.size)
        self.shift = self.used - self.batch * self.global_batch

    def samples_before(self, batch: int) -> int:
        """Samples of the epoch before a global batch."""
        return min(self.size, self.shift + batch * self.global_batch)

    def samples_in(self, batch: int) -> int:
        """Samples of a global batch; only the last one may be smaller than `global_batch`."""
        return self.samples_before(batch + 1) - self.samples_before(batch)

    def slice_of(self, samples: int, rank: int) -> tuple[int, int]:
        """A rank's part of a global batch with so many samples: start and end."""
        count = self.ranks().count
        return rank * samples // count, (rank + 1) * samples // count

    def __len__(self) -> int:
        return (self.batches - self.batch) * len(self.ranks().mine)

    def __iter__(self) -> Iterator[list[Key]]:
        return self._slices(self.epoch, self.used)

    def _slices(self, epoch: int, used: int) -> Iterator[list[Key]]:
        order = torch.arange(self.size)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mixed(self._seed, epoch, -1))
            order = torch.randperm(self.size, generator=generator)
        for batch in range(self._batches_of(max(0, self.size - used))):
            samples = order[used + batch * self.global_batch :][: self.global_batch].tolist()
            for rank in self.ranks().mine:
                first, end = self.slice_of(len(samples), rank)
                # An empty slice gets a sample with weight 0: every rank has to take part in the step's collectives.
                yield [(epoch, index) for index in (samples[first:end] or samples[:1])]


class Loader:
    """Iterates over this process's slices of the global batches.

    `seek` says where the next iteration starts. Each further one gives all batches, in the order of epoch 0: whatever reads the
    training set besides its steps reads the same in every session.

    Args:
        most: limit of global batches of an iteration; `len` counts all. 0: an iteration ends the script, because its evaluation or
            prediction is not to be computed (probe/estimate_probe.py).
        is_random: see Session.loader.

    Attributes:
        global_batch: samples of one optimizer step, over all ranks.
        durations_s: seconds of each batch of the newest limited iteration, its processing by the script included.

    Raises:
        KgorchError: the dataset has no length, or has too few samples.
    """

    def __init__(
        self, dataset: Dataset[Any], global_batch: int, *, ranks: Callable[[], VirtualRanks], seed: int,
        shuffle: bool = True, drop_last: bool = True, most: int | None = None, is_random: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise KgorchError(
                f"session.loader() needs a dataset with a length and an index, found {type(dataset).__name__}"
            )
        if global_batch < ranks().count:
            raise KgorchError(
                f"a global batch of {global_batch} cannot be split over {ranks().count} ranks",
                next_step="raise global_batch, or lower the stage's ranks",
            )
        size = len(dataset)
        self.global_batch, self._most = global_batch, most
        self.durations_s: list[float] = []
        self._order = SampleOrder(size, global_batch, ranks=ranks, seed=seed, shuffle=shuffle, drop_last=drop_last)
        if len(self) == 0:
            raise KgorchError(
                f"the dataset has {size} samples: not one global batch of {global_batch}",
                next_step="lower global_batch, or give drop_last=False",
            )
        if options.get("num_workers", 0):
            options.setdefault("persistent_workers", True)  # starting them takes seconds at every epoch
        options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
        options.setdefault("pin_memory", torch.cuda.is_available())  # copies to the device do not block then
        generator = torch.Generator().manual_seed(seed)  # otherwise a DataLoader draws from the global one
        self._keyed = (_Keyed if is_random else _Unseeded)(dataset, seed, options.pop("collate_fn", None))
        if self._keyed.collate:
            options["collate_fn"] = _as_it_is
        self._inner = DataLoader(self._keyed, batch_sampler=self._order, generator=generator, **options)
        self._copied: dict[str, Any] = {}  # what the dataset of loading processes that stay was

    def __len__(self) -> int:
        """Global batches of an epoch."""
        return self._order.batches

    @property
    def size(self) -> int:
        """Samples of the dataset."""
        return self._order.size

    @property
    def ranks(self) -> VirtualRanks:
        """Those whose samples this process reads."""
        return self._order.ranks()

    @property
    def exactness(self) -> str:
        """How exact a resume is, as far as it can be known from outside, in words."""
        self._keyed.search_once()
        return "; ".join(["keyed", *self._keyed.doubts[:MOST_NAMED]])

    def sample_s(self, within_s: float = 2.0) -> float:
        """Mean seconds that this process takes to read a sample: of those that it reads within the time, at most eight."""
        began_s, count = time.monotonic(), 0
        while count < min(8, self.size) and (count < 1 or time.monotonic() - began_s < within_s):
            self._keyed[(0, count)]
            count += 1
        return (time.monotonic() - began_s) / count

    def samples_in(self, batch: int) -> int:
        """Samples of global batch `batch`, over all ranks; only the last one of an epoch may be smaller."""
        return self._order.samples_in(batch)

    def share_of(self, number: int) -> int:
        """Samples that count in the `number`-th batch of this process in an epoch.

        0 where the last global batch has fewer samples than there are ranks: then the rank gets a sample with weight 0.
        """
        mine = self._order.ranks().mine
        return self.share_of_rank(number // len(mine), mine[number % len(mine)])

    def share_of_rank(self, batch: int, rank: int) -> int:
        """Samples that count in a rank's slice of a global batch."""
        first, end = self._order.slice_of(self.samples_in(batch), rank)
        return end - first

    def seek(self, epoch: int, batch: int) -> None:
        """Start the next iteration there."""
        self._order.epoch, self._order.used, self._order.shift = epoch, batch * self.global_batch, 0

    @property
    def batch(self) -> int:
        """The global batch at which the next iteration starts."""
        return self._order.batch

    def place(self, batch: int) -> dict[str, int]:
        """The position before a global batch of the running epoch, for a checkpoint."""
        order = self._order
        return {"size": order.size, "global_batch": order.global_batch, "used": order.samples_before(batch)}

    def resume(self, saved: Any) -> str:
        """After `seek`: start after the samples that the saved epoch had used, whatever the sizes of then and now.

        Args:
            saved: its `place`; None between two epochs, and in a checkpoint of an earlier version.

        Returns: what is not as it was, in words.

        Raises:
            CannotRestore: `saved` is no such thing.
        """
        order = self._order
        if saved is None:
            used = order.used // order.global_batch
            if used <= order.batches:
                return ""
            return (
                f"epoch {order.epoch}: it has used {used} batches, and there are {order.batches} of {order.global_batch} now:"
                " none is left"
            )
        try:
            size, global_batch, used = (saved[name] for name in ("size", "global_batch", "used"))
            if any(type(number) is not int or not 0 < number < 1 << 63 for number in (size, global_batch, used)):
                raise ValueError(str(saved)[:300])
        except (KeyError, TypeError, ValueError) as error:
            raise CannotRestore("the checkpoint's place in a loader cannot be read", repr(error)) from None
        order.start_after(used)
        changes = []
        if global_batch != order.global_batch:
            changes.append(f"the global batch was {global_batch} and is {order.global_batch}")
        if size != order.size:
            changes.append(f"the dataset had {size} samples and has {order.size}")
        if not changes:
            return ""
        lost = f"epoch {order.epoch}: {', '.join(changes)}; it goes on after the {used} samples that it has used"
        if order.batch == order.batches:
            lost += "; none is left"
        elif size != order.size and order.shuffle:
            lost += "; in its order, which is another one, some samples come twice and others never"
        return lost

    def __iter__(self) -> Iterator[Any]:
        """This process's batches up to the end of the epoch: for each step one for each rank that it plays."""
        if self._most == 0:
            raise SystemExit(0)
        return self._all() if self._most is None else self._few(self._most * len(self._order.ranks().mine))

    def _few(self, most: int) -> Iterator[Any]:
        """A limited iteration, whose batches are timed."""
        self.durations_s.clear()
        began_s = time.monotonic()
        for batch in itertools.islice(self._all(), most):
            yield batch
            before_s, began_s = began_s, time.monotonic()
            self.durations_s.append(began_s - before_s)

    def _all(self) -> Iterator[Any]:
        self._keyed.search_once()  # before loading processes get copies
        if self._inner.persistent_workers and (now := self._keyed.plain_values()) != self._copied:
            self._inner._iterator, self._copied = None, now  # the processes have copies from before a change
        batches = start_iterator(self._inner) if len(self._order) else iter(())
        self._order.epoch = self._order.used = 0
        return batches

    def parts(self) -> Iterator[list[Any]]:
        """The batches up to the end of the epoch, those of one step together."""
        played, batches = len(self._order.ranks().mine), self._all()
        while part := list(itertools.islice(batches, played)):
            yield part
        self._order.shift = 0


class _Keyed(Dataset[Any]):
    """The script's dataset, with the random generators seeded for each sample that is read, and for each batch that is collated.

    Args:
        collate: the script's collate_fn, if any: PyTorch's own draws nothing.

    Attributes:
        doubts: sentences about what may draw and is not seeded.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._seed, self.collate = dataset, seed, collate
        self._held: dict[str, Any] | None = None  # generators that dataset and collate_fn hold, by path
        self._has_read = False  # in this process
        self.doubts: list[str] = []

    def search_once(self) -> None:
        """Search for generators, unless that was done."""
        if self._held is None:
            self._search()

    def plain_values(self) -> dict[str, Any]:
        """By what a change of the script's dataset or collate_fn between two epochs is told."""
        return plain_values(SimpleNamespace(dataset=self._dataset, collate_fn=self.collate))

    def _search(self) -> dict[str, Any]:
        parts = parts_of(SimpleNamespace(dataset=self._dataset, collate_fn=self.collate))
        self._held, self.doubts = {}, list(parts.unknown)
        for path, generator in parts.generators.items():
            if isinstance(generator, torch.Generator) and generator.device.type != "cpu":  # not in loading processes
                self.doubts.append(f"{path} is not seeded, because it is one of {generator.device.type}")
            elif why := self._why_left_alone(path):
                self.doubts.append(f"{path} is not seeded{why}")
            else:
                self._held[path] = generator
        return self._held

    def _why_left_alone(self, path: str) -> str:
        return ""

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        batch = self._read(keys, self.collate)
        if not self._has_read:
            known, self._has_read = self._held or {}, True
            found = self._search()
            if any(known.get(path) is not item for path, item in found.items()):  # made just now, and not seeded yet
                batch = self._read(keys, self.collate)
        return batch

    def __getitem__(self, key: Key) -> Any:
        return self._read([key], None)[0]

    def _read(self, keys: Sequence[Key], collate: Callable[[list[Any]], Any] | None) -> Any:
        with self._keeping_generators():
            samples = [self._sample(epoch, index) for epoch, index in keys]
            return samples if collate is None else self._collated(samples, keys[0])

    @contextlib.contextmanager
    def _keeping_generators(self) -> Iterator[None]:
        """A context after which they are as before it: without loading workers the model uses the same ones."""
        generators, held = rng_state.host_generators(), list(self._held.values()) if self._held else ()
        saved, states = generators.save(), [generator_states.quick_state_of(item) for item in held]
        try:
            yield
        finally:
            generators.restore(saved)
            for item, state in zip(held, states, strict=True):
                generator_states.put_back(item, state)

    def _sample(self, epoch: int, index: int) -> Any:
        self._seed_all(epoch, index)
        return self._dataset[index]

    def _collated(self, samples: list[Any], first: Key) -> Any:
        assert self.collate
        epoch, index = first
        self._seed_all(epoch, -2 - index)  # -1 is the order's
        return self.collate(samples)

    def _seed_all(self, epoch: int, number: int) -> None:
        seed = _mixed(self._seed, epoch, number)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed & 0xFFFFFFFF)
        for path, generator in self._held.items() if self._held else ():
            generator_states.seed(generator, _mixed(seed, zlib.crc32(path.encode()), 1))


class _Unseeded(_Keyed):
    """The script's dataset, which is said to draw no random numbers. That is checked: two more reads of the states a batch."""

    def _read(self, keys: Sequence[Key], collate: Callable[[list[Any]], Any] | None) -> Any:
        generators = rng_state.host_generators()
        indices, before = [index for _, index in keys], generators.save()
        read_batch = getattr(self._dataset, "__getitems__", None)
        samples: list[Any] = read_batch(indices) if read_batch else [self._dataset[index] for index in indices]
        if not _are_equal(before, generators.save()):
            raise KgorchError(
                f"{type(self._dataset).__name__} draws random numbers, and session.loader() was given is_random=False",
                next_step="leave is_random out: the samples then stay the same on any number of ranks and after a resume",
            )
        if collate is None:
            return samples
        with self._keeping_generators():
            return self._collated(samples, keys[0])

    def _why_left_alone(self, path: str) -> str:
        is_of_data = path.startswith("loader.dataset")
        return " because of is_random=False: exact if nothing is drawn from it" if is_of_data else ""


def _as_it_is(batch: Any) -> Any:
    """The collate_fn of a DataLoader whose dataset gives batches that are collated."""
    return batch


def _are_equal(before: rng_state.SavedStates, after: rng_state.SavedStates) -> bool:
    if before[0] != after[0] or not torch.equal(before[1], after[1]):
        return False
    # None before: the dataset has just imported NumPy. It is compared from the next batch on.
    return before[2] is None or before[2][1:] == after[2][1:]


class WorkerInit:
    """worker_init_fn of loading processes: they die with the rank, and survive the SIGTERM that torchrun sends to its whole group.

    The rank saves first, and needs its data for that long. A SIGTERM from the rank itself ends the process, as PyTorch and
    multiprocessing expect. Only waiting for the signal shows its sender, hence the thread.

    Args:
        then: the script's own worker_init_fn.

    Attributes:
        states: where the processes that start now keep their random states; None where nobody asks for them.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self.states: WorkerStates | None = None
        self._rank_pid = os.getpid()  # under "forkserver" it is not the parent of a loading process

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_at_sigterm_of, args=(self._rank_pid,), daemon=True).start()
        if self._then:
            self._then(worker)
        if self.states:
            self.states.follow_reads()


@contextlib.contextmanager
def keeping_states(loader: Any, states: WorkerStates | None) -> Iterator[None]:
    """A context in which loading processes that start keep their random states there. Others of the same loader do not."""
    init = getattr(loader, "worker_init_fn", None)
    if states is None or not isinstance(init, WorkerInit):
        yield
        return
    init.states = states
    try:
        yield
    finally:
        init.states = None


def start_iterator(loader: Iterable[Any]) -> Iterator[Any]:
    """`iter(loader)`, with SIGTERM blocked in the processes that it starts."""
    with without_sigterm(loader):
        return iter(loader)


@contextlib.contextmanager
def without_sigterm(loader: Any) -> Iterator[None]:
    """A context that blocks SIGTERM in the loading processes that start in it, until WorkerInit has set them up."""
    if not isinstance(getattr(loader, "worker_init_fn", None), WorkerInit):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_at_sigterm_of(pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)


def _mixed(seed: int, epoch: int, index: int) -> int:
    """A 63-bit seed that differs in every bit between neighbours (splitmix64's finisher)."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + index * 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1
