"""Loaders that are not ours, cut in the middle of an epoch: what follows is what an uninterrupted training would have seen."""

from __future__ import annotations

import base64
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import weakref

import numpy as np
import pytest
import torch
from foreign_loaders import (
    CPU,
    LOADERS,
    Ahead,
    Augmented,
    InThread,
    Noisy,
    Part,
    Prefetched,
    Shuffled,
    Stream,
    Unseen,
    ahead_by,
    nested,
    noise,
    own_generator,
    seed,
    train,
)
from harness import Kgorch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from kgorch.checkpoint.folder import read_checkpoint
from kgorch.errors import CannotRestore, KgorchError
from kgorch.worker import attach, rng_state
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.data.loader_reads import SampledBatch
from kgorch.worker.restore import ResumePoint

EXACT_ANYWAY = {"distributed, 0 workers", "stream, 0 workers", "a list"}


@pytest.mark.parametrize("name", LOADERS)
def test_what_follows_a_cut_is_what_would_have_followed(name):
    whole, _ = train(LOADERS[name])
    batches = len(whole) // 3
    for cut in ((0, 3), (1, 1), (2, batches)):  # at the end of the epoch, too
        before, left = train(LOADERS[name], cut_after=cut)
        after, _ = train(LOADERS[name], begin=left)
        assert before == whole[: len(before)]
        assert after == whole[len(before) :], cut


@pytest.mark.parametrize("name", sorted(LOADERS.keys() - EXACT_ANYWAY))
def test_without_the_kept_states_it_would_be_another_training(name):
    whole, _ = train(LOADERS[name])
    before, left = train(LOADERS[name], cut_after=(1, 2))
    after, _ = train(LOADERS[name], begin=left | {"began": None})
    assert len(after) == len(whole) - len(before)
    assert after != whole[len(before) :]


@pytest.mark.parametrize(
    "name", ["shuffled, 2 workers", "nested, reads ahead", "dataset's generators", "stream, 0 workers"]
)
def test_a_training_without_kgorch_sees_the_same(name):
    seed(7)
    loader, plain = LOADERS[name](), []
    for epoch in range(3):
        plain += [(epoch, batch.tolist(), noise()) for batch in loader]
    assert train(LOADERS[name])[0] == plain


@pytest.mark.parametrize("cut", [(1, 1), (1, 2), (1, 5)])
@pytest.mark.parametrize("loader", [DataLoader, Ahead])
def test_each_sample_comes_once_an_epoch_on_two_ranks_that_share_a_nested_sampler(loader, cut):
    whole = [train(nested(rank, loader))[0] for rank in (0, 1)]
    orders = []
    for rank in (0, 1):
        before, left = train(nested(rank, loader), cut_after=cut)
        after, _ = train(nested(rank, loader), begin=left)
        assert before + after == whole[rank]
        orders.append(before + after)
    for epoch in range(3):
        seen = [int(sample[0]) for order in orders for number, batch, _ in order if number == epoch for sample in batch]
        assert sorted(seen) == list(range(40)) != seen


class Rotated(Sampler):
    """Goes on from where it was: nobody can see that from outside."""

    def __init__(self):
        self.first = 0

    def __len__(self):
        return 40

    def __iter__(self):
        self.first += 3
        return iter([(self.first + number) % 40 for number in range(40)])


class Lazy(Sampler):
    """Draws each index when it is asked for one, from the generator of the process."""

    def __len__(self):
        return 40

    def __iter__(self):
        left = list(range(40))
        while left:
            yield left.pop(random.randrange(len(left)))


class Buffered(IterableDataset):
    """A stream that is shuffled as it is read, from the generator of the process."""

    def __iter__(self):
        held = list(range(20))
        for index in range(20, 40):
            at = random.randrange(20)
            yield torch.tensor([float(held[at])])
            held[at] = index
        yield from (torch.tensor([float(index)]) for index in held)


def of_a_list_that_changes():
    return [torch.full((4, 1), random.random()) for _ in range(10)]


