"""Whether all ranks hold the same weights, by a sample of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from kgorch.worker.checkpoint import replicas


def model(seed: int = 0, **kind) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Embedding(10, 4), nn.Linear(4, 200)).to(**kind)


@pytest.mark.parametrize(
    "kind", [{}, {"memory_format": torch.channels_last}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}]
)
def test_the_digest_is_of_the_values(kind):
    mine = replicas.digest(model(**kind).parameters())
    assert len(mine) == 2 and mine == replicas.digest(model(**kind).parameters())
    assert mine != replicas.digest(model(1, **kind).parameters())
    channels_last = replicas.digest(model(memory_format=torch.channels_last).parameters())
    assert channels_last == replicas.digest(model().parameters()), "whatever the order in memory"


class Odd(torch.Tensor):
    """As the weights of a library for quantisation."""

    def __getitem__(self, index):
        raise NotImplementedError


def test_what_has_no_plain_values_is_left_out():
    odd = [nn.LazyLinear(3).weight, torch.zeros(0), torch.ones(3, dtype=torch.int64), torch.eye(3).to_sparse()]
    odd += [nn.Parameter(torch.empty(3, device="meta")), nn.Parameter(Odd(torch.ones(3)))]
    assert replicas.digest(odd) == replicas.digest([])
    assert replicas.digest([*odd, torch.tensor(1.0)]) != replicas.digest([*odd, torch.tensor(2.0)])


def test_each_of_many_weights_may_be_the_one_that_differs_in_a_large_part():
    weights = [torch.full((3, 3), float(number)) for number in range(1000)]
    assert (
        len(
            {
                replicas.digest(weights),
                replicas.digest([weight + (number % 3) for number, weight in enumerate(weights)]),
            }
        )
        == 2
    )


@pytest.mark.parametrize("theirs", [b"\x00\xff", b"\x07\x05", b"\x05\x07", b"\x00\x00"])
def test_ranks_are_the_same_where_all_bytes_are(theirs):
    for mine in (theirs, b"\x07\x07", b"\xff\x00"):
        votes = iter(
            [
                number
                for one, other in zip(mine, theirs, strict=True)
                for number in (max(one, other), 255 - min(one, other))
            ]
        )
        assert replicas.is_same(mine, lambda flag, votes=votes: next(votes)) == (mine == theirs)


def test_a_trained_head_on_a_frozen_model_is_looked_at():
    frozen = [torch.full((3,), float(number)) for number in range(312)]
    heads = [[nn.Parameter(torch.full((3,), value)) for _ in range(2)] for value in (1.0, 2.0)]
    assert replicas.digest([*frozen, *heads[0]]) != replicas.digest([*frozen, *heads[1]])


def test_the_modules_that_differ_are_named_and_an_average_that_has_not_begun_is_not_one():
    def voting(*theirs: nn.Module):
        """The votes of two ranks, of which the other one has these modules."""
        digests = b"".join(replicas.digest(module.parameters()) for module in theirs)
        flags = iter([flag for byte in digests for flag in (byte, 255 - byte)])
        return lambda flag: max(flag, next(flags))

    things = {
        "net": model(),
        "swa": AveragedModel(model()),
        "optimizer": torch.optim.SGD([torch.ones(1)], 0.1),
        "head": model(2),
    }
    assert replicas.differing(things, voting(model(), model(2))) == []
    assert replicas.differing({"head": model(2)}, voting(model(1))) == ["head"]
    things["swa"].update_parameters(model())
    assert replicas.differing(things, voting(model(), model(), model(2))) == [], "it has begun, and is the same"


def test_the_note_also_names_training_that_averages_weights_now_and_then():
    """Its model is wrapped: "wrap the model" was no advice."""
    said = replicas.DIFFER.format("model0")
    assert "is not wrapped in DistributedDataParallel" in said and "every few steps (local SGD" in said
