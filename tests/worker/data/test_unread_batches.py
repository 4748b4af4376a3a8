"""A resume in the middle of an epoch goes on without reading what the epoch has used, and with the bits that would have come."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import multiprocessing
import os
import random
import sys

import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from foreign_loaders import CPU, Ahead, Augmented, Noisy, Part, Shuffled, noise, seed, train
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, RandomSampler, Sampler, Subset

from kgorch.errors import CannotRestore
from kgorch.worker import rng_state
from kgorch.worker.data import dataset_changes, dataset_memory, worker_states
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.data.unread_batches import CHANGES

READS = multiprocessing.Value("q")
"""Samples that were read, in all processes; no part of a dataset, which it would change."""


def read(value):
    with READS.get_lock():
        READS.value += 1
    return value


class Counted(Noisy):
    def __getitem__(self, index):
        return read(super().__getitem__(index))


class CountedAugmented(Augmented):
    def __getitem__(self, index):
        return read(super().__getitem__(index))


class Transformed:
    """Draws from a generator of the collate_fn, of which each loading process has a copy."""

    def __init__(self):
        self.chance = np.random.default_rng(6)

    def __call__(self, samples):
        return torch.stack(samples) + self.chance.random()


def shard(**options):
    """As `accelerator.prepare` makes it: it reads one batch ahead."""
    return DataLoaderShard(Counted(), **({"batch_size": 4, "shuffle": True} | options))


def nested(data=Counted, **options):
    order = RandomSampler(data(), generator=torch.Generator().manual_seed(3))
    return DataLoader(data(), batch_sampler=Part(BatchSampler(order, 2, drop_last=True), 1), **options)


def own_generator():
    return torch.Generator().manual_seed(9)


LOADERS = {
    "shuffled": lambda: DataLoader(Counted(), 4, shuffle=True),
    "shuffled, 2 workers": lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=2),
    "shuffled, 3 workers": lambda: DataLoader(Counted(), 2, shuffle=True, num_workers=3, prefetch_factor=1),
    "own generator": lambda: DataLoader(Counted(), 4, shuffle=True, generator=own_generator()),
    "own generator, 1 worker": lambda: DataLoader(Counted(), 4, shuffle=True, generator=own_generator(), num_workers=1),
    "distributed, 2 workers": lambda: DataLoader(
        Counted(), 2, sampler=DistributedSampler(Noisy(), 2, 1), num_workers=2
    ),
    "replacement": lambda: DataLoader(
        Counted(), 4, sampler=RandomSampler(Noisy(), replacement=True, generator=own_generator())
    ),
    "single samples": lambda: DataLoader(Counted(), batch_size=None, shuffle=True),
    "nested": nested,
    "nested, 2 workers": lambda: nested(num_workers=2),
    "dataset's generators": lambda: nested(CountedAugmented),
    "dataset's generators, 2 workers": lambda: nested(CountedAugmented, num_workers=2),
    "dataset's generators, persistent": lambda: nested(CountedAugmented, num_workers=2, persistent_workers=True),
    "collate_fn's generator": lambda: DataLoader(Counted(), 4, collate_fn=Transformed(), num_workers=2),
    "persistent": lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "persistent, own generator": lambda: DataLoader(
        Counted(), 4, shuffle=True, generator=own_generator(), num_workers=2, persistent_workers=True
    ),
    "reads ahead": shard,
    "reads ahead, 2 workers": lambda: shard(num_workers=2),
    "reads ahead, persistent": lambda: shard(num_workers=2, persistent_workers=True),
    "python's generator": lambda: DataLoader(Counted(), 4, sampler=Shuffled(40)),
    "subsets": lambda: DataLoader(ConcatDataset([Subset(Counted(), range(25)), Counted()]), 4, shuffle=True),
}


def reads_of(loader, begin):
    """Samples that are read from there to the epoch's end."""
    seed(99)
    replay = LoaderFastForward(loader, 1, CPU, begin["began"], 1)
    replay.seek(begin["epoch"], begin["batch"])
    before = READS.value
    given = sum(len(batch) if batch.dim() > 1 else 1 for batch in replay)
    return READS.value - before, given