def test_a_sampler_of_an_unknown_kind_is_named_beforehand():
    loader = DataLoader(Noisy(), batch_sampler=Part(BatchSampler(Rotated(), 4, True)))
    said = (
        "replayed; loader.batch_sampler.batch_sampler.sampler is a Rotated, exact if it gives the same order each time"
    )
    assert LoaderFastForward(loader, 1, CPU, None, 1).exactness == said
    streaming = DataLoader(Noisy(), 4)
    streaming.dataset.stream = iter([1])
    said = "replayed; loader.dataset.stream is a list_iterator, exact if it begins anew with each epoch"
    assert LoaderFastForward(streaming, 1, CPU, None, 1).exactness == said


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (lambda: DataLoader(Noisy(), 4, sampler=Rotated()), "epoch 2: the samples read again are not those"),
        (
            lambda: DataLoader(Noisy(), 4, sampler=Rotated(), num_workers=2),
            "epoch 2: the samples read again are not those",
        ),
        (lambda: Ahead(Noisy(), 4, sampler=Lazy()), "epoch 2: the samples read again are not those"),
        (lambda: DataLoader(Buffered(), 4), "epoch 2: the samples read again are not those"),
        (of_a_list_that_changes, "epoch 2: the newest batch came out otherwise"),
    ],
)
def test_an_order_that_comes_out_otherwise_is_seen_whatever_the_cause(make, lost, capsys):
    whole, _ = train(make)
    before, left = train(make, cut_after=(2, 4))
    after, _ = train(make, begin=left, lost=lost)
    assert [batch for _, batch, _ in before + after] != [batch for _, batch, _ in whole]
    assert lost in capsys.readouterr().out


def test_a_batch_that_the_script_takes_apart_or_writes_to_is_not_taken_for_another_one():
    def batch():
        return {"x": torch.arange(4.0), "labels": [torch.ones(2), "a"]}

    given = batch()
    sampled, plain = SampledBatch(given), SampledBatch(batch()).checksum()
    assert plain is not None and plain != SampledBatch({**batch(), "x": torch.arange(1.0, 5.0)}).checksum()
    given.pop("labels")
    given["x"] = given["x"] * 2
    assert sampled.checksum() == plain
    given = batch()
    sampled = SampledBatch(given)
    given["x"].mul_(2)
    assert sampled.checksum() is None, "its values are not those that it was given with"
    with torch.inference_mode():
        given = torch.arange(3)
    assert SampledBatch(given).checksum() is not None
    assert SampledBatch([given, torch.empty(2, device="meta")]).checksum() is None, "on a device that is waited for"
    assert SampledBatch([given, object()]).checksum() is None


def test_generators_at_other_places_than_the_checkpoint_says_are_told():
    _, left = train(nested(), cut_after=(1, 2))
    assert list(left["began"]["generators"]) == ["loader.batch_sampler.batch_sampler.sampler.generator"]

    def once_more():
        inner = nested()().batch_sampler
        return DataLoader(Noisy(), batch_sampler=Part(inner, 0, 1))

    train(
        once_more,
        begin=left,
        lost="loader.batch_sampler.batch_sampler.sampler.generator, whose state was kept, is not in",
    )
    train(once_more, begin=left, lost="loader.batch_sampler.batch_sampler.batch_sampler.sampler.generator is new")
    train(once_more, begin=left, lost="the samples read again are not those")
    order = "loader.batch_sampler.sampler.chance"
    _, left = train(lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(Shuffled(40), 4, True)), cut_after=(1, 2))
    assert list(left["began"]["generators"]) == [order]
    other = np.random.default_rng(3)
    train(
        lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(Shuffled(40, other), 4, True)),
        begin=left,
        lost=f"{order} is another kind of generator than it was",
    )


def as_an_earlier_version(left, *generators):
    """A checkpoint that knew the generators of a few parts only, by their number."""
    began = left["began"]
    return left | {"began": {"rng": began["rng"], "generators": list(generators), "used": began["used"]}}


def test_a_checkpoint_of_an_earlier_version_is_read_and_what_it_lacks_is_told():
    whole, _ = train(own_generator(0))
    before, left = train(own_generator(0), cut_after=(1, 4))
    [kept] = left["began"]["generators"].values()
    kept = base64.b64decode(kept["$bytes"]).hex()
    after, _ = train(own_generator(0), begin=as_an_earlier_version(left, kept))
    assert before + after == whole
    _, left = train(nested(), cut_after=(1, 2))
    lost = "an earlier version, which did not keep loader.batch_sampler.batch_sampler.sampler.generator"
    train(nested(), begin=as_an_earlier_version(left), lost=lost)


