"""What a foreign loader consists of: its random generators wherever they are, and what is told the epoch."""

from __future__ import annotations

import collections
import functools
import json
import random

import numpy as np
import pytest
import torch
from foreign_loaders import Noisy, Part, Prefetched, Shuffled
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from kgorch.errors import CannotRestore
from kgorch.worker.data import generator_states
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.data.loader_search import MOST_DEPTH, MOST_OBJECTS, parts_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("at", ["sampler", "batch sampler", "loader", "dataset", "wrapped dataset", "two paths"])
def test_each_part_is_told_the_epoch_once_by_whoever_knows_it(at):
    told = []

    class Told:
        inner = None

        def set_epoch(self, epoch):
            told.append((type(self).__name__, epoch))
            if self.inner:
                self.inner.set_epoch(epoch)

    class ToldSampler(Told, Shuffled): ...

    class ToldBatches(Told, BatchSampler): ...

    class ToldLoader(Told, DataLoader): ...

    class ToldData(Told, Noisy): ...

    sampler, data = ToldSampler(40), ToldData()
    if at == "sampler":
        loader, names = DataLoader(Noisy(), batch_sampler=Part(BatchSampler(sampler, 4, True))), ["ToldSampler"]
    elif at == "batch sampler":
        batches = ToldBatches(sampler, 4, True)
        loader, names = DataLoader(Noisy(), batch_sampler=Part(batches)), ["ToldBatches", "ToldSampler"]
        batches.inner = sampler
    elif at == "loader":
        loader, names = ToldLoader(data, 4, sampler=sampler), ["ToldLoader", "ToldSampler", "ToldData"]
        loader.inner = sampler
    elif at == "dataset":
        loader, names = Prefetched(DataLoader(data, 4)), ["ToldData"]
    elif at == "wrapped dataset":
        loader, names = (
            DataLoader(torch.utils.data.Subset(torch.utils.data.ConcatDataset([data, data]), [1]), 4),
            ["ToldData"],
        )
    else:
        data.inner = sampler
        loader, names = DataLoader(data, 4, sampler=sampler), ["ToldData", "ToldSampler"]
    replay = LoaderFastForward(loader, 1, CPU, None, 1)
    replay.seek(5, 0)
    assert sorted(told) == sorted((name, 5) for name in names)
    replay.seek(6, 0)
    assert len(told) == 2 * len(names), "nothing is left in the way of the next call"
    assert not any("set_epoch" in vars(thing) for thing in (loader, sampler, data))


def test_what_another_part_of_the_program_holds_is_not_told_the_epoch_nor_taken_for_the_loaders():
    class Trainer:
        def __init__(self):
            self.evaluation = DataLoader(Noisy(), 4, sampler=DistributedSampler(Noisy(), 2, 1))
            self.chance = np.random.default_rng(1)

        def collate(self, samples):
            return torch.stack(samples)

    trainer = Trainer()
    parts = parts_of(DataLoader(Noisy(), 4, collate_fn=trainer.collate))
    assert list(parts.generators) == ["loader.collate_fn.__self__.chance"]
    assert list(parts.loaders) == ["loader"] and not parts.with_epochs and not parts.unknown


def test_a_search_ends_where_it_should_and_says_so():
    deep = held = {}
    for _ in range(100):
        held["more"] = held = {}
    held["chance"] = random.Random(1)

    class Holds(Noisy):
        pass

    def parts(thing):
        data = Holds()
        data.thing = thing
        return parts_of(DataLoader(data, 4))

    path = "loader.dataset.thing" + "['more']" * (MOST_DEPTH - 2)
    assert parts(deep).unknown == [f"{path} lies too deep to be searched for random generators"]
    [doubt] = parts([[random.Random(1), {}] for _ in range(1000)]).unknown
    assert doubt == "only 64 items of loader.dataset.thing were searched for random generators"
    assert not parts([[number, {"name": str(number)}] for number in range(100_000)]).unknown
    many = [[{"a": [Noisy() for _ in range(16)]} for _ in range(16)] for _ in range(256)]
    assert parts(many).unknown == [f"only {MOST_OBJECTS} of its objects were searched for random generators"]
    loop = []
    loop.append(loop)
    found = parts(
        [loop, torch.randn(3), np.zeros(3), torch, random, Holds, torch.default_generator, np.random.mtrand._rand]
    )
    assert not found.generators and not found.unknown


