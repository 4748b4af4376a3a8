"""Loaders that are not ours, cut in the middle of an epoch: what follows is what an uninterrupted training would have seen."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import weakref

import numpy as np
import pytest
import torch
from harness import Kgorch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from orchestrator import manifest
from orchestrator.errors import CannotRestore, KgorchError
from orchestrator.worker import attach, state
from orchestrator.worker.replay import Replay

CPU = torch.device("cpu")


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
    "a list": lambda: [torch.full((4, 1), float(number)) for number in range(10)],
}


def seed(value):
    random.seed(value), np.random.seed(value), torch.manual_seed(value)


def train(make, *, cut_after=None, begin=None, epochs=3):
    """What a training sees: each batch, and its own draws from the same generators between them (dropout, say).

    `cut_after`: epoch and batches after which it is cut; `begin`: what such a one has left, as a checkpoint keeps it.
    """
    seed(7 if begin is None else 99)
    loader, seen = make(), []
    at = begin["epoch"] if begin else 0
    for epoch in range(at, epochs):
        resumed = begin if epoch == at else None
        replay = Replay(loader, 1, CPU, resumed and resumed["began"], 1)
        replay.seek(epoch, resumed["batch"] if resumed else 0)
        if resumed:
            state.set_rng_state(resumed["rng"], CPU)
        for number, batch in enumerate(replay, 1 + (resumed["batch"] if resumed else 0)):
            seen.append((epoch, batch.tolist(), noise()))
            if (epoch, number) == cut_after:
                left = {"epoch": epoch, "batch": number, "rng": state.rng_state(CPU), "began": replay.place}
                return seen, json.loads(json.dumps(left))
    return seen, None


@pytest.mark.parametrize("name", LOADERS)
def test_what_follows_a_cut_is_what_would_have_followed(name):
    whole, _ = train(LOADERS[name])
    batches = len(whole) // 3
    for cut in ((0, 3), (1, 1), (2, batches)):  # at the end of the epoch, too
        before, left = train(LOADERS[name], cut_after=cut)
        after, _ = train(LOADERS[name], begin=left)
        assert before == whole[: len(before)]
        assert after == whole[len(before) :], cut


@pytest.mark.parametrize("name", sorted(LOADERS.keys() - {"distributed, 0 workers", "stream, 0 workers", "a list"}))
def test_without_the_kept_states_it_would_be_another_training(name):
    whole, _ = train(LOADERS[name])
    before, left = train(LOADERS[name], cut_after=(1, 2))
    after, _ = train(LOADERS[name], begin=left | {"began": None})
    assert len(after) == len(whole) - len(before)
    assert after != whole[len(before) :]


def test_a_training_without_kgorch_sees_the_same():
    seed(7)
    loader, plain = LOADERS["shuffled, 2 workers"](), []
    for epoch in range(3):
        plain += [(epoch, batch.tolist(), noise()) for batch in loader]
    assert train(LOADERS["shuffled, 2 workers"])[0] == plain


def test_epochs_of_a_distributed_sampler_differ_without_set_epoch_in_the_script():
    seen, _ = train(LOADERS["distributed, 0 workers"], epochs=2)
    orders = [[sample[0] for epoch, batch, _ in seen if epoch == wanted for sample in batch] for wanted in (0, 1)]
    assert sorted(orders[0]) != orders[0] != orders[1]


def test_a_loader_that_gives_fewer_batches_than_were_used_is_refused():
    _, left = train(LOADERS["a list"], cut_after=(0, 8))
    with pytest.raises(CannotRestore, match="gave 3 batches, and the checkpoint has used 8"):
        train(lambda: [torch.ones(4)] * 3, begin=left)


@pytest.mark.parametrize(("size", "used", "twice"), [(4, 6, 0), (8, 3, 0), (5, 4, 4)])
def test_with_another_number_of_ranks_no_sample_is_passed_over_and_few_come_twice(size, used, twice):
    """Whether a rank's batches are as large as before, as large over all ranks, or neither."""

    def on_ranks(world, batch_size, *, place=None, number=None):
        seen = []
        for rank in range(world):
            loader = DataLoader(Noisy(), batch_size, sampler=DistributedSampler(Noisy(), world, rank))
            replay = Replay(loader, world, CPU, place, 2)
            replay.seek(3, 3 if place else 0)
            seen += [int(sample[0]) for batch in itertools.islice(replay, number) for sample in batch]
        return seen, replay

    before, cut = on_ranks(2, 4, number=3)
    after, resumed = on_ranks(1, size, place=cut.place)
    assert resumed.batch == used
    assert len(before) + len(after) == 40 + twice and {*before, *after} == set(range(40))


