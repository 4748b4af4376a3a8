"""`session.loader`: whoever draws random numbers, and in whatever process, a resume in mid-epoch has the same batches."""

from __future__ import annotations

import functools
import itertools
import json
import random

import numpy as np
import pytest
import torch
from foreign_loaders import Noisy, noise

from kgorch.checkpoint.folder import read_checkpoint
from kgorch.checkpoint.manifest import Position
from kgorch.errors import CannotRestore
from kgorch.worker import attach
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.ranks.virtual_ranks import ranks_of
from kgorch.worker.restore import ResumePoint

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


class OwnRng(torch.utils.data.Dataset):
    """Draws from a generator that each process may replace by its own."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index, self.rng.normal()], dtype=torch.float64)


class RemadeRng(OwnRng):
    """Does not send its generator to another process, which makes its own."""

    def __setstate__(self, state):
        self.__dict__ = state | {"rng": np.random.default_rng()}


def replace_rng(worker):
    torch.utils.data.get_worker_info().dataset._dataset.rng = np.random.default_rng(100 + worker)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OwnRng, {"worker_init_fn": replace_rng}),
        (RemadeRng, {"multiprocessing_context": "spawn"}),
    ],
)
def test_a_generator_that_a_loading_process_replaces_by_another_is_seeded_from_its_first_batch_on(kind, options):
    whole = read(kind())
    assert read(kind(), num_workers=2, **options) == whole
    assert read(kind(), batch=2, num_workers=2, **options) == whole[2:]


class Resized(torch.utils.data.Dataset):
    """A script changes it between two epochs."""

    def __init__(self):
        self.size, self.transform, self.table, self.names = 1, None, torch.zeros(2), [0] * 1000

    def __len__(self):
        return 16

    def __getitem__(self, index):
        scale = self.transform.keywords["scale"] if self.transform else 1
        return index * self.size * scale + self.table[0] + len(self.names) + self.names[-1]


def change_size(data, collate):
    data.size += 1


def change_transform(data, collate):
    data.transform = functools.partial(min, scale=5 if data.transform is None else data.transform.keywords["scale"] + 1)


def change_table(data, collate):
    data.table += 1


def change_names(data, collate):
    data.names = data.names[:-1] + [data.names[-1] + 1]


def change_length(data, collate):
    data.names = data.names[1:]


def change_collate(data, collate):
    collate.scale += 1


class Scaled:
    """A collate_fn with an attribute."""

    scale = 1

    def __call__(self, samples):
        return torch.stack(samples) * self.scale


@pytest.mark.parametrize(
    "change", [change_size, change_transform, change_table, change_names, change_length, change_collate]
)
def test_a_change_between_two_epochs_reaches_loading_processes_that_stay(change):
    """They kept the dataset of the first epoch, and those of a resume had another one."""
    read = []
    for workers in (0, 1):
        data, collate, processes = Resized(), Scaled(), set()
        loader = Loader(data, 4, ranks=lambda: ranks_of(1, 0, 1), seed=4, num_workers=workers, collate_fn=collate)
        for epoch in range(4):
            if epoch % 2:
                change(data, collate)
            loader.seek(epoch, 0)
            read.append([part.tolist() for part in loader])
            if workers:
                processes.add(loader._inner._iterator._workers[0].pid)
    assert read[:4] == read[4:] and read[0] != read[1] and len(processes) == 3, "that of a whole epoch stays"


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


def resumed(session, left, batch, dataset, global_batch, epochs=2, **options):
    """What a session that begins with this position in its first epoch gives: the samples' numbers, by epoch."""
    session._state.position.batch = batch  # as a restore sets it
    session._loop.resume(ResumePoint(session.world_size, keyed=left))
    loader, given = session.loader(dataset, global_batch, **options), []
    for _ in session.epochs(epochs):
        given.append([[int(number) for number in part[0]] for part in session.steps(loader)])
    assert session._state.position.step == session._state.position.steps_total == sum(map(len, given))
    return given


def row(size):
    return torch.utils.data.TensorDataset(torch.arange(size))


def begun(session, size, global_batch, batches, **options):
    """The samples that an epoch has used after so many batches, and what a checkpoint holds of that."""
    loader, used = session.loader(row(size), global_batch, **options), []
    for _ in session.epochs(1):
        for part in itertools.islice(session.steps(loader), batches):
            used += part[0].tolist()
        left = loader.place(batches)
    session._loop._loops_seen = session._state.position.loop = 0
    session._state.position.restore(Position())
    return used, json.loads(json.dumps(left))


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("before", "batches", "now"), [(8, 3, 4), (8, 3, 12), (8, 3, 10), (8, 1, 16), (4, 13, 5), (16, 3, 8), (2, 1, 10)]
)
def test_with_another_global_batch_an_epoch_goes_on_after_the_samples_that_it_has_used(
    session, before, batches, now, drop_last
):
    used, left = begun(session, 53, before, batches, drop_last=drop_last)
    rest, whole = resumed(session, left, batches, row(53), now, drop_last=drop_last)
    samples = list(itertools.chain(used, *rest))
    assert len(set(samples)) == len(samples) and len(samples) >= (53 - now + 1 if drop_last else 53)
    assert samples == begun(session, 53, 53, 1)[0][: len(samples)], "the order is that of the epoch"
    assert all(len(part) == now for part in rest[:-1]) and len(whole) == len(
        session.loader(row(53), now, drop_last=drop_last)
    )
    said = f"epoch 0: the global batch was {before} and is {now}; it goes on after the {len(used)} samples that it has used"
    assert session.exactness["resume"] == said + ("" if rest else "; none is left")


