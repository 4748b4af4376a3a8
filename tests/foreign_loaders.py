"""Loaders of shapes that programs use: nested samplers, batches read ahead, random generators anywhere."""

from __future__ import annotations

import functools
import json
import queue
import random
import threading

import numpy as np
import torch
from programs.nested_loader import Ahead, Part
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from kgorch.worker import rng_state
from kgorch.worker.data.loader_fast_forward import LoaderFastForward


def noise() -> list[float]:
    """From every generator of the process, none of them keyed by anything."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Noisy(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index, *noise()], dtype=torch.float64)


class Stream(IterableDataset):
    """Shared out among the loading processes; its length is not known."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, 40, worker.num_workers if worker else 1):
            yield torch.tensor([index, *noise()], dtype=torch.float64)


def of_torch(**options):
    return lambda: DataLoader(Noisy(), **({"batch_size": 4} | options))


def own_generator(workers):
    def make():
        generator = torch.Generator().manual_seed(9)
        return DataLoader(Noisy(), 4, shuffle=True, generator=generator, num_workers=workers)

    return make


class Prefetched:
    """No DataLoader, holds one: it reads ahead, and adds noise of its own to what it has read."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    @property
    def sampler(self):
        return self.loader.sampler

    def __iter__(self):
        held = None
        for batch in self.loader:
            batch = batch + torch.rand(())
            if held is not None:
                yield held
            held = batch
        if held is not None:
            yield held


class Zipped:
    """Of two loaders at once."""

    def __init__(self, *loaders):
        self.loaders = {str(number): loader for number, loader in enumerate(loaders)}

    def __iter__(self):
        for parts in zip(*self.loaders.values(), strict=True):
            yield torch.cat(parts)


class Regrouped:
    """Large batches, each given in two halves."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield from batch.chunk(2)


class Shuffled(Sampler):
    """Of a generator of its own."""

    def __init__(self, size, chance=None):
        self.indices, self.chance = list(range(size)), chance or random.Random(3)

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        order = list(self.indices)
        self.chance.shuffle(order)
        return iter(order)


class Augmented(Noisy):
    """Draws from generators of its own: NumPy's old and new ones, Python's, and one below a transform."""

    def __init__(self):
        self.numpy, self.old, self.chance = np.random.default_rng(4), np.random.RandomState(4), random.Random(4)
        self.transforms = [functools.partial(self.shift, torch.Generator().manual_seed(4))]

    @staticmethod
    def shift(generator, values):
        return values + torch.rand(1, generator=generator)

    def __getitem__(self, index):
        more = [self.numpy.normal(), self.old.normal(), self.chance.gauss(0, 1)]
        while random.random() < 0.3:  # as often as the process's own generator says, which training draws from
            more[0] += self.numpy.random()
        return self.transforms[0](torch.tensor([index, *noise(), *more], dtype=torch.float64))


def nested(rank=0, loader=DataLoader, data=Noisy, **options):
    def make():
        order = RandomSampler(data(), generator=torch.Generator().manual_seed(3))
        return loader(data(), batch_sampler=Part(BatchSampler(order, 4, drop_last=True), rank), **options)

    return make


class InThread(DataLoader):
    def __iter__(self):
        iterator, held = super().__iter__(), queue.Queue(2)
        threading.Thread(target=lambda: [*map(held.put, iterator), held.put(None)], daemon=True).start()
        return iter(held.get, None)


class Unseen(DataLoader):
    """Reads by itself."""

    def __iter__(self):
        return (torch.stack([self.dataset[index] for index in batch]) for batch in self.batch_sampler)


def ahead_by(by):
    return type("Ahead", (Ahead,), {"by": by})


def batch_sampled():
    sampler = RandomSampler(Noisy(), replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 4, drop_last=True), num_workers=2)


LOADERS = {
    "shuffled, 0 workers": of_torch(shuffle=True),
    "shuffled, 2 workers": of_torch(shuffle=True, num_workers=2),
    "distributed, 0 workers": of_torch(sampler=DistributedSampler(Noisy(), 2, 1)),
    "distributed, 2 workers": of_torch(sampler=DistributedSampler(Noisy(), 2, 1), num_workers=2),
    "weighted": of_torch(sampler=WeightedRandomSampler([1.0] * 40, 40)),
    "own generator, 0 workers": own_generator(0),
    "own generator, 2 workers": own_generator(2),
    "batch sampler": batch_sampled,
    "stream, 0 workers": lambda: DataLoader(Stream(), 4),
    "stream, 2 workers": lambda: DataLoader(Stream(), 3, num_workers=2),
    "nested, rank 0": nested(0),
    "nested, rank 1, 2 workers": nested(1, num_workers=2),
    "nested, reads ahead": nested(1, Ahead),
    "nested, reads ahead, 2 workers": nested(1, Ahead, num_workers=2),
    "reads two ahead": lambda: ahead_by(2)(Noisy(), 4, shuffle=True),
    "stream, reads ahead": lambda: Ahead(Stream(), 4),
    "wrapped, reads ahead": lambda: Prefetched(DataLoader(Noisy(), 4, shuffle=True)),
    "wrapped, reads ahead, 2 workers": lambda: Prefetched(nested(num_workers=2)()),
    "two at once": lambda: Zipped(nested(1)(), nested(loader=Ahead)()),
    "halves": lambda: Regrouped(Ahead(Noisy(), 8, shuffle=True)),
    "python's generator": lambda: DataLoader(Noisy(), 4, sampler=Shuffled(40)),
    "numpy's generator, nested": lambda: DataLoader(
        Noisy(), batch_sampler=Part(BatchSampler(Shuffled(40, np.random.default_rng(3)), 4, True))
    ),
    "dataset's generators": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "dataset's generators, reads ahead": nested(loader=Ahead, data=Augmented),
    "a list": lambda: [torch.full((4, 1), float(number)) for number in range(10)],
}

CPU = torch.device("cpu")


def seed(value):
    random.seed(value), np.random.seed(value), torch.manual_seed(value)


def train(make, *, cut_after=None, begin=None, epochs=3, lost="", back=0):
    """What a training sees: each batch, and its own draws from the same generators between them (dropout, say).

    `cut_after`: epoch and batches after which it is cut; `begin`: what such a one has left, as a checkpoint keeps it. `lost`: of
    what could not be brought back. `back`: of the newest batches that a checkpoint counts as not used.
    """
    seed(7 if begin is None else 99)
    loader, seen = make(), []
    at = begin["epoch"] if begin else 0
    for epoch in range(at, epochs):
        resumed = begin if epoch == at else None
        replay = LoaderFastForward(loader, 1, CPU, resumed and resumed["began"], 1, gives_back=bool(back))
        replay.give_back(back)
        replay.seek(epoch, resumed["batch"] if resumed else 0)
        if resumed:
            rng_state.restore(resumed["rng"], CPU)
        for number, batch in enumerate(replay, 1 + (resumed["batch"] if resumed else 0)):
            seen.append((epoch, batch.tolist(), noise()))
            if (epoch, number) == cut_after:
                left = {"epoch": epoch, "batch": number - back, "rng": rng_state.capture(CPU), "began": replay.place}
                return seen, json.loads(json.dumps(left | {"exactness": replay.exactness}))
        assert lost in replay.lost if lost and resumed else replay.lost == ""
    return seen, None
