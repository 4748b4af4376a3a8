"""The order in which DDP sums its gradients, over a resume: of real reducers, whose group is this process alone.

One test has three processes; whole runs of three ranks are in tests/sessions/test_own_loops.py.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kgorch.worker.memory import bucket_order
from kgorch.worker.memory.bucket_order import NOT_SAVED, UNKNOWN, BucketOrder


class Net(nn.Module):
    """Its first layer is used second, so the first backward gives another order than that of the parameters."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(8, 9), nn.Embedding(10, 8, sparse=is_sparse)

    def forward(self, index):
        return self.second(self.first(index))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A group of one rank that is taken for one of three."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist.ProcessGroup, "size", lambda self: 3)
    yield
    dist.destroy_process_group()


def wrapped(net: nn.Module | None = None, **options) -> DistributedDataParallel:
    return DistributedDataParallel(Net() if net is None else net, bucket_cap_mb=0.0002, **options)


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.tensor([1, 2])).sum().backward()


def buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """Places of its parameters, as it will reduce them."""
    place = {id(weight): index for index, weight in enumerate(ddp.module.parameters())}
    return [[place[id(weight)] for weight in item.parameters()] for item in ddp.reducer._get_zeros_like_grad_buckets()]


def resumed(saved: object, *modules: nn.Module) -> tuple[BucketOrder, str]:
    order = BucketOrder(ranks=3)
    order.resume(saved)
    assert order.is_resumed and order.saved == saved, "as long as it was not restored, a checkpoint holds the same"
    return order, order.restore(modules)


def learned(*ddps: DistributedDataParallel) -> object:
    order = BucketOrder(ranks=3)
    for ddp in ddps:
        step(ddp)
    assert order.learn(ddps) == "" and not order.is_learning
    return order.saved


@pytest.mark.parametrize("as_view", [False, True])
def test_a_resumed_ddp_has_the_buckets_of_the_second_step_before_its_first_one(as_view):
    before, after = wrapped(gradient_as_bucket_view=as_view), wrapped(gradient_as_bucket_view=as_view)
    assert buckets(before) != [[1, 0], [2]]
    saved = learned(before)
    step(before)
    assert saved == {"0": [1, 0, 2]} and buckets(before) == [[1, 0], [2]]
    order, why = resumed(saved, after)
    assert (why, buckets(after), order.saved) == ("", [[1, 0], [2]], saved)
    assert all(weight.grad is None for weight in after.parameters())
    assert not order.is_resumed and order.learn([after]) == "" and not order.is_learning
    step(after)
    step(after)
    assert order.saved == saved


def test_another_order_than_that_of_the_backward_is_built_as_it_was_saved():
    after = wrapped()
    assert resumed({"0": [2, 0, 1]}, after)[1] == "" and buckets(after) == [[2], [0], [1]]
    step(after)
    step(after)
    assert buckets(after) == [[2], [0], [1]]


def test_gradients_that_wait_and_what_is_frozen_are_the_same_afterwards():
    """As the discriminator of a GAN, which is frozen between two steps of its own."""
    after = wrapped()
    after.module.second.bias.grad = waiting = torch.ones(9)
    after.module.second.weight.requires_grad_(False)
    assert resumed({"0": [1, 0, 2]}, after)[1] == "" and buckets(after) == [[1, 0], [2]]
    assert after.module.second.bias.grad is waiting and waiting.eq(1).all()
    assert [weight.requires_grad for weight in after.parameters()] == [False, True, True]


