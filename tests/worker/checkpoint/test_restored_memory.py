"""The memory of restored tensors: on a CPU the bits of a sum depend on where its terms lie."""

from __future__ import annotations

import functools

import pytest
import torch
from saving import Place, save
from torch import nn

from kgorch.worker import local_tensors
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.checkpoint.restore_source import FolderSource
from kgorch.worker.checkpoint.resumed_state import ResumedState

ODD = 146
"""Values of a tensor that does not fill its last cache line, so that those behind it in a shard begin within one."""


@pytest.fixture
def on_disk(tmp_path):
    """Saves what is tracked, and returns the checkpoint."""
    place = Place(tmp_path)
    place.start_keeper()

    def on_disk(tracked) -> FolderSource:
        saver = place.saver()
        assert save(saver, tracked, 1) and saver.wait()
        return FolderSource(place.root / "step-00000001")

    yield on_disk
    place.kill_keeper()


def resume(tracked, source: FolderSource) -> None:
    tree = source.tree | source.own(0)["own"]
    state_codec.restore(tracked, tree, state_codec.fetch_for(tracked, tree, source.reader(0)))


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % local_tensors.ALIGNMENT == 0


def test_an_optimizer_that_sums_over_its_history_goes_on_from_disk_with_the_same_bits(on_disk):
    torch.manual_seed(0)
    inputs = [torch.randn(16, 6) for _ in range(30)]

    def built():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), 0.05, max_iter=4, history_size=5)}

    def train(tracked, steps):
        def closure(x):
            tracked["optimizer"].zero_grad()
            loss = nn.functional.cross_entropy(tracked["model"](x), (x[:, 0] * x[:, 1] > 0).long())
            loss.backward()
            return loss

        for x in inputs[steps]:
            tracked["optimizer"].step(functools.partial(closure, x))

    whole, resumed = built(), built()
    train(whole, slice(15))
    resume(resumed, on_disk(whole))
    for tracked in (whole, resumed):
        train(tracked, slice(15, 30))
    assert all(map(torch.equal, whole["model"].parameters(), resumed["model"].parameters()))


class Holder:
    """An object that keeps what it is given."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, loaded):
        self.state = loaded


class Keeper(nn.Module):
    """A module that keeps a buffer and further state as it is given them, and notes where its weights came from."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.randn(ODD)), torch.randn(ODD)
        self.register_buffer("bank", torch.randn(ODD))

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.given = state_dict[prefix + "weight"]
        self.bank = state_dict[prefix + "bank"]
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_restored_tensors_that_a_training_may_keep_are_aligned_and_weights_are_copied_once(on_disk):
    def built():
        model, one = Keeper(), torch.randn(ODD)
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "holder": Holder(a=one, b=[one, one[:3]]),
        }

    before, after = built(), built()
    before["model"].weight.grad = torch.ones(ODD)
    before["optimizer"].step()
    source = on_disk(before)
    resume(after, source)
    model, (moments,) = after["model"], after["optimizer"].state.values()
    a, (b, part) = after["holder"].state.values()
    looked_up = ResumedState(source, 0).state("holder")
    kept = [model.bank, model.extra, *moments.values(), a, b, part, looked_up["a"], *looked_up["b"]]
    assert all(map(is_aligned, kept)), [tensor.data_ptr() % 64 for tensor in kept]
    assert not is_aligned(model.given), "a weight is copied into the model: a further copy would take memory to no use"
    assert a is b and looked_up["a"] is looked_up["b"][0], "tied tensors are one"
    for one, other in zip(
        state_codec.capture(before).tensors.values(), state_codec.capture(after).tensors.values(), strict=True
    ):
        assert torch.equal(one, other)