@pytest.mark.parametrize("name", LOADERS)
def test_what_follows_a_cut_is_what_would_have_followed_and_nothing_else_is_read(name, capsys):
    whole, _ = train(LOADERS[name])
    batches = len(whole) // 3
    for cut in ((0, batches - 1), (1, batches - 2), (2, batches)):
        before, left = train(LOADERS[name], cut_after=cut)
        assert left["began"]["unread"], cut
        after, _ = train(LOADERS[name], begin=left)
        assert before == whole[: len(before)]
        assert after == whole[len(before) :], cut
        read_now, given = reads_of(LOADERS[name](), left)
        # Processes that stay have to be started before the epoch, as they were: they read a few of another one.
        assert read_now == given if "kept" not in left["began"] else given <= read_now <= given + 16
    assert "not read again" in (said := capsys.readouterr().out) and "which are read again" not in said


@pytest.mark.parametrize("name", ["shuffled", "reads ahead", "dataset's generators, persistent", "shuffled, 3 workers"])
def test_sessions_that_are_cut_again_and_again_read_nothing_twice(name, capsys):
    """Also one that is cut at its first batch, before it knows anything of its own about the dataset."""
    whole, _ = train(LOADERS[name])
    batches, left, seen = len(whole) // 3, None, []
    for cut in (batches - 2, batches - 1, batches):
        before, left = train(LOADERS[name], cut_after=(1, cut), begin=left)
        seen += before
    assert seen + train(LOADERS[name], begin=left)[0] == whole
    assert capsys.readouterr().out.count("not read again") == 3


@pytest.mark.parametrize("name", ["shuffled, 2 workers", "reads ahead, 2 workers", "dataset's generators, persistent"])
def test_a_batch_that_a_step_had_not_done_comes_again_as_it_was(name, capsys):
    """Libraries take a batch, and more, before a step's boundary. (Training draws again, so a later epoch has another order.)"""
    whole, _ = train(LOADERS[name], epochs=2)
    batches = len(whole) // 2
    for back in (1, 3):
        before, left = train(LOADERS[name], cut_after=(1, batches - 1), back=back, epochs=2)
        assert left["batch"] == batches - 1 - back
        after, _ = train(LOADERS[name], begin=left, epochs=2)
        assert [batch for _, batch, _ in before[:-back] + after] == [batch for _, batch, _ in whole]
    assert "which are read again" not in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_what_one_epoch_has_shown_of_a_dataset_holds_from_the_next_one_on(workers):
    """A process of many reads too few batches in a short epoch to show it once more."""
    loader = DataLoader(Counted(), 4, shuffle=True, num_workers=workers)
    for epoch, is_known in ((0, False), (1, True)):
        replay = LoaderFastForward(loader, 1, CPU, None, 1)
        replay.seek(epoch, 0)
        given = iter(replay)
        next(given)
        assert bool(replay.place["unread"]) == is_known
        collections.deque(itertools.islice(given, 8), 0)
        assert replay.place["unread"]


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_loading_processes_that_are_no_copies_of_the_rank_keep_their_states_too(start):
    def make():
        return nested(Noisy, num_workers=2, multiprocessing_context=start)

    whole, _ = train(make, epochs=1)
    before, left = train(make, cut_after=(0, 9), epochs=1)
    assert left["began"]["unread"]
    assert before + train(make, begin=left, epochs=1)[0] == whole


class Curriculum(Counted):
    """What it gives hangs on how much it has given."""

    def __init__(self):
        self.given = 0

    def __getitem__(self, index):
        self.given += 1
        return super().__getitem__(index) + self.given


class Pool(Counted):
    """Mixes a sample with an earlier one."""

    def __init__(self):
        self.pool = []

    def __getitem__(self, index):
        self.pool.append(super().__getitem__(index))
        return self.pool[-1] + random.choice(self.pool)