@pytest.mark.parametrize(
    "altered",
    [
        {"generators": ["no digits"]}, {"generators": [7]}, {"generators": 7}, {"ahead": 7}, {"ahead": [[1, 7]]},
        {"ahead": [[2, {}]]}, {"order": [1]}, {"order": {"a": 1}}, {"order": "ab"}, {"rng": {}}, {"rng": None}, {"kept": 7},
    ],
)  # fmt: skip
def test_a_place_in_a_loader_that_kgorch_has_not_written_is_refused(altered):
    def make():
        return Ahead(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(9))

    _, left = train(make, cut_after=(0, 3))
    with pytest.raises(CannotRestore):
        train(make, begin=left | {"began": left["began"] | altered})


PERSISTENT = {"shuffle": True, "num_workers": 1, "persistent_workers": True}


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("loader", [DataLoader, Ahead, lambda *args, **more: Prefetched(DataLoader(*args, **more))])
def test_an_epoch_whose_loading_processes_were_kept_has_the_same_order_after_a_cut(loader, has_own):
    def make():
        own = torch.Generator().manual_seed(9) if has_own else None
        return loader(torch.arange(40.0), 4, generator=own, **PERSISTENT)

    whole, _ = train(make)
    for cut, is_kept in (((0, 3), False), ((1, 3), True), ((2, 10), True)):
        before, left = train(make, cut_after=cut)
        assert ("kept" in left["began"]) == is_kept
        after, _ = train(make, begin=left)
        assert before + after == whole, cut


def test_a_cut_between_two_epochs_with_loading_processes_that_are_kept_does_not_change_the_order():
    seed(7)
    loader = DataLoader(torch.arange(40.0), 4, **PERSISTENT)
    replay = LoaderFastForward(loader, 1, CPU, None, 1)
    list(replay)
    replay.end()
    left, rng = json.loads(json.dumps(replay.place)), rng_state.capture(CPU)
    whole = torch.cat(list(LoaderFastForward(loader, 1, CPU, None, 1)))
    rng_state.restore(rng, CPU)
    again = LoaderFastForward(DataLoader(torch.arange(40.0), 4, **PERSISTENT), 1, CPU, left, 1)
    assert torch.cat(list(again)).tolist() == whole.tolist()


def test_an_evaluation_between_two_batches_does_not_count():
    loader = own_generator(0)()
    replay = LoaderFastForward(loader, 1, CPU, None, 1)
    given = iter(replay)
    next(given), next(given)
    before = replay.place["order"]
    list(loader)
    next(given)
    assert (before[0], replay.place["order"][0]) == (2, 3) and "ahead" not in replay.exactness


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
            replay = LoaderFastForward(loader, world, CPU, place, 2)
            replay.seek(3, 3 if place else 0)
            seen += [int(sample[0]) for batch in itertools.islice(replay, number) for sample in batch]
        return seen, replay

    before, cut = on_ranks(2, 4, number=3)
    after, resumed = on_ranks(1, size, place=cut.place)
    assert resumed.batch == used
    assert len(before) + len(after) == 40 + twice and {*before, *after} == set(range(40))


def test_loading_processes_end_with_the_loop_that_is_left_early():
    replay = LoaderFastForward(DataLoader(Noisy(), 4, num_workers=2), 1, CPU, None, 1)
    before = set(multiprocessing.active_children())  # of another test's loader, that its own library keeps
    gc.disable()  # a reference cycle would keep them
    try:
        given = iter(replay)
        next(given)
        own = set(multiprocessing.active_children()) - before
        assert len(own) == 2
        gone = weakref.ref(given)
        del given
        assert gone() is None and not own & set(multiprocessing.active_children())
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
        (DataLoader(Noisy(), sampler=range(40)), 1, "replayed"),
        (nested()(), 1, "replayed"),
        (DataLoader(Noisy(), sampler=Shuffled(40)), 1, "replayed"),
        (
            DataLoader(Noisy(), sampler=Shuffled(40, random.SystemRandom())),
            1,
            "replayed; loader.sampler.chance: the state of a SystemRandom cannot be read",
        ),
        (
            Prefetched(DataLoader(Noisy(), num_workers=1, persistent_workers=True)),
            1,
            "replayed; a Prefetched, exact if it gives the same each time; persistent_workers",
        ),
    ],
)
def test_what_cannot_be_exact_is_said(loader, ranks_before, said):
    found = LoaderFastForward(loader, 1, CPU, None, ranks_before).exactness
    assert found == said or (said != "replayed" and found.startswith(said))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ahead_by(8)(Noisy(), 2), "replayed"),
        (lambda: ahead_by(9)(Noisy(), 2), "replayed; 9 batches are read ahead, of which the newest 8 come again"),
        (lambda: ahead_by(9)(Noisy(), 2, num_workers=1), "replayed; 9 batches are read ahead"),
        (lambda: InThread(Noisy(), 2), "replayed; batches are read in a thread"),
        (lambda: Unseen(Noisy(), 2), "replayed; what a Unseen reads ahead is not seen"),
        (lambda: DataLoader(Augmented(), 4, num_workers=1, prefetch_factor=16), "replayed"),
    ],
)
def test_what_only_shows_as_it_is_read_is_said_then(make, said):
    replay = LoaderFastForward(make(), 1, CPU, None, 1)
    assert replay.exactness == "replayed"
    for number, _ in enumerate(replay):
        if number == 4:
            assert replay.exactness == said or (said != "replayed" and replay.exactness.startswith(said))


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with attach(seed=1) as made:
        yield made


