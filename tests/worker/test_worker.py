"""The worker's parts by themselves: agreement, state, loader, save."""

from __future__ import annotations

import collections
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from kgorch.core.checkpoint import save_deadline
from kgorch.errors import CannotRestore, KgorchError
from kgorch.protocol.snapshot_messages import STAMP_BYTES
from kgorch.worker import rng_state
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.checkpoint.snapshot_buffer import BufferTooSmall, SnapshotBuffer, header_of, layout_of, share
from kgorch.worker.data import batches
from kgorch.worker.data.keyed_loader import Loader
from kgorch.worker.ranks.consensus_board import MOST_STEPS, SAVE, STOP, Board, PeersLost, size
from kgorch.worker.ranks.virtual_ranks import GradientSum, copied_buffers, ranks_of, set_buffers


@pytest.fixture
def page(tmp_path):
    """Shared memory for up to four ranks."""
    path = tmp_path / "board"
    path.write_bytes(b"\0" * size(4))
    return str(path)


def _rank_on_board(page, rank, world, steps, out, barrier):
    board, chance, acted = Board(page, rank, world), random.Random(rank), []
    for step in range(1, steps + 1):
        if rank == 0 and chance.random() < 0.05:
            board.ask(chance.choice([SAVE, SAVE | STOP]))
        if act := board.tick(step):
            acted.append((step, act))
        barrier.wait()  # what an all-reduce does to the ranks of a training
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.003)
    board.leave()
    out.put((rank, acted))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_ranks_act_on_the_same_steps(page, world):
    context = multiprocessing.get_context("fork")
    out, barrier = context.Queue(), context.Barrier(world)
    ranks = [
        context.Process(target=_rank_on_board, args=(page, rank, world, 600, out, barrier)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    acted = dict(out.get(timeout=240) for _ in ranks)
    for process in ranks:
        process.join()
    assert len(acted[0]) > 5
    assert all(acted[rank] == acted[0] for rank in range(world))


def test_an_order_takes_effect_two_steps_after_it_was_acknowledged(page):
    board = Board(page, 0, 1)
    board.ask(SAVE)
    assert [board.tick(step) for step in range(10, 15)] == [0, 0, SAVE, 0, 0]


def test_an_order_takes_effect_within_the_steps_that_the_lead_counts_whichever_rank_is_first_at_a_boundary(page):
    """A rank that was always a moment before rank 0 saw a request a step later, and the last save came a step too late."""
    board, early = Board(page, 0, 2), Board(page, 1, 2)
    board.ask(SAVE)
    done = [(early.tick(step), board.tick(step)) for step in range(1 + save_deadline.STEPS_TO_AGREE)]
    assert done == [(0, 0)] * save_deadline.STEPS_TO_AGREE + [(SAVE, SAVE)]
    assert len(done) == MOST_STEPS


def test_orders_given_while_one_is_open_are_merged_into_the_next(page):
    board = Board(page, 0, 1)
    board.ask(SAVE)
    board.tick(1)
    board.ask(SAVE)
    board.ask(STOP)
    assert [board.tick(step) for step in range(2, 8)] == [0, SAVE, 0, 0, SAVE | STOP, 0]


def test_a_rank_whose_peer_never_comes_gives_up_in_bounded_time(page):
    board = Board(page, 0, 2, patience_s=0.2)
    board.ask(SAVE)
    board.tick(1)
    board.tick(2)
    with pytest.raises(PeersLost):
        board.tick(3)


def test_a_rank_that_is_done_holds_nobody_up(page):
    board, peer = Board(page, 0, 2), Board(page, 1, 2)
    peer.leave()
    board.ask(SAVE)
    assert [board.tick(step) for step in range(1, 4)] == [0, 0, SAVE]


# State

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.integers() | st.sampled_from(["$tensor", "$tuple"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


class Holder:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, loaded):
        self.value = loaded["value"]


def _through_json(thing):
    captured = state_codec.capture({"thing": thing})
    kept = {name: tensor.clone() for name, tensor in captured.tensors.items()}
    empty = Holder(None)
    state_codec.restore({"thing": empty}, json.loads(json.dumps(captured.tree | captured.own_tree)), kept.__getitem__)
    return empty.value


def test_what_an_object_keeps_of_its_state_is_on_the_device_of_what_it_had(monkeypatch):
    """As an average of the weights on a GPU, whose load_state_dict takes the tensors as they are."""

    class OnAnother(torch.Tensor):
        device = torch.device("cuda:1")

    there = torch.zeros(2).as_subclass(OnAnother)
    moved = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: moved.append(str(device)) or tensor)
    state = {"shadow": [torch.ones(2), torch.ones(2)], "step": 3, "more": (torch.ones(1),)}
    assert state_codec._placed(state, {"shadow": [there, torch.zeros(2)], "step": 0}) == state
    assert moved == ["cuda:1", "cpu"]


@settings(deadline=None)
@given(plain)
def test_plain_values_of_any_shape_come_back_as_they_were(value):
    assert repr(_through_json(Holder(value))) == repr(value)


def test_numpy_counters_and_tensors_of_every_type_come_back():
    value = {
        "counter": collections.Counter({3: 2, 5: 1}),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "scalar": np.float32(0.1),
        "bf16": torch.randn(3, 2).bfloat16(),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "zero": torch.tensor(2.5),
        "inf": math.inf,
    }
    back = _through_json(Holder(value))
    assert back["counter"] == value["counter"] and type(back["counter"]) is collections.Counter
    assert np.array_equal(back["array"], value["array"]) and back["array"].dtype == np.uint32
    assert type(back["scalar"]) is np.float32 and back["scalar"] == value["scalar"]
    for name in ("bf16", "empty", "bool", "zero"):
        assert torch.equal(back[name], value[name]) and back[name].dtype == value[name].dtype
    assert back["inf"] == math.inf


def test_what_is_no_plain_value_is_refused_by_its_path():
    with pytest.raises(CannotRestore, match=r"thing\.value\.1\.f is a builtins\.function|thing\.value\.1\.f is a"):
        state_codec.capture({"thing": Holder([1, {"f": lambda: None}])})


def test_tied_weights_are_kept_once_and_come_back_tied():
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    captured = state_codec.capture({"model": net})
    assert len(captured.tensors) == 3
    with torch.no_grad():
        expected = net["a"].weight.clone()
        net["a"].weight.zero_()
    state_codec.restore({"model": net}, captured.tree, {**captured.tensors, "model.a.weight": expected}.__getitem__)
    assert torch.equal(net["b"].weight, expected) and net["b"].weight is net["a"].weight


class Masking(torch.optim.SGD):
    """Keeps a bool, a counter, and a float32 copy of its weights, as optimizers for bfloat16 do."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                own = self.state[weight]
                own["mask"], own["count"] = weight > 0, torch.tensor(70_001)
                own["nested"] = {"master": weight.float() + 1e-6}


@pytest.mark.parametrize("kind", [Masking, torch.optim.NAdam, torch.optim.AdamW])
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_an_optimizers_tensors_keep_the_types_that_they_were_saved_with(kind, order):
    def built(dtype=torch.bfloat16):
        net = nn.Linear(3, 3).to(dtype)
        things = {"model": net, "optimizer": kind(net.parameters(), lr=0.01)}
        for weight in net.parameters():
            weight.grad = torch.randn_like(weight)
        return {name: things[name] for name in order}

    things = built()
    for _ in range(3):
        things["optimizer"].step()
    captured = state_codec.capture(things)
    again = built()
    state_codec.restore(again, captured.tree, captured.tensors.__getitem__)
    found = state_codec.capture(again).tensors
    assert found.keys() == captured.tensors.keys()
    for path, tensor in captured.tensors.items():
        assert found[path].dtype == tensor.dtype and torch.equal(found[path], tensor), path
    changed = built(torch.float32)  # the script has another type now: moments must fit its gradients
    state_codec.restore(changed, captured.tree, captured.tensors.__getitem__)
    changed["optimizer"].step()


def test_another_model_is_refused_with_the_first_name_that_differs():
    captured = state_codec.capture({"model": nn.Linear(3, 3)})
    with pytest.raises(CannotRestore, match="another model"):
        state_codec.restore({"model": nn.BatchNorm1d(3)}, captured.tree, captured.tensors.__getitem__)
    with pytest.raises(CannotRestore, match="another shape"):
        state_codec.restore({"model": nn.Linear(3, 4)}, captured.tree, captured.tensors.__getitem__)
    with pytest.raises(CannotRestore, match="tracks other things"):
        state_codec.restore({"net": nn.Linear(3, 3)}, captured.tree, captured.tensors.__getitem__)


def test_random_states_come_back_for_all_libraries():
    device = torch.device("cpu")
    kept = json.loads(json.dumps(rng_state.capture(device)))
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    rng_state.restore(kept, device)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


def _image(capacity):
    descriptor = os.memfd_create("image")
    os.ftruncate(descriptor, capacity + STAMP_BYTES)
    return SnapshotBuffer(os.dup(descriptor), capacity), descriptor


def test_an_image_too_small_says_what_it_needs_and_keeps_what_it_holds():
    image, descriptor = _image(4096)
    image.fill({"x": torch.ones(10)}, {}, 1)
    before = os.pread(descriptor, 4096 + 8, 0)
    with pytest.raises(BufferTooSmall) as refused:
        image.fill({"x": torch.ones(2000)}, {}, 2)
    assert refused.value.need > 8000
    assert os.pread(descriptor, 4096 + 8, 0) == before
    os.close(descriptor)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])),
        max_size=8,
    )
)
def test_an_image_is_a_safetensors_file(tmp_path_factory, shapes):
    tensors = {f"t{i}": (torch.rand(length) * 9).to(dtype) for i, (length, dtype) in enumerate(shapes)}
    image, descriptor = _image(1 << 16)
    spans = image.fill(tensors, {"a.json": b"{}"}, 7)
    start, size = spans[""]
    path = tmp_path_factory.mktemp("image") / "x.safetensors"
    path.write_bytes(os.pread(descriptor, size, start))
    loaded = load_file(path)
    assert os.pread(descriptor, 2, spans["a.json"][0]) == b"{}"
    assert int.from_bytes(os.pread(descriptor, 8, 1 << 16), "little") == 7
    os.close(descriptor)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_small_counters_move_no_large_tensor_off_its_cache_lines():
    moments = {f"{number}.exp_avg": torch.ones(64, 8) for number in range(3)}
    head, _ = header_of(layout_of(moments | {f"{number}.step": torch.ones(()) for number in range(3)}))
    header = json.loads(head[8:])
    assert all((len(head) + header[name]["data_offsets"][0]) % 64 == 0 for name in moments)


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 5))
def test_the_shares_of_all_ranks_are_the_whole_once_and_nearly_even(sizes, world):
    tensors = {f"t{i}": torch.empty(length) for i, length in enumerate(sizes)}
    shares = [share(tensors, set(), rank, world) for rank in range(world)]
    names = [name for part in shares for name in part]
    assert sorted(names) == sorted(tensors)
    laden = [sum(tensor.nbytes for tensor in part.values()) for part in shares]
    assert max(laden) - min(laden) <= max((tensor.nbytes for tensor in tensors.values()), default=0)


# Loader


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 53

    def __getitem__(self, index):
        return torch.tensor(
            [index, random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64
        )


def _ranks(rank, world, count=None):
    return lambda: ranks_of(count or world, rank, world)


def _global_batches(world, epoch, begin=0, **options):
    """The samples of each global batch as all ranks together read them."""
    loaders = [Loader(Noisy(), 8, ranks=_ranks(rank, world), seed=4, **options) for rank in range(world)]
    for loader in loaders:
        loader.seek(epoch, begin)
    per_rank = [list(loader) for loader in loaders]
    return [
        torch.cat(
            [parts[number][: loader.share_of(begin + number)] for loader, parts in zip(loaders, per_rank, strict=True)]
        )
        for number in range(len(per_rank[0]))
    ]


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (3, 0), (1, 2), (2, 1)])
def test_samples_their_order_and_their_noise_do_not_depend_on_ranks_or_workers(world, workers):
    expected = _global_batches(1, epoch=2)
    found = _global_batches(world, epoch=2, num_workers=workers)
    assert len(found) == 6 and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class OfProcess(torch.utils.data.Dataset):
    """The id of the process that reads a sample."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.parametrize("persistent", [None, False])
def test_loading_processes_outlive_an_epoch_unless_the_script_asks_for_new_ones(persistent):
    options = {} if persistent is None else {"persistent_workers": persistent}
    loader = Loader(OfProcess(), 4, ranks=_ranks(0, 1), seed=4, num_workers=1, **options)
    first, second = ({int(pid) for batch in loader for pid in batch} for _ in range(2))
    assert os.getpid() not in first | second
    assert (first == second) == (persistent is None)


def test_a_resume_in_an_epoch_reads_what_is_left_of_it_and_no_more():
    assert all(
        torch.equal(a, b) for a, b in zip(_global_batches(2, 1)[4:], _global_batches(2, 1, begin=4), strict=True)
    )
    assert _global_batches(2, 1, begin=6) == []


def test_epochs_differ_and_each_holds_every_sample_once():
    first, second = (torch.cat(_global_batches(2, epoch, drop_last=False))[:, 0] for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(53))


def test_reading_samples_leaves_the_trainings_own_chance_alone():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    list(Loader(Noisy(), 8, ranks=_ranks(0, 1), seed=4))
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected


class Squares:
    """Draws nothing. Counts its reads."""

    def __init__(self):
        self.batches = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index * index

    def __getitems__(self, indices):
        self.batches.append(len(indices))
        return [self[index] for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_draws_nothing_gives_the_same_batches_whether_it_is_said_or_not(workers):
    read = [
        [
            batch.tolist()
            for batch in Loader(Squares(), 4, ranks=_ranks(0, 1), seed=4, is_random=way, num_workers=workers)
        ]
        for way in (True, False)
    ]
    assert read[0] == read[1] and len(read[0]) == 2


def test_a_dataset_that_draws_nothing_is_read_by_the_batch():
    data = Squares()
    list(Loader(data, 4, ranks=_ranks(0, 1), seed=4, is_random=False))
    assert data.batches == [4, 4]
    list(Loader(data, 4, ranks=_ranks(0, 1), seed=4))  # it may draw: the samples of a batch differ with the ranks
    assert data.batches == [4, 4]


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_draws_though_it_was_said_not_to_is_refused(draw, workers):
    class Drawing(Squares):
        def __getitem__(self, index):
            draw()
            return index

    with pytest.raises(KgorchError, match="Drawing draws random numbers"):
        list(Loader(Drawing(), 4, ranks=_ranks(0, 1), seed=4, is_random=False, num_workers=workers))


def test_a_last_batch_smaller_than_the_ranks_lends_a_sample_to_those_without():
    data = torch.utils.data.TensorDataset(torch.arange(5))
    shares = []
    for rank in range(4):
        loader = Loader(data, 4, ranks=_ranks(rank, 4), seed=0, drop_last=False)
        loader.seek(0, 1)
        [batch] = list(loader)
        assert len(batch[0]) == 1
        shares.append(loader.share_of(1))
    assert sorted(shares) == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"global_batch": 1}, "cannot be split over 2 ranks"), ({"global_batch": 99}, "not one global batch")],
)
def test_a_global_batch_that_cannot_be_is_refused(options, said):
    with pytest.raises(KgorchError, match=said):
        Loader(Noisy(), ranks=_ranks(0, 2), seed=0, **options)