def test_loading_processes_end_with_the_loop_that_is_left_early():
    replay = Replay(DataLoader(Noisy(), 4, num_workers=2), 1, CPU, None, 1)
    gc.disable()  # a reference cycle would keep them
    try:
        given = iter(replay)
        next(given)
        assert len(multiprocessing.active_children()) == 2
        gone = weakref.ref(given)
        del given
        assert gone() is None and not multiprocessing.active_children()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("loader", "ranks_before", "said"),
    [
        (DataLoader(Noisy()), 1, "replayed"),
        (DataLoader(Noisy(), num_workers=1, persistent_workers=True), 1, "replayed; persistent_workers: exact unless"),
        (DataLoader(Noisy()), 2, "replayed; 2 ranks before, 1 now"),
        ([1, 2], 1, "replayed; a list, exact if"),
        (iter([1]), 1, "replayed; a list_iterator, exact if"),
    ],
)
def test_what_cannot_be_exact_is_said(loader, ranks_before, said):
    found = Replay(loader, 1, CPU, None, ranks_before).exactness
    assert found == said or (said != "replayed" and found.startswith(said))


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with attach(seed=1) as made:
        yield made


def test_steps_counts_any_loader_and_names_it(session):
    for _ in session.steps(DataLoader(Stream(), 16), 1):
        assert session._steps_total == 0
    assert (session._step, session._samples, session.weight) == (3, 40, 1.0)
    list(session.steps(DataLoader(Noisy(), 8), 2))
    assert (session._steps_total, session._samples) == (13, 120)
    list(session.steps(DataLoader([{"text": "a"}] * 5, 2, collate_fn=list), 1))
    assert session.exactness == {"data": "replayed", "deterministic": "not asked for"}
    list(session.steps(session.loader(Noisy(), 8), 1))
    assert session.exactness["data"] == "keyed"


def test_a_tracked_sampler_is_refused_for_it_would_skip_twice(session):
    class Remembers(RandomSampler):
        def state_dict(self):
            return {}

        def load_state_dict(self, loaded):
            pass

    sampler = Remembers(Noisy())
    session.track(order=sampler)
    with pytest.raises(KgorchError, match="leave order out of"):
        list(session.steps(DataLoader(Noisy(), 4, sampler=sampler), 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "loader", "workers"),
    [
        pytest.param(1, "shuffled", 2, marks=pytest.mark.soak),
        (2, "distributed", 0),
        pytest.param(1, "stream", 2, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_with_a_loader_of_torchs_own_ends_with_the_bits_of_an_uninterrupted_one(
    kgorch, tmp_path, ranks, loader, workers
):
    args = {"loader": loader, "workers": workers}
    (tmp_path / "alone").mkdir()
    alone = Kgorch(tmp_path / "alone", tmp_path / "alone-home")
    alone("start", str(alone.plan("borrows.py", ranks=ranks, args=args, every="600s")))

    plan = str(kgorch.plan("borrows.py", ranks=ranks, args=args | {"once": "stopped"}, every="600s"))
    kgorch("start", plan, code=10)
    at = manifest.read(kgorch.checkpoints()[-1]).position
    assert at.epoch == 1 and 7 < at.batch < 20
    kgorch("start", plan)
    assert f"has used {at.batch} batches, which are read again" in (kgorch.attempt() / "rank0.log").read_text()
    assert kgorch.status()["exactness"]["data"] == "replayed"
    assert kgorch.export() == alone.export()


@pytest.mark.parametrize("whose", ["ours", "torch"])
def test_a_loading_process_outlives_a_sigterm_that_comes_before_it_is_ready(session, monkeypatch, whose):
    """Found by the storm: torchrun's SIGTERM, which is for the rank's whole group, crashed an attempt as an epoch began."""
    seed = random.seed

    def terminated(value):  # PyTorch seeds a loading process before worker_init_fn is called
        if multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGTERM)
        seed(value)

    given = session.loader(Noisy(), 4, num_workers=2) if whose == "ours" else DataLoader(Noisy(), 4, num_workers=2)
    monkeypatch.setattr(random, "seed", terminated)
    assert len(list(session.steps(given, 1))) == 10
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
