"""Nested samplers and a loader that reads ahead, of the shapes that Accelerate gives a DataLoader on several ranks."""

import itertools

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Part(BatchSampler):
    """A rank's share of another sampler's batches."""

    def __init__(self, batch_sampler, rank: int = 0, ranks: int = 2) -> None:
        self.batch_sampler, self.rank, self.ranks = batch_sampler, rank, ranks

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.ranks

    def __iter__(self):
        for number, batch in enumerate(self.batch_sampler):
            if number % self.ranks == self.rank:
                yield batch


class Ahead(DataLoader):
    """Reads `by` batches ahead: by one it knows which is the last. It begins when the first is asked for."""

    by = 1

    def __iter__(self):
        iterator = super().__iter__()
        held = list(itertools.islice(iterator, self.by))
        for batch in iterator:
            held.append(batch)
            yield held.pop(0)
        yield from held


def nested_loader(data: Dataset, batch_size: int, *, rank: int, ranks: int, workers: int) -> Ahead:
    """Shuffled by a generator that lies at `batch_sampler.batch_sampler.sampler.generator`, the same on every rank."""
    order = RandomSampler(data, generator=torch.Generator().manual_seed(7))
    return Ahead(data, batch_sampler=Part(BatchSampler(order, batch_size, True), rank, ranks), num_workers=workers)
