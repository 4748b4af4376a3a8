"""Loops of a script that runs alone: where epochs and steps may stand, and what a wrong place says."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from kgorch.errors import KgorchError
from kgorch.worker import attach


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("KGORCH_LAUNCH", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with attach(seed=1) as made:
        yield made
    assert not dist.is_initialized()


@pytest.fixture
def loader(session):
    return session.loader(torch.utils.data.TensorDataset(torch.arange(12.0)[:, None]), 4)


def test_epochs_and_steps_count_what_they_give(session, loader):
    assert [len(list(session.steps(loader))) for _ in session.epochs(3)] == [3, 3, 3]
    assert len(list(session.steps(loader, 2))) == 6
    assert not session.supervised and session.rank == 0 and session.world_size == 1


def test_steps_outside_of_an_epoch_say_how_to_write_it(session, loader):
    with pytest.raises(KgorchError, match="outside of an epoch"):
        list(session.steps(loader))


def test_steps_twice_in_one_epoch_are_refused(session, loader):
    for _ in session.epochs(1):
        list(session.steps(loader))
        with pytest.raises(KgorchError, match="twice in one"):
            list(session.steps(loader))


def test_a_loop_that_is_left_early_does_not_take_from_the_next_one(session, loader):
    for epoch in session.epochs(40):
        list(session.steps(loader))
        if epoch == 5:
            break
    assert [len(list(session.steps(loader))) for _ in session.epochs(3)] == [3, 3, 3]


def test_backward_in_microbatches_gives_the_gradient_of_the_whole_batch(session, monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1).double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 1).double()
    gradients, losses = [], []
    for size in (None, 2):
        monkeypatch.setattr(type(session._runner), "microbatch", size)
        net.zero_grad()
        losses.append(session.backward((x, y), lambda part: (net(part[0]) - part[1]).square().mean()))
        gradients.append(net.weight.grad.clone())
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-12, atol=0)
    assert losses[0].item() == pytest.approx(losses[1].item())


@pytest.mark.parametrize("value", [torch.ones(3), "high", None, [1]])
def test_a_metric_that_is_no_number_is_refused_where_it_is_reported(session, value):
    with pytest.raises(KgorchError, match=r"session\.report\(dice=…\)"):
        session.report(dice=value)
    session.report(dice=torch.tensor([0.5]), loss=1, rate=float(os.cpu_count() or 1))


def test_track_names_what_has_no_state(session):
    with pytest.raises(KgorchError, match="has no state_dict"):
        session.track(model=3)
    lazy = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(1))
    with pytest.raises(KgorchError, match=r"net\.1\.weight has no shape yet"):
        session.track(net=lazy)
    lazy(torch.ones(1, 2))
    session.track(net=lazy)