class Resized:
    """A collate_fn with another size every second batch."""

    def __init__(self):
        self.calls = self.size = 0

    def __call__(self, samples):
        self.calls += 1
        if self.calls % 2 == 0:
            self.size = random.randrange(100)
        return torch.stack(samples) + self.size


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("parts", "changed"),
    [
        (lambda: {"dataset": Curriculum()}, "dataset.given"),
        (lambda: {"dataset": Pool()}, "dataset.pool"),
        (lambda: {"dataset": Counted(), "collate_fn": Resized()}, "collate_fn.calls"),
    ],
)
def test_a_data_set_that_remembers_what_it_has_read_reads_it_again(parts, changed, workers, capsys):
    def make():
        return DataLoader(batch_size=2, shuffle=True, num_workers=workers, **parts())

    whole, _ = train(make, epochs=1)
    before, left = train(make, cut_after=(0, 18), epochs=1)
    assert left["began"]["unread"] is None and left["exactness"] == f"replayed; {CHANGES.format(changed)}"
    after, _ = train(make, begin=left, epochs=1)
    if workers or isinstance(make().dataset, Curriculum):  # else training has drawn from the generator of the reads
        assert before + after == whole
    assert "has used 18 batches, which are read again" in capsys.readouterr().out


class LazyGenerator(Counted):
    """As PyTorch's pages advise: a generator for each loading process, made when it is needed."""

    def __init__(self):
        self.rng = None

    def __getitem__(self, index):
        if self.rng is None:
            worker = torch.utils.data.get_worker_info()
            self.rng = np.random.default_rng(worker.seed if worker else 4)
        return super().__getitem__(index) + self.rng.random()


class LazyOrder(Counted):
    def __init__(self):
        self.order = None

    def __getitem__(self, index):
        if self.order is None:
            self.order = np.random.permutation(40)
        return super().__getitem__(self.order[index])


class NewGenerator(Counted):
    """Another one with each sample: the one that was found is not the one that is used."""

    def __init__(self):
        self.rng = random.Random(1)

    def __getitem__(self, index):
        self.rng = random.Random(self.rng.random() + index)
        return super().__getitem__(index) + self.rng.random()


class Cycled(Counted):
    def __init__(self):
        self.offsets = itertools.cycle(range(7))

    def __getitem__(self, index):
        return super().__getitem__(index) + next(self.offsets)


class FirstValue(Counted):
    def __init__(self):
        self.first = None

    def __getitem__(self, index):
        value = super().__getitem__(index)
        self.first = value.sum() if self.first is None else self.first
        return value + self.first


class InPlace(Counted):
    def __init__(self):
        self.before = np.zeros(1)

    def __getitem__(self, index):
        value = super().__getitem__(index) + self.before[0]
        self.before[0] = index
        return value


class OfClass(Counted):
    count = 0

    def __getitem__(self, index):
        type(self).count += 1
        return super().__getitem__(index) + type(self).count


class DictPool(Counted):
    def __init__(self):
        self.pool = {}

    def __getitem__(self, index):
        self.pool[index] = super().__getitem__(index)
        return self.pool[index] + random.choice(list(self.pool.values()))


RNG = np.random.default_rng(5)


class OfModule(Counted):
    def __getitem__(self, index):
        return super().__getitem__(index) + RNG.random()


class Compose:
    """As a library's, that is not the script's own."""

    def __init__(self, parts):
        self.parts, self.drawn = parts, 0

    def __call__(self, value):
        self.drawn += 1
        for part in self.parts:
            value = part(value)
        return value


class Steps:
    def __init__(self):
        self.calls = 0

    def __call__(self, value):
        self.calls += 1
        return value + self.calls


class Composed(Counted):
    def __init__(self, *parts):
        self.transform = Compose(parts)

    def __getitem__(self, index):
        return self.transform(super().__getitem__(index))


@pytest.fixture
def of_a_library(monkeypatch):
    monkeypatch.setattr(Compose, "__module__", "augmentations")
    monkeypatch.setitem(sys.modules, "augmentations", torch)


class Defaulted(Counted):
    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index) + self.count


def jitter(value):
    return value + RNG.random()


class ByFunction(Counted):
    """Of another module of the script."""

    def __getitem__(self, index):
        return MODULE.jitter(super().__getitem__(index))


MODULE = sys.modules[__name__]


class Large(Counted):
    def __init__(self):
        self.before = np.zeros(20_000)

    def __getitem__(self, index):
        value = super().__getitem__(index) + self.before[0]
        self.before[:] = index
        return value