def test_generators_are_found_wherever_a_loader_holds_them():
    class Slotted:
        __slots__ = ("chance", "empty")
        shared = np.random.RandomState(1)

    slotted, one = Slotted(), random.Random(1)
    slotted.chance = one

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self.inner[0].chance = random.Random(2)

    class Lazily(dict):
        def __getitem__(self, key):
            raise AssertionError("read")

    lazily = Lazily(a=random.Random(5))
    lazily.own = random.Random(6)

    def closed(samples, chance=None):
        return samples, one, held

    held = torch.Generator()
    data = Noisy()
    data.parts = {"a b": [slotted, (Module(), one)], 7: collections.deque([random.Random(3)]), "lazily": lazily}
    data.transform = functools.partial(closed, chance=np.random.default_rng(1))
    assert list(parts_of(DataLoader(data, 4, collate_fn=closed)).generators) == [
        "loader.collate_fn.held",
        "loader.collate_fn.one",
        "loader.dataset.parts[7][0]",
        "loader.dataset.parts['lazily']['a']",
        "loader.dataset.parts['lazily'].own",
        "loader.dataset.transform.keywords['chance']",
        "loader.dataset.parts['a b'][0].shared",
        "loader.dataset.parts['a b'][1][0].inner.0.chance",
    ]


@pytest.mark.parametrize("make", [
    lambda: random.Random(3), lambda: torch.Generator().manual_seed(3), lambda: np.random.RandomState(3),
    *(lambda kind=kind: np.random.Generator(kind(3)) for kind in
      (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937)),
    lambda: np.random.SFC64(3), lambda: np.random.RandomState(np.random.PCG64(3)),
])  # fmt: skip
def test_a_generator_goes_on_where_it_stood_and_takes_no_state_that_is_none(make):
    def draw(generator):
        if isinstance(generator, torch.Generator):
            return torch.rand(5, generator=generator).tolist()
        if isinstance(generator, np.random.BitGenerator):
            return generator.random_raw(5).tolist()
        return [getattr(generator, "gauss", getattr(generator, "normal", None))(0, 1) for _ in range(5)]

    generator = make()
    draw(generator)
    kept = json.loads(json.dumps(generator_states.state_of(generator)))
    expected = draw(generator)
    generator_states.set_state(generator, kept)
    assert draw(generator) == expected
    generator_states.set_state(generator, kept)
    for altered in ({}, 7, None, "a", [], {"$bytes": ""}, *_altered(kept)):
        try:
            generator_states.set_state(generator, altered)
        except CannotRestore:
            assert generator_states.state_of(generator) == kept
        else:
            draw(generator)  # another state, and a whole one
            generator_states.set_state(generator, kept)


def _altered(kept):
    """The same with one number or table out of its range or form."""
    if isinstance(kept, dict):
        for key, value in kept.items():
            yield {name: item for name, item in kept.items() if name != key}
            yield from (kept | {key: other} for other in _altered(value))
    elif isinstance(kept, list):
        yield kept[:-1]
        yield from ([*kept[:at], other, *kept[at + 1 :]] for at in {0, len(kept) - 1} for other in _altered(kept[at]))
    elif isinstance(kept, int):
        yield from (-1, 625, 1 << 40, 1 << 130, 0.5, None)
    elif isinstance(kept, str):
        yield from ("", kept[:-4], "MT19937", "PCG64", 7)