class Lossy(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.scale = net, nn.Parameter(torch.ones(()))

    def forward(self, index):
        return self.net(index) * self.scale


@pytest.mark.parametrize("around", [lambda net: net, torch.compile, Lossy], ids=["module", "compiled", "within a loss"])
def test_the_script_may_have_tracked_what_is_within_its_ddp(around):
    net = Net()
    ddp = wrapped(around(net))
    count = len(list(ddp.module.parameters()))
    why = resumed({"0": list(range(count))}, net)[1]
    assert why == "" and [*itertools.chain(*buckets(ddp))] == list(range(count))


def test_one_that_had_reduced_nothing_yet_learns_its_order_later():
    first, second = wrapped(), wrapped()
    saved = learned(first)
    order, why = resumed(saved, first, second)
    assert (why, order.saved) == ("", saved)
    step(first)
    assert order.learn([first, second]) == "" and order.is_learning
    step(second)
    assert order.learn([first, second]) == "" and not order.is_learning
    assert order.saved == saved | {"3": [1, 0, 2]}


@pytest.mark.parametrize(("saved", "said"), [([1, 0, 2], ""), ([2, 0, 1], "DDP has built other buckets")])
def test_one_that_has_reduced_before_the_first_step_is_compared(saved, said):
    """Accelerate's epochs that are done have a batch again after a resume."""
    ddp = wrapped()
    step(ddp)
    order, why = resumed({"0": saved}, ddp)
    assert why.endswith(said) and bool(why) is bool(said) and buckets(ddp) == [[1, 0], [2]]
    step(ddp)
    assert order.learn([ddp]) == ""


def test_buckets_that_ddp_has_forgotten_are_learned_again():
    """A step that is tried again in less memory puts DDP back."""
    ddp, order = wrapped(), BucketOrder(ranks=3)
    step(ddp)
    order.learn([ddp])
    ddp.reducer._reset_state()
    order.learn_again()
    assert order.is_learning and order.saved == {}
    ddp.reducer._rebuild_buckets()
    (ddp.module.first.weight.sum() + ddp(torch.tensor([1, 2])).sum()).backward()
    assert order.learn([ddp]) == "" and not order.is_learning
    assert order.saved == {"0": [*itertools.chain(*buckets(ddp))]}
    BucketOrder(ranks=2).learn_again()


def test_three_ranks_sum_as_before_and_a_hook_on_one_of_them_holds_none_up(tmp_path):
    """A hook on rank 0 alone, as wandb.watch sets them, had the others wait for it for ever."""
    program = Path(__file__).parents[2] / "programs" / "sums_of_three.py"
    words = [[sys.executable, program, str(rank), tmp_path / "store"] for rank in range(3)]
    ranks = [subprocess.Popen(word, stdout=subprocess.PIPE, text=True) for word in words]
    said = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    lines = [[line for line in text.splitlines() if not line.startswith("[Gloo]")] for text in said]
    assert [first for first, _ in lines] == ["True False ''"] * 3
    notes = ["the script has hooks on gradients", *["not every rank can have DDP build its buckets"] * 2]
    assert [last for _, last in lines] == [f"{{'0': [5, 4, 3, 2, 1, 0]}} {UNKNOWN}: {note}" for note in notes]


def test_weights_that_two_share_have_a_place_in_each():
    net = Net()
    first, second = wrapped(net), wrapped(nn.Sequential(net.first, nn.Linear(8, 1)))
    saved = learned(first, second)
    assert saved == {"0": [1, 0, 2], "2": [2, 1, 0]}
    net = Net()
    first, second = wrapped(net), wrapped(nn.Sequential(net.first, nn.Linear(8, 1)))
    assert resumed(saved, first, second)[1] == ""
    assert (buckets(first), [*itertools.chain(*buckets(second))]) == ([[1, 0], [2]], [2, 1, 0])


def test_gradients_that_a_script_sums_without_reducing_them_are_no_order():
    ddp, order = wrapped(), BucketOrder(ranks=3)
    with ddp.no_sync():
        step(ddp)
    assert order.learn([ddp]) == "" and order.is_learning and order.saved == {}
    step(ddp)
    assert order.learn([ddp]) == "" and order.saved == {"0": [1, 0, 2]}


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        *[(saved, NOT_SAVED) for saved in (None, [1], 7, {"0": None}, {"0": {"a": 1}})],
        *[({"0": order}, NOT_SAVED) for order in ([0, 1, "2"], [0, 1, True], [0, 1, 2.0], [[0, 1, 2]], [0, 1, 99], [0, 1, -1])],
        *[({"0": order}, "DDP reduces other weights than before") for order in ([0], [0, 1, 1], [])],
    ],
)  # fmt: skip
def test_what_a_checkpoint_does_not_hold_is_told(saved, said):
    ddp = wrapped()
    was = buckets(ddp)
    order, why = resumed(saved, ddp)
    assert why == f"{UNKNOWN}: {said}" and (buckets(ddp), order.saved) == (was, {})
    step(ddp)
    assert order.learn([ddp]) == "" and order.saved == {"0": [1, 0, 2]}


@pytest.mark.parametrize("votes", [(bucket_order.PARTIAL, bucket_order.WHOLE), (bucket_order.NONE, bucket_order.WHOLE)])
def test_a_rank_that_could_does_nothing_where_another_one_cannot(votes, monkeypatch):
    """As where rank 0 alone has hooks on its gradients: the others waited for it for ever."""
    monkeypatch.setattr(bucket_order, "_of_all_ranks", lambda ddp, able: votes)
    ddp = wrapped()
    was = buckets(ddp)
    assert "not every rank" in resumed({"0": [1, 0, 2]}, ddp)[1] and buckets(ddp) == was


def with_hook(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.module.second.bias.register_post_accumulate_grad_hook(lambda weight: weight.data.add_(1))
    return ddp


def with_state(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.register_comm_hook([0], lambda state, bucket: torch.futures.Future())
    return ddp


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: wrapped(static_graph=True), "static_graph=True"),
        (lambda: with_hook(wrapped()), "hooks on gradients"),
        (lambda: with_state(wrapped()), "communication hook"),
    ],
)
def test_what_a_backward_of_zeros_would_change_is_left_alone_and_told(made, said):
    ddp = made()
    before = {name: weight.clone() for name, weight in ddp.state_dict().items()}
    order, why = resumed({"0": [1, 0, 2]}, ddp)
    assert why.startswith(UNKNOWN) and said in why and order.saved == {}
    assert all(torch.equal(weight, before[name]) for name, weight in ddp.state_dict().items())


@pytest.mark.parametrize("made", [lambda: wrapped(static_graph=True), lambda: wrapped(Net(is_sparse=True))])
def test_that_an_order_is_not_known_is_saved(made):
    saved = learned(made())
    assert saved == {"0": None} and resumed(saved, made())[1]


def test_one_that_keeps_its_buckets_needs_nothing():
    ddp = wrapped(find_unused_parameters=True)
    assert resumed({}, ddp)[1] == resumed(None, ddp)[1] == ""


def test_one_that_the_script_makes_in_the_first_step_is_told_and_no_old_one_kept():
    net = Net()
    ddp = wrapped(net)
    order, why = resumed({"0": [1, 0, 2]}, net)
    assert why == ""
    old = weakref.ref(ddp)
    del ddp
    new = wrapped(net)
    step(new)
    assert "made its DDP in the first step" in order.learn([net]) and order.saved == {"0": [1, 0, 2]}
    gc.collect()
    assert old() is None


def test_two_ranks_have_nothing_to_keep():
    order = BucketOrder(ranks=2)
    order.resume({"0": [1, 0, 2]})
    assert not order.is_resumed and not order.is_learning and order.saved is None