class Views(Counted):
    def __init__(self):
        self.views = [1000] * 1000

    def __getitem__(self, index):
        self.views[index + 100] += 1
        return super().__getitem__(index) + sum(self.views)


def collate_counting(samples, state={"n": 0}):  # noqa: B006
    state["n"] += 1
    return torch.stack(samples) + state["n"]


def collate_noting(samples):
    collate_noting.n += 1
    return torch.stack(samples) + collate_noting.n


IN_PROCESSES_ALONE = {LazyOrder, DictPool, FirstValue, NewGenerator}
"""Read again in the rank's own process they are others: the training has drawn in between, or the generator is another object."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "data",
    [
        LazyGenerator, LazyOrder, NewGenerator, Cycled, FirstValue, InPlace, OfClass, DictPool, OfModule, Defaulted, ByFunction,
        Large, Views, lambda: Composed(Steps()),
    ],
)  # fmt: skip
def test_what_a_dataset_remembers_is_seen_wherever_it_is(data, workers, monkeypatch, of_a_library):
    def make():
        monkeypatch.setattr(OfClass, "count", 0)
        monkeypatch.setitem(globals(), "RNG", np.random.default_rng(5))
        return DataLoader(data(), 2, shuffle=True, num_workers=workers)

    whole, _ = train(make, epochs=1)
    before, left = train(make, cut_after=(0, 18), epochs=1)
    assert left["began"]["unread"] is None
    after, _ = train(make, begin=left, epochs=1)
    if workers or data not in IN_PROCESSES_ALONE:
        assert before + after == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [collate_counting, collate_noting])
def test_what_a_function_remembers_is_seen(collate, workers):
    def make():
        collate_noting.n, collate_counting.__defaults__[0]["n"] = 0, 0
        return DataLoader(Counted(), 2, collate_fn=collate, num_workers=workers)

    whole, _ = train(make, epochs=1)
    before, left = train(make, cut_after=(0, 18), epochs=1)
    assert left["began"]["unread"] is None
    assert before + train(make, begin=left, epochs=1)[0] == whole


class Opened(Counted):
    """Opens a file at its first sample, and looks things up by a function that keeps what it has found."""

    def __init__(self):
        self.file, self.look_up, self.fill = None, functools.lru_cache(str), float("nan")

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(os.devnull)
        self.look_up(index)
        return super().__getitem__(index)

    def __reduce__(self):
        return Opened, ()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Opened, lambda: Composed(abs)])
def test_files_and_what_libraries_note_are_no_memory(data, workers, of_a_library):
    def make():
        return DataLoader(data(), 2, shuffle=True, num_workers=workers)

    whole, _ = train(make, epochs=1)
    before, left = train(make, cut_after=(0, 18), epochs=1)
    assert left["began"]["unread"]
    assert before + train(make, begin=left, epochs=1)[0] == whole


@pytest.mark.parametrize("look_at", [9, 15])
def test_another_pass_over_the_loader_has_loading_processes_of_its_own(look_at):
    """An evaluation on the training data, before the cut or after it."""

    def train_and_look(*, begin=None, cut=None):
        seed(7 if begin is None else 99)
        loader, seen = DataLoader(Counted(), 2, shuffle=True, num_workers=2), []
        replay = LoaderFastForward(loader, 1, CPU, begin and begin["began"], 1)
        replay.seek(0, begin["batch"] if begin else 0)
        if begin:
            rng_state.restore(begin["rng"], CPU)
        for number, batch in enumerate(replay, 1 + (begin["batch"] if begin else 0)):
            seen.append((batch.tolist(), noise()))
            if number == look_at:
                seen.append([batch.tolist() for batch in loader])
            if number == cut:
                left = {"batch": number, "rng": rng_state.capture(CPU), "began": replay.place}
                return seen, json.loads(json.dumps(left))
        return seen, None

    whole, _ = train_and_look()
    before, left = train_and_look(cut=12)
    assert left["began"]["unread"]
    assert before + train_and_look(begin=left)[0] == whole


class OfDrawnLength(Sampler):
    def __init__(self, chance):
        self.chance = chance

    def __iter__(self):
        while (number := self.chance.randrange(45)) < 40:
            yield number


class Shared(Sampler):
    """Draws each index from the generator that the dataset augments with."""

    def __init__(self, chance):
        self.chance = chance

    def __len__(self):
        return 40

    def __iter__(self):
        return (self.chance.randrange(40) for _ in range(40))


class Drawing(Counted):
    def __init__(self, chance):
        self.chance = chance

    def __getitem__(self, index):
        return super().__getitem__(index) + self.chance.random()


def test_where_reads_and_order_share_a_generator_the_epoch_is_read_again(capsys):
    def make():
        chance = random.Random(5)
        return DataLoader(Drawing(chance), 4, sampler=Shared(chance))

    whole, _ = train(make)
    before, left = train(make, cut_after=(1, 7))
    assert before + train(make, begin=left)[0] == whole
    said = capsys.readouterr().out
    assert "has used 7 batches, which are read again" in said and "not read again" not in said


def test_nor_is_such_an_epoch_taken_for_a_shorter_one():
    def make():
        chance = random.Random(5)
        return DataLoader(Drawing(chance), 1, sampler=OfDrawnLength(chance))

    whole, _ = train(make, epochs=1)
    cut = len(whole) - 1
    before, left = train(make, cut_after=(0, cut), epochs=1)
    assert before + train(make, begin=left, epochs=1)[0] == whole


def test_a_loader_with_another_number_of_loading_processes_reads_again_what_was_used(capsys):
    _, left = train(LOADERS["shuffled, 2 workers"], cut_after=(1, 8))
    for name in ("shuffled", "shuffled, 3 workers"):
        train(LOADERS[name], begin=left, cut_after=(1, 9))
    assert capsys.readouterr().out.count("which are read again") == 2


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Ahead(Counted(), 4, shuffle=True), "its __iter__ is not PyTorch's"),
        (lambda: DataLoader(Counted(), 4, num_workers=2, in_order=False), "the order hangs on time"),
        (lambda: [torch.ones(1, 1)] * 10, "no DataLoader"),
    ],
)
def test_other_loaders_read_again_what_was_used(make, why):
    _, left = train(make, cut_after=(0, 9))
    assert left["began"]["unread"] is None, why


@pytest.mark.parametrize("name", ["shuffled", "shuffled, 2 workers"])
def test_an_epoch_that_has_become_shorter_is_refused(name):
    _, left = train(LOADERS[name], cut_after=(0, 9))
    loader = LOADERS[name]()
    loader.dataset.__class__ = type("Short", (Counted,), {"__len__": lambda _: 12})
    with pytest.raises(CannotRestore, match="gave 3 batches, and the checkpoint has used 9 of epoch 0"):
        train(lambda: DataLoader(loader.dataset, 4, shuffle=True, num_workers=loader.num_workers), begin=left)


@pytest.mark.parametrize(
    "altered",
    [
        7, [], {}, {"reads": 8}, {"reads": "9"}, {"reads": 9.0}, {"processes": 7}, {"processes": [7, 7]},
        {"processes": [{}, {}]}, {"processes": [{"rng": {}, "generators": {}}] * 2},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["shuffled", "shuffled, 2 workers", "persistent"])
def test_a_place_that_kgorch_has_not_written_is_refused(name, altered):
    _, left = train(LOADERS[name], cut_after=(1, 9))
    unread = left["began"]["unread"] | altered if isinstance(altered, dict) and altered else altered
    with pytest.raises(CannotRestore):
        train(LOADERS[name], begin=left | {"began": left["began"] | {"unread": unread}})


def test_a_state_that_is_too_large_or_half_written_is_none(monkeypatch):
    states = worker_states.WorkerStates(1, 2)
    assert states.before(0, 0) is None
    states._memory[0, 0, :40] = 7
    assert states.before(0, 0) is None
    monkeypatch.setattr(worker_states, "SLOT_BYTES", 5000)
    _, left = train(LOADERS["shuffled, 2 workers"], cut_after=(0, 9))
    assert left["began"]["unread"] is None


def test_where_there_is_no_room_for_states_the_batches_are_read_again(monkeypatch):
    monkeypatch.setattr(worker_states, "MOST_BYTES", 100 << 10)
    _, left = train(LOADERS["shuffled, 2 workers"], cut_after=(0, 9))
    assert left["began"]["unread"] is None

    def full(*_):
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    assert worker_states.WorkerStates.of(2, 2, [], 0, is_known=False) is None


def test_a_dataset_that_cannot_be_looked_at_counts_as_one_that_changes(monkeypatch):
    def fails(_):
        raise RuntimeError("a tensor of another kind")

    monkeypatch.setattr(dataset_changes, "remembered_values", fails)
    changes = dataset_changes.DatasetChanges(Counted(), None)
    for _ in range(dataset_changes.BATCHES):
        changes.count_batch()
    assert (changes.is_unchanged, changes.changed) == (False, "RuntimeError at a look: a tensor of another kind")


def test_what_is_compared_has_a_bound(monkeypatch):
    monkeypatch.setattr(dataset_memory, "MOST_CONTENT_BYTES", 1 << 20)
    dataset = Counted()
    dataset.array, dataset.tensor = np.zeros(1 << 17), torch.zeros(1 << 10)
    before = dataset_memory.remembered_values(dataset)
    dataset.array[:] = 1
    assert before["loader.array"] != dataset_memory.remembered_values(dataset)["loader.array"], "all of it"
    dataset.array = np.zeros(1 << 20)
    before = dataset_memory.remembered_values(dataset)
    dataset.array[:] = 1
    assert before["loader.array"] != dataset_memory.remembered_values(dataset)["loader.array"], "a sample"
    dataset.array = np.zeros((1 << 5, 1 << 5)).T
    before = dataset_memory.remembered_values(dataset)
    dataset.array[1, 2] = 1
    assert before["loader.array"] != dataset_memory.remembered_values(dataset)["loader.array"], "in no row"
    dataset.tensor = torch.zeros(1 << 10, 1 << 10).T
    assert dataset_memory.remembered_values(dataset)["loader.tensor"] == (id(dataset.tensor), 0), "would be copied"
    dataset.steps = [[Steps() for _ in range(200)] for _ in range(200)]
    before, now = dataset_memory.remembered_values(dataset), dataset_memory.remembered_values(dataset)
    assert [path for path in now if path.startswith("more than") and before[path] != now[path]]


def test_what_changes_is_named():
    dataset = Curriculum()
    changes = dataset_changes.DatasetChanges(dataset, None)
    for number in range(dataset_changes.BATCHES):
        assert not changes.is_unchanged and not changes.changed
        dataset.given = number
        changes.count_batch()
    assert (changes.is_unchanged, changes.changed) == (False, "dataset.given")


@settings(deadline=None, max_examples=25)
@given(
    workers=st.sampled_from([0, 0, 1, 2, 3]), prefetch=st.integers(1, 4), size=st.integers(1, 5), cut=st.integers(0, 60),
    again=st.integers(0, 20), persistent=st.booleans(), ahead=st.booleans(), own=st.booleans(),
    data=st.sampled_from([Noisy, Augmented]),
)  # fmt: skip
def test_whatever_the_loader_and_the_cuts_it_is_one_training(
    workers, prefetch, size, cut, again, persistent, ahead, own, data
):
    def make():
        options = (
            {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": persistent} if workers else {}
        )
        kind = DataLoaderShard if ahead else DataLoader
        return kind(data(), batch_size=size, shuffle=True, generator=own_generator() if own else None, **options)

    whole, _ = train(make, epochs=2)
    each = len(whole) // 2
    # Of processes that stay, and have read too little to show that the dataset does not change, the states are not known.
    assume(not (persistent and workers and each < 5 * workers))
    epoch, batch = divmod(cut % len(whole), each)
    seen, left = train(make, cut_after=(epoch, batch + 1), epochs=2)
    second = min(batch + 1 + again, each)
    if second > batch + 1:
        more, left = train(make, begin=left, cut_after=(epoch, second), epochs=2)
        seen += more
    assert seen + train(make, begin=left, epochs=2)[0] == whole
