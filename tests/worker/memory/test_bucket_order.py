"""The order in which DDP sums its gradients, over a resume: of real reducers, whose group is this process alone.

That the sums of three ranks have the same bits is seen in tests/sessions/test_own_loops.py and by the storm.
"""

from __future__ import annotations

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
    """A group of one rank, taken for one of three."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = bucket_order.ddp_drain.find
    monkeypatch.setattr(bucket_order, "_found", lambda modules: [ddp for ddp in found(modules) if _orders(ddp)])
    yield
    dist.destroy_process_group()


def _orders(ddp: DistributedDataParallel) -> bool:
    return ddp.static_graph or not ddp.find_unused_parameters


def wrapped(net: nn.Module | None = None, **options) -> DistributedDataParallel:
    return DistributedDataParallel(net or Net(), bucket_cap_mb=0.0002, **options)


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.tensor([1, 2])).sum().backward()


def buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """Numbers of its parameters, as it will reduce them."""
    number = {id(weight): index for index, weight in enumerate(ddp.module.parameters())}
    return [[number[id(weight)] for weight in item.parameters()] for item in ddp.reducer._get_zeros_like_grad_buckets()]


def resumed(saved: object, ddp: DistributedDataParallel, *more: nn.Module) -> tuple[BucketOrder, str]:
    order = BucketOrder(ranks=3)
    order.resume(saved)
    return order, order.restore([ddp, *more])


def learned(*ddps: DistributedDataParallel) -> list[int] | None:
    order = BucketOrder(ranks=3)
    for ddp in ddps:
        step(ddp)
    assert order.learn(ddps) == "" and not order.is_learning
    return order.indices


@pytest.mark.parametrize("as_view", [False, True])
def test_a_resumed_ddp_has_the_buckets_of_the_second_step_before_its_first_one(as_view):
    before, after = wrapped(gradient_as_bucket_view=as_view), wrapped(gradient_as_bucket_view=as_view)
    assert buckets(before) != [[1, 0], [2]]
    saved = learned(before)
    step(before)
    assert saved == [1, 0, 2] and buckets(before) == [[1, 0], [2]]
    order, why = resumed(saved, after)
    assert (why, buckets(after), order.indices) == ("", [[1, 0], [2]], saved)
    assert all(weight.grad is None for weight in after.parameters())
    assert not order.is_resumed and order.learn([after]) == "" and not order.is_learning
    step(after)
    step(after)
    assert order.indices == saved


def test_another_order_than_that_of_the_backward_is_built_as_it_was_saved():
    after = wrapped()
    assert resumed([2, 0, 1], after)[1] == "" and buckets(after) == [[2], [0], [1]]
    step(after)
    step(after)
    assert buckets(after) == [[2], [0], [1]]


def test_gradients_that_wait_are_the_same_afterwards():
    after = wrapped()
    after.module.second.bias.grad = waiting = torch.ones(9)
    assert resumed([1, 0, 2], after)[1] == ""
    assert after.module.second.bias.grad is waiting and waiting.eq(1).all()


def test_the_script_may_have_tracked_the_module_inside():
    after = wrapped()
    order = BucketOrder(ranks=3)
    order.resume([2, 0, 1])
    assert order.restore([after.module]) == "" and buckets(after) == [[2], [0], [1]]


@pytest.mark.parametrize(("saved", "said"), [([1, 0, 2], ""), ([2, 0, 1], "has called backward before it")])
def test_one_that_has_reduced_before_the_first_step_is_compared(saved, said):
    """Accelerate's epochs that are done have a batch again after a resume."""
    ddp = wrapped()
    step(ddp)
    order, why = resumed(saved, ddp)
    assert why.endswith(said) and bool(why) is bool(said) and buckets(ddp) == [[1, 0], [2]]
    step(ddp)
    assert order.learn([ddp]) == ""


def test_one_that_had_reduced_nothing_yet_learns_its_order_later():
    first, second = wrapped(), wrapped()
    saved = learned(first)
    order, why = resumed(saved, first, second)
    assert (why, order.indices) == ("", saved)
    step(first)
    assert order.learn([first, second]) == "" and order.is_learning
    step(second)
    assert order.learn([first, second]) == "" and not order.is_learning
    assert order.indices == [*saved, 4, 3, 5]


def test_gradients_that_a_script_sums_without_reducing_them_are_no_order():
    ddp, order = wrapped(), BucketOrder(ranks=3)
    with ddp.no_sync():
        step(ddp)
    assert order.learn([ddp]) == "" and order.is_learning and order.indices == []
    step(ddp)
    assert order.learn([ddp]) == "" and order.indices == [1, 0, 2]


@pytest.mark.parametrize("saved", [None, {"a": 1}, 7, [0], [0, 1, "2"], [0, 1, True], [0, 1, 2.0], [0, 1, 99]])
def test_what_a_checkpoint_does_not_hold_is_told(saved):
    ddp = wrapped()
    was = buckets(ddp)
    order, why = resumed(saved, ddp)
    assert why == f"{UNKNOWN}: {NOT_SAVED}"
    assert (buckets(ddp), order.indices) == (was, [])
    step(ddp)
    assert order.learn([ddp]) == "" and order.indices == [1, 0, 2]


def with_hook(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.module.second.bias.register_post_accumulate_grad_hook(lambda weight: weight.data.add_(1))
    return ddp


def with_state(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.register_comm_hook([0], lambda state, bucket: torch.futures.Future())
    return ddp


def with_frozen(ddp: DistributedDataParallel) -> DistributedDataParallel:
    ddp.module.second.bias.requires_grad_(False)
    return ddp


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: wrapped(static_graph=True), "static_graph=True"),
        (lambda: wrapped(Net(is_sparse=True)), "sparse gradients"),
        (lambda: with_hook(wrapped()), "hooks on gradients"),
        (lambda: with_state(wrapped()), "communication hook"),
        (lambda: with_frozen(wrapped()), "frozen"),
    ],
)
def test_what_a_backward_of_zeros_would_change_is_left_alone_and_told(made, said):
    ddp = made()
    before = {name: weight.clone() for name, weight in ddp.state_dict().items()}
    order, why = resumed([1, 0, 2], ddp)
    assert why.startswith(UNKNOWN) and said in why and order.indices == []
    assert all(torch.equal(weight, before[name]) for name, weight in ddp.state_dict().items())


def test_one_that_keeps_its_buckets_needs_nothing():
    ddp = wrapped(find_unused_parameters=True)
    assert resumed([], ddp)[1] == resumed(None, ddp)[1] == ""


def test_one_that_the_script_makes_in_the_first_step_is_told():
    net = Net()
    order, why = resumed([1, 0, 2], net)
    assert why == ""
    ddp = wrapped(net)
    step(ddp)
    assert "made its DDP in the first step" in order.learn([net]) and order.indices == [1, 0, 2]


def test_two_ranks_have_nothing_to_keep():
    order = BucketOrder(ranks=2)
    order.resume([1, 0, 2])
    assert not order.is_resumed and not order.is_learning and order.indices is None