def test_a_batch_of_any_structure_is_cut_along_its_samples():
    Pair = collections.namedtuple("Pair", "x names")
    batch = {"pair": Pair(torch.arange(5), ["a", "b", "c", "d", "e"]), "scale": torch.tensor(2.0)}
    parts = batches.split(batch, 2)
    assert [part["pair"].x.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["pair"].names for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(part["scale"] == 2.0 for part in parts)


def test_the_same_script_runs_alone_and_under_plain_torchrun(tmp_path):
    program = Path(__file__).parents[1] / "programs" / "learns.py"
    for launcher in (
        [sys.executable],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    ):
        done = subprocess.run(
            [*launcher, str(program), "--epochs", "1", "--sleep", "0", "--workers", "1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        assert "trained to the end" in done.stdout


@pytest.mark.parametrize(("before", "after"), [(None, 1.0), (4.0, 5.0)])
def test_played_ranks_each_begin_from_what_was_there_and_a_shared_weight_is_summed_once(before, after):
    net = nn.Linear(2, 1, bias=False)
    net.weight.grad = None if before is None else torch.full((1, 2), before)
    summing = GradientSum([net, nn.Sequential(net)], ranks_of(2, 0, 1))
    for _ in range(2):
        with summing.rank():
            net(torch.ones(1, 2)).sum().backward()
    assert torch.equal(net.weight.grad, torch.full((1, 2), after))  # (4 + 1) / 2 twice, as DDP has it


def test_a_played_rank_begins_with_a_buffer_as_it_was_before_it_grew():
    net = nn.Module()
    net.register_buffer("bank", torch.zeros(0, 2))
    before = copied_buffers([net])
    for rows in (3, 5):  # the ranks that a process plays in a step
        set_buffers([net], before)
        assert net.bank.shape == (0, 2)
        net.bank = torch.cat([net.bank, torch.ones(rows, 2)])
    set_buffers([net], [torch.ones(3, 2)])
    assert torch.equal(net.bank, torch.ones(3, 2))


def test_a_tensor_and_its_conjugate_or_negative_view_are_not_one():
    net = nn.Module()
    value = torch.randn(3, dtype=torch.complex64)
    for name, buffer in {
        "plain": value,
        "conjugate": value.conj(),
        "negative": value.conj().imag,
        "real": value.imag,
    }.items():
        net.register_buffer(name, buffer)
    captured = state_codec.capture({"model": net})
    for name, buffer in net.named_buffers():
        assert torch.equal(captured.tensors[f"model.{name}"], buffer)
