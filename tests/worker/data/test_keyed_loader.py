"""`session.loader`: whoever draws random numbers, and in whatever process, a resume in mid-epoch has the same batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from foreign_loaders import Noisy, noise

from kgorch.worker import attach
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.ranks.virtual_ranks import ranks_of

GENERATORS = {
    "numpy": np.random.default_rng,
    "numpy's old one": lambda number: np.random.RandomState(np.random.PCG64(number)),
    "python": random.Random,
    "torch": lambda number: torch.Generator().manual_seed(number),
}


def draw(generator) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    return generator.gauss(0, 1) if isinstance(generator, random.Random) else float(generator.normal())


class Holds(torch.utils.data.Dataset):
    """Draws from generators of its own, of which one is made when a sample is first read."""

    def __init__(self, make):
        self.make, self.of_transform, self.late = make, {"flip": make(1)}, None

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.late = self.late or self.make(1)
        return torch.tensor([index, draw(self.of_transform["flip"]), draw(self.late)], dtype=torch.float64)


class Mixed:
    """A collate_fn that draws, from the libraries' generators and from one of its own."""

    def __init__(self, make=None):
        self.own = make and make(3)

    def __call__(self, samples):
        drawn = [*noise(), draw(self.own) if self.own else 0.0]
        return torch.stack([torch.cat([sample, torch.tensor(drawn, dtype=torch.float64)]) for sample in samples])


def read(dataset, epoch=1, batch=0, global_batch=8, **options):
    loader = Loader(dataset, global_batch, ranks=lambda: ranks_of(1, 0, 1), seed=4, **options)
    loader.seek(epoch, batch)
    return [part.tolist() for part in loader]


@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_is_collated_alike_after_a_resume_and_by_any_number_of_workers(workers, is_random):
    data = Noisy() if is_random else torch.utils.data.Subset(torch.eye(40, dtype=torch.float64), range(40))
    whole = read(data, collate_fn=Mixed(), is_random=is_random)
    assert read(data, batch=3, collate_fn=Mixed(), is_random=is_random, num_workers=workers) == whole[3:]
    assert len({tuple(batch[0][-4:-1]) for batch in whole}) == 5


def test_collating_leaves_the_trainings_own_chance_alone_and_the_samples_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = noise()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    mixed = read(Noisy(), collate_fn=Mixed(np.random.default_rng))
    assert noise() == expected
    assert [[sample[:4] for sample in batch] for batch in mixed] == read(Noisy())
    assert read(Noisy(), epoch=2, batch=3)[0][0][1:] == [0.105766544755728, 0.442031721733568, 0.16012001037597656]


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("workers", [0, 2])
def test_generators_that_dataset_and_collate_fn_hold_are_seeded_too(kind, workers):
    make = GENERATORS[kind]
    data, mixed = Holds(make), Mixed(make)
    shared = make(7)
    data.shared = mixed.shared = shared
    whole = read(data, collate_fn=mixed)
    again = Holds(make), Mixed(make)
    again[0].shared = again[1].shared = make(99)
    assert read(again[0], batch=3, collate_fn=again[1], num_workers=workers) == whole[3:]
    assert draw(shared) == draw(make(7)), "the training may draw from it, too"
    assert all(one != other for batch in whole for _, one, other, *_ in batch), "each has numbers of its own"


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with attach(seed=1) as made:
        yield made


def test_what_cannot_be_seeded_is_said(session):
    data = Noisy()
    list(session.steps(session.loader(data, 8, collate_fn=Mixed(np.random.default_rng)), 1))
    assert session.exactness["data"] == "keyed"
    data.secret = random.SystemRandom()
    list(session.steps(session.loader(data, 8), 1))
    assert session.exactness["data"].startswith("keyed; loader.dataset.secret: the state of a SystemRandom")
    still = torch.utils.data.TensorDataset(torch.arange(40))
    still.rng = random.Random(1)
    list(session.steps(session.loader(still, 8, is_random=False), 1))
    said = "keyed; loader.dataset.rng is not seeded because of is_random=False: exact if nothing is drawn from it"
    assert session.exactness["data"] == said