def test_steps_counts_any_loader_and_names_it(session):
    for _ in session.steps(DataLoader(Stream(), 16), 1):
        assert session._state.position.steps_total == 0
    assert (session._state.position.step, session._state.position.samples, session.weight) == (3, 40, 1.0)
    list(session.steps(DataLoader(Noisy(), 8), 2))
    assert (session._state.position.steps_total, session._state.position.samples) == (13, 120)
    list(session.steps(DataLoader([{"text": "a"}] * 5, 2, collate_fn=list), 1))
    assert session.exactness == {"data": "replayed", "deterministic": "not asked for"}
    list(session.steps(session.loader(Noisy(), 8), 1))
    assert session.exactness["data"] == "keyed"


def test_what_a_resume_has_lost_is_told_and_stays_told(session):
    def make():
        return DataLoader(Noisy(), 4, sampler=Rotated())

    _, left = train(make, cut_after=(2, 4))
    session._state.position.epoch, session._state.position.batch = 2, left["batch"]  # as a restore sets them
    session._loop.resume(ResumePoint(session.world_size, loader=left["began"]))
    for number, _ in enumerate(session.steps(make(), 4)):
        said = "epoch 2: the samples read again are not those it had used: some may come twice in it, others never"
        assert session.exactness["resume"] == said, number
    assert number == 40 - 1, "the count of all epochs goes on"
    assert (
        session.exactness["data"] == "replayed; loader.sampler is a Rotated, exact if it gives the same order each time"
    )


