"""Which objects of a script are state that nobody tracks. Each test is a small training; none may be blamed for what it saves.

PYTEST_DONT_REWRITE: a rewritten assertion calls locals(), and such a function is not searched.
"""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from kgorch.worker.audit.untracked_state import UntrackedState, is_array
from kgorch.worker.optimizer_steps import OptimizerSteps


class Training:
    """The SDK's part: a look after each step."""

    def __init__(self, **tracked):
        self.tracked, self.found = tracked, []
        self._state, self._steps = UntrackedState(), OptimizerSteps()
        self._steps.begin()

    def step(self, *, generators=(), is_resumed=False):
        self.found = self._state.look(self.tracked, self._stepped(), generators, is_resumed=is_resumed)

    def _stepped(self):
        """Not in a variable of `step`, where the search would find it."""
        return self._steps.take_stepped()


@pytest.fixture
def net():
    return nn.Linear(3, 2)


@pytest.fixture
def optimizer(net):
    return torch.optim.AdamW(net.parameters(), 0.1)


def train(net, *optimizers):
    net(torch.ones(4, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_a_training_that_tracks_all_is_not_blamed(net, optimizer):
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    )  # fmt: skip
    parts, ema = scheduler._schedulers, AveragedModel(net)
    frozen, history, names = nn.Linear(3, 2), [], {"a": 1}
    training = Training(net=net, optimizer=optimizer, scheduler=scheduler, ema=ema)
    for number in range(4):
        batch = torch.rand(4, 3)
        loss = net(batch).sum() + frozen(batch).sum()
        loss.backward()
        optimizer.step()
        gradients = [weight.grad for weight in net.parameters()]
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()
        ema.update_parameters(net)
        history.append(loss.detach())
        training.step()
        assert training.found == [], (number, parts, gradients, names)


def test_an_optimizer_that_steps_again_and_is_not_tracked_is_named(net, optimizer):
    training = Training(net=net)
    for _ in range(2):
        train(net, optimizer)
        training.step()
    assert training.found == ["optimizer `optimizer` (AdamW)"]


def test_an_optimizer_that_every_step_makes_anew_is_no_state(net):
    training = Training(net=net)
    for _ in range(3):
        inner = torch.optim.Adam(net.parameters(), 0.1)
        train(net, inner)
        training.step()
        assert training.found == []


def test_an_optimizer_without_state_is_named_only_where_a_schedule_changes_it(net):
    plain, training = torch.optim.SGD(net.parameters(), 0.1), Training(net=net)
    for _ in range(2):
        train(net, plain)
        training.step()
    assert training.found == []
    schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    for _ in range(2):
        train(net, plain)
        schedule.step()
        training.step()
    assert training.found == ["optimizer `plain` (SGD)", "`schedule` (ExponentialLR)"]


class Everything:
    """Saves an optimizer, and a module's tensors as copies."""

    def __init__(self, optimizer, module):
        self.optimizer, self.module = optimizer, module

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "copy": [value.clone() for value in self.module.parameters()]}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_what_a_tracked_object_of_the_script_saves_is_held(net, optimizer):
    teacher = copy.deepcopy(net)
    training = Training(net=net, everything=Everything(optimizer, teacher))
    for _ in range(3):
        train(net, optimizer)
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), net.parameters(), strict=True):
                mine.lerp_(its, 0.5)
        training.step()
        assert training.found == []


class Counts:
    """Refers to an optimizer and saves a number."""

    def __init__(self, optimizer):
        self.optimizer, self.number = optimizer, 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        raise NotImplementedError


def test_a_tracked_object_that_saves_numbers_alone_holds_no_optimizer(net, optimizer):
    training = Training(net=net, counts=Counts(optimizer))
    for _ in range(2):
        train(net, optimizer)
        training.step()
    assert training.found == ["optimizer `optimizer` (AdamW)"]


class Average:
    """An average of the weights as many scripts write it."""

    def __init__(self, net):
        self.shadow = {name: value.detach().clone() for name, value in net.named_parameters()}

    def update(self, net):
        for name, value in net.named_parameters():
            self.shadow[name].data.mul_(0.9).add_(value.data, alpha=0.1)


class SlottedAverage:
    __slots__ = ("shadow",)
    __init__, update = Average.__init__, Average.update