def test_a_second_cut_of_such_an_epoch_is_resumed_as_exactly(session):
    _, left = begun(session, 53, 8, 3)
    [rest] = resumed(session, left, 3, row(53), 10, epochs=1)
    assert [len(part) for part in rest] == [10, 10]
    loader = session.loader(row(53), 10)
    loader.seek(0, 3)
    loader.resume(left)
    assert loader.batch == 3 and loader.place(4) == {"size": 53, "global_batch": 10, "used": 34}
    loader.seek(0, 4)
    assert loader.resume(loader.place(4) | {"used": 34}) == ""
    assert [part[0].tolist() for part in loader] == rest[1:]
    loader.seek(1, 0)
    assert len(list(loader)) == 5


@pytest.mark.parametrize(
    ("size", "options", "count", "said"),
    [
        (60, {}, 4, "; in its order, which is another one, some samples come twice and others never"),
        (60, {"shuffle": False}, 4, ""),
        (30, {}, 0, "; none is left"),
        (20, {}, 0, "; none is left"),
    ],
)
def test_a_dataset_of_another_length_is_gone_on_with_and_that_is_said(session, size, options, count, said):
    used, left = begun(session, 53, 8, 3, **options)
    rest, whole = resumed(session, left, 3, row(size), 8, **options)
    assert (len(rest), len(whole)) == (count, size // 8)
    begins = f"epoch 0: the dataset had 53 samples and has {size}; it goes on after the 24 samples that it has used"
    assert session.exactness["resume"] == begins + said
    if options:
        assert list(itertools.chain(used, *rest)) == list(range(56))


def test_a_position_beyond_the_end_in_a_checkpoint_without_sizes_ends_its_epoch(session):
    assert [len(epoch) for epoch in resumed(session, None, 6, row(53), 16)] == [0, 3]
    assert session.exactness["resume"] == "epoch 0: it has used 6 batches, and there are 3 of 16 now: none is left"


def test_a_position_of_the_same_sizes_is_as_before_and_nothing_is_said(session):
    for drop_last, batches in itertools.product((True, False), (1, 6)):
        used, left = begun(session, 53, 8, batches, drop_last=drop_last)
        for known in (left, None):
            session._state.position.restore(Position())
            session._loop._loops_seen = 0
            [rest] = resumed(session, known, batches, row(53), 8, epochs=1, drop_last=drop_last)
            assert list(itertools.chain(used, *rest)) == begun(session, 53, 53, 1)[0][: 48 if drop_last else 53]
    assert "resume" not in session.exactness


@pytest.mark.parametrize(
    "altered", [3, [], {}, {"size": -1}, {"used": 1.5}, {"global_batch": True}, {"global_batch": 0}, {"used": 1 << 70}]
)
def test_a_place_that_kgorch_has_not_written_is_refused(session, altered):
    _, left = begun(session, 53, 8, 3)
    with pytest.raises(CannotRestore, match="place in a loader"):
        resumed(session, {**left, **altered} if altered and isinstance(altered, dict) else altered, 3, row(53), 8)


def test_a_stopped_run_goes_on_with_the_larger_global_batch_of_a_changed_plan(kgorch):
    args = {"batch": 16, "epochs": 20, "pause": 0.1}
    plan = str(kgorch.plan("hungry.py", args=args, every="600s"))  # 160 samples an epoch
    supervisor = kgorch.background("start", plan)
    kgorch.wait_for_step(5)
    kgorch("stop")
    assert supervisor.wait(timeout=60) == 10
    at = read_checkpoint(kgorch.checkpoints()[-1]).position
    kgorch("start", plan, "--set", "stage.train.args.batch=64", "--set", "stage.train.args.pause=0.0")
    rest = (160 - at.batch * 16) // 64 * 64 + (19 - at.epoch) * 128
    assert read_checkpoint(kgorch.checkpoints()[-1]).position.samples == at.samples + rest
    if at.batch:  # not between two epochs
        said = f"the global batch was 16 and is 64; it goes on after the {at.batch * 16} samples that it has used"
        said += "" if 160 - at.batch * 16 >= 64 else "; none is left"
        assert kgorch.status()["exactness"]["resume"] == f"epoch {at.epoch}: {said}"


def test_a_rung_that_sets_the_global_batch_in_mid_epoch_repeats_no_sample(kgorch):
    args = {"batch": 32, "pause": 0.5, "at": 8, "rank": -1, "fits": 8}
    extra = "[memory]\nladder = [{ set = { batch = 8 } }]"
    kgorch("start", str(kgorch.plan("hungry.py", args=args, every="600s", extra=extra)))
    assert [event["facts"]["rung"] for event in kgorch.events("rung_taken")] == ["set batch=8"]
    assert read_checkpoint(kgorch.checkpoints()[-1]).position.samples == 320