def test_a_nested_sampler_is_refused_among_what_is_tracked_and_what_it_holds_is_not():
    class Model(torch.nn.Linear): ...

    class Weighted(Shuffled):
        def state_dict(self):
            return {}

    sampler = Weighted(40)
    sampler.model = Model(1, 1)
    loader = Ahead(Noisy(), batch_sampler=Part(BatchSampler(sampler, 4, True)))
    LoaderFastForward(loader, 1, CPU, None, 1).check_untracked({"model": sampler.model})
    with pytest.raises(KgorchError, match="leave order out of"):
        LoaderFastForward(loader, 1, CPU, None, 1).check_untracked({"model": sampler.model, "order": sampler})


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
        (2, "nested", 0),
        pytest.param(2, "nested", 2, marks=pytest.mark.soak),
        pytest.param(1, "stream", 2, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_run_with_a_foreign_loader_ends_with_the_bits_of_an_uninterrupted_one(
    kgorch, tmp_path, ranks, loader, workers
):
    args = {"loader": loader, "workers": workers}
    (tmp_path / "alone").mkdir()
    alone = Kgorch(tmp_path / "alone", tmp_path / "alone-home")
    alone("start", str(alone.plan("borrows.py", ranks=ranks, args=args, every="600s")))

    plan = str(kgorch.plan("borrows.py", ranks=ranks, args=args | {"once": "stopped"}, every="600s"))
    kgorch("start", plan, code=10)
    at = read_checkpoint(kgorch.checkpoints()[-1]).position
    assert at.epoch == 1 and 7 < at.batch < 20
    kgorch("start", plan)
    said = "goes on after {} batches, which are not read again"
    if loader == "stream" or (loader == "nested" and at.batch):  # an iterator of the script's own
        said = "has used {} batches, which are read again"
    assert said.format(at.batch) in (kgorch.attempt() / "rank0.log").read_text()
    exactness = kgorch.status()["exactness"]
    assert exactness["data"] == "replayed" and "resume" not in exactness
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


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_loading_process_ends_at_its_ranks_sigterm_and_at_no_other(session, start):
    """Python 3.14 starts them from a fork server, which is then their parent."""
    before = set(multiprocessing.active_children())
    loader = DataLoader(Noisy(), 4, num_workers=1, multiprocessing_context=start, persistent_workers=True)
    next(session.steps(loader, 1))
    [process] = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", str(process.pid)], check=True)
    process.join(0.5)
    assert process.is_alive()
    process.terminate()
    process.join(20)
    process.kill()  # one that is left would be waited for without end
    process.join()
    assert process.exitcode == 0


class Plain(Sampler):
    """A row of numbers, shuffled by a generator of its own of some kind, as it begins."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return 40

    def __iter__(self):
        order = list(range(40))
        if isinstance(self.generator, torch.Generator):
            return iter(torch.randperm(40, generator=self.generator).tolist())
        if self.generator is not None:
            self.generator.shuffle(order)
        return iter(order)


class Mixed(Sampler):
    """Of another sampler's, two at a time in either order, as its own generator says when they are asked for."""

    def __init__(self, inner, generator):
        self.parts, self.options = {"inner": [inner]}, (generator,)

    def __iter__(self):
        [inner], [generator] = self.parts["inner"], self.options
        held = list(inner)
        for first, second in zip(held[::2], held[1::2], strict=False):
            yield from (first, second) if generator.random() < 0.5 else (second, first)


def test_generators_of_samplers_that_are_nested_deep_are_found():
    """Found by the test below: the search ended 16 edges from the loader, and each sampler of this kind is three of them."""

    def loader():
        sampler = RandomSampler(range(40))
        for _ in range(6):
            sampler = Mixed(sampler, random.Random(1))
        return DataLoader(Augmented(), batch_sampler=BatchSampler(sampler, 2, False))

    whole, _ = train(loader)
    before, left = train(loader, cut_after=(1, 1))
    after, _ = train(loader, begin=left)
    assert before + after == whole


GENERATORS = st.sampled_from(
    [
        lambda: random.Random(1),
        lambda: np.random.default_rng(2),
        lambda: np.random.RandomState(3),
        lambda: np.random.Generator(np.random.Philox(4)),
    ]
)
TORCHS = st.just(lambda: torch.Generator().manual_seed(5))
SAMPLERS = st.recursive(
    st.one_of(
        st.builds(lambda made: lambda: Plain(made()), GENERATORS | TORCHS | st.just(lambda: None)),
        st.builds(lambda made: lambda: RandomSampler(range(40), generator=made()), TORCHS | st.just(lambda: None)),
        st.just(lambda: DistributedSampler(range(40), 2, 1)),
        st.just(lambda: RandomSampler(range(40), replacement=True, generator=torch.Generator().manual_seed(6))),
    ),
    lambda inner: st.builds(lambda made, below: lambda: Mixed(below(), made()), GENERATORS, inner),
    max_leaves=4,
)
BATCHES = st.recursive(
    st.builds(lambda below, size: lambda: BatchSampler(below(), size, False), SAMPLERS, st.integers(1, 7)),
    lambda inner: st.one_of(
        st.builds(lambda below, rank: lambda: Part(below(), rank), inner, st.integers(0, 1)),
        st.builds(lambda below, made: lambda: Mixed(below(), made()), inner, GENERATORS),
    ),
    max_leaves=3,
)
WRAPPERS = st.sampled_from(
    [DataLoader, Ahead, ahead_by(2), lambda *args, **more: Prefetched(DataLoader(*args, **more))]
)


@settings(deadline=None, max_examples=60)
@given(BATCHES, WRAPPERS, st.data())
def test_however_samplers_are_nested_the_order_after_a_cut_is_that_of_an_uninterrupted_training(make, wrapper, data):
    def loader():
        return wrapper(Augmented(), batch_sampler=make())

    whole, _ = train(loader)
    assume(whole)
    cut = data.draw(
        st.sampled_from([(epoch, number) for epoch in range(3) for number in range(1, len(whole) // 3 + 1)])
    )
    before, left = train(loader, cut_after=cut)
    after, _ = train(loader, begin=left)
    assert before + after == whole