@pytest.mark.parametrize("kind", [Average, SlottedAverage])
def test_an_average_of_the_weights_is_named_whether_a_module_or_a_dict_in_an_object(net, optimizer, kind):
    ema, average = AveragedModel(net), kind(net)
    training = Training(net=net, optimizer=optimizer)
    for _ in range(2):
        train(net, optimizer)
        ema.update_parameters(net)
        average.update(net)
        training.step()
    assert training.found == ["`ema` (AveragedModel)", "`average.shadow` (2 tensors)"]


def test_a_tensor_of_an_object_in_a_dict_is_named_by_its_whole_path(net, optimizer):
    holders = {"a": SlottedAverage(net), "b": [torch.zeros(2), torch.zeros(2)]}
    holders["a"].shadow = torch.zeros(2)
    training = Training(net=net, optimizer=optimizer)
    for _ in range(2):
        train(net, optimizer)
        holders["a"].shadow.add_(1)
        torch._foreach_add_(holders["b"], 1)
        training.step()
    assert training.found == ["`holders['a'].shadow` (tensor)", "`holders['b']` (2 tensors)"]


def test_a_scaler_a_generator_and_a_tensor_are_named_and_what_rests_is_not(net, optimizer):
    scaler, chance, draws = torch.amp.GradScaler("cpu"), torch.Generator(), np.random.default_rng(1)
    total, idle = torch.zeros(1), random.Random(5)
    training = Training(net=net, optimizer=optimizer)
    for _ in range(2):
        scaler.scale(net(torch.rand(4, 3, generator=chance) + draws.random()).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        total += 1
        training.step()
    assert training.found == [
        "`scaler` (GradScaler)",
        "`chance` (Generator)",
        "`draws` (Generator)",
        "`total` (tensor)",
    ]
    training.step(generators=[chance])
    assert "`chance` (Generator)" not in training.found and idle.random()


def test_a_schedule_that_the_script_sets_after_a_resume_is_its_own_affair(net, optimizer):
    optimizer.param_groups[0]["initial_lr"] = 0.1
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, last_epoch=7)
    training = Training(net=net, optimizer=optimizer)
    for _ in range(2):
        train(net, optimizer)
        schedule.step()
        training.step(is_resumed=True)
    assert training.found == []


def test_a_loader_that_nobody_follows_is_found_and_one_of_an_evaluation_is_not(net):
    data, state = DataLoader(TensorDataset(torch.rand(12, 3)), 2, shuffle=True), UntrackedState()
    assert [state.reads_unknown_loader() for _ in data] == [False, True, True, True, True, True]
    for _ in range(3):
        assert len(list(data)) == 6 and not state.reads_unknown_loader()


def test_a_function_that_reads_its_locals_keeps_them_as_they_are(net, optimizer):
    training = Training(net=net, optimizer=optimizer)

    def script(steps):
        given = locals()
        for _ in range(steps):
            train(net, optimizer)
            training.step()
        return given

    assert script(2).keys() >= {"steps"} and "_" not in script(2)


def test_a_look_keeps_no_batch_alive(net, optimizer):
    import weakref

    training = Training(net=net, optimizer=optimizer)

    def script():
        batch = torch.rand(4, 3)
        known = weakref.ref(batch)
        training.step()
        del batch
        return known

    assert script()() is None


def test_a_mapped_file_is_never_read_and_what_cannot_change_is_no_state(tmp_path):
    """Some thousand pages of a file of tokens, from a disk far away, at each look."""
    mapped = np.memmap(tmp_path / "tokens.bin", np.uint16, "w+", shape=(1000,))
    fixed, own = np.ones(3), np.ones((3, 4))
    fixed.flags.writeable = False
    views = mapped[5:], np.asarray(mapped), np.asarray(mapped)[3:], np.frombuffer(b"abcd", np.uint8)
    assert not any(map(is_array, (mapped, *views, fixed, torch.ones(2), [1.0], np.array(["a"]))))
    assert is_array(own) and is_array(own[1:, ::2])


def test_an_array_that_a_script_changes_is_named_once_it_has(net, optimizer):
    training, table, fixed = Training(net=net, optimizer=optimizer), np.zeros((64, 40)), np.ones(5)
    for number in range(3):
        train(net, optimizer)
        table[number::7, 3] += 1
        training.step()
        assert training.found == (["`table` (ndarray)"] if number else []), fixed
