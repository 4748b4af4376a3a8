"""Scripts that use the SDK, cut at a step: the rest must be as in an uninterrupted training, or `exactness` says why not."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import tqdm
from cut_session import Cut, CutSession
from small_trainings import numbers, weights_of, whole_and_resumed
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

from kgorch.errors import CannotRestore
from kgorch.worker.checkpoint.trainable_weights import trainable

pytestmark = pytest.mark.usefixtures("alone")


def run(script, cut_at=None, saved=None):
    """A script, cut or as a continuation. Returns the session's steps and what the script returns."""
    torch.manual_seed(3)
    session = run.session = CutSession(cut_at, saved)
    returned = script(session)
    session.end()
    run.finished = session.saved(is_final=True)
    return session.step, returned


def assert_exact(script, cuts) -> None:
    for at in cuts:
        whole, resumed = whole_and_resumed(run, script, at)
        assert resumed == whole, at


def train(session, net, optimizer, batch) -> None:
    session.backward(batch, lambda part: ((net(part[0] / 10) - 1) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()


def trained(session, **further):
    """A network and its optimizer, tracked."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    session.track(net=net, optimizer=optimizer, **further)
    return net, optimizer


def test_random_generators_that_are_tracked_go_on():
    """`exactness` names one that is not, and says to give it to session.track()."""

    def script(session):
        made = {"own": np.random.default_rng(1), "old": np.random.RandomState(2), "python": random.Random(3)}
        made["torch"] = torch.Generator().manual_seed(4)
        net, optimizer = trained(session, **made)
        drawn = []
        for _ in session.epochs(3):
            for batch in session.steps(DataLoader(numbers(12), 2)):
                train(session, net, optimizer, batch)
                numbers_drawn = made["own"].uniform(), made["old"].normal(), made["python"].random()
                drawn = [*numbers_drawn, float(torch.rand((), generator=made["torch"]))]
        return weights_of(net), drawn

    assert_exact(script, [5, 7, 13])


def test_weights_that_are_pruned_in_the_course_of_a_training_go_on():
    """A new process has not pruned them: they have other names in the checkpoint."""

    def script(session):
        net = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        session.track(net=net, optimizer=optimizer)
        for epoch in session.epochs(3):
            for batch in session.steps(DataLoader(numbers(12), 2, shuffle=True)):
                train(session, net, optimizer, batch)
            prune.l1_unstructured(net[epoch % 2], "weight", 0.3)
        return sorted(net.state_dict()), weights_of(net), net[0].weight_mask.tolist()

    assert_exact(script, [5, 7, 13])


def test_tensors_that_are_named_as_those_of_a_pruned_weight_are_left_as_they_are():
    """As of a lottery ticket, which keeps the weights that it began with."""

    def script(session):
        net = nn.Linear(1, 4)
        net.register_buffer("weight_orig", net.weight.detach().clone())
        net.register_buffer("weight_mask", torch.ones_like(net.weight))
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        session.track(net=net, optimizer=optimizer)
        for batch in session.steps(DataLoader(numbers(12), 2, shuffle=True), 2):
            train(session, net, optimizer, batch)
        return sorted(net.state_dict()), weights_of(net)

    assert_exact(script, [5])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_set_that_is_read_besides_its_steps_is_read_from_its_beginning(workers):
    """After a resume it began where the epoch had gone on, and gave nothing where that was its end."""

    def script(session):
        net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        optimizer, average = torch.optim.AdamW(net.parameters(), 0.1), AveragedModel(net)
        session.track(net=net, optimizer=optimizer, average=average)
        loader, losses = session.loader(numbers(12), 2, num_workers=workers), []
        for epoch in session.epochs(3):
            for batch in session.steps(loader):
                train(session, net, optimizer, batch)
            average.update_parameters(net)
            with torch.no_grad():
                losses += [net(x).sum().item() for (x,) in loader] if epoch == 2 else []
        update_bn(loader, average)
        return losses, [value.tolist() for value in average.state_dict().values()]

    assert_exact(script, (12, 14, 18) if workers else (3, 6, 12, 14, 17, 18))
    assert run(script, saved=run.finished)[1][1] == run(script)[1][1], "in what follows a training that is finished"


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_evaluation_whose_workers_stay_draws_the_same_in_each_session(is_shared):
    """A resumed session started its workers once more, and their seed was drawn from the generator of the training."""

    def script(session):
        net, optimizer = trained(session)
        generator = torch.Generator().manual_seed(1) if is_shared else None
        loader = DataLoader(numbers(12), 2, shuffle=True, generator=generator)
        kept = DataLoader(numbers(4), 2, shuffle=True, generator=generator, num_workers=1, persistent_workers=True)
        for _ in session.epochs(3):
            for batch in session.steps(loader):
                train(session, net, optimizer, batch)
            seen = [x.tolist() for (x,) in kept]
        return seen, weights_of(net), torch.rand(()).item()

    assert_exact(script, (3, 6, 7))


def endless(loader):
    while True:
        yield from loader


ORDERS = {
    "the followed one first": lambda steps, further: ((y, x) for (x,), (y,) in zip(further, steps, strict=False)),
    "steps first": lambda steps, further: ((x, y) for (x,), (y,) in zip(steps, further, strict=False)),
    "within the step": lambda steps, further: ((x, next(further)[0]) for (x,) in steps),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("in_one", [False, True])
def test_a_followed_loader_beside_the_steps_goes_on_at_its_batch(order, in_one):
    """Of a batch that the script had taken for the step that began, each cut lost one."""

    def script(session):
        net, optimizer = trained(session)
        loader = session.loader(numbers(6), 2)
        further = endless(session.follow(DataLoader(numbers(8), 2, shuffle=True)))
        for _ in range(1) if in_one else session.epochs(3):
            for x, y in ORDERS[order](session.steps(loader, 3 if in_one else None), further):
                train(session, net, optimizer, [x + y])
        return weights_of(net)

    assert_exact(script, (1, 2, 3, 4, 6, 9))


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "one within the steps"])
def test_loaders_that_are_not_read_together_go_on_at_their_batch_and_epoch(in_turn):
    """The batch of a step in the second loader counted as used, and `session.epoch` stood still."""

    def script(session):
        net, optimizer = trained(session)
        large, small, more = (session.follow(DataLoader(numbers(8), size, shuffle=True)) for size in (4, 2, 2))
        further = endless(more)
        for epoch in range(session.epoch, 5):
            for (x,) in (large, large, small, more, large)[epoch] if in_turn else large:
                session.boundary()
                assert session.epoch == epoch
                train(session, net, optimizer, [x + (0 if in_turn else next(further)[0].mean())])
        return weights_of(net), session.epoch

    assert_exact(script, range(1, 14 if in_turn else 10))


def sums(session, generator, discriminator, number):
    ((generator(torch.ones(2, 1)) - 1) ** 2).mean().backward()


def clears(session, generator, discriminator, number):
    """As most trainings of two networks do: what the loss of the one leaves in the other is cleared before it is used."""
    if number % 2:
        generator.zero_grad()
        ((discriminator(generator(torch.ones(2, 1))) - 1) ** 2).mean().backward()


def leaks(session, generator, discriminator, number):
    generator.zero_grad()
    ((discriminator(generator(torch.ones(2, 1))) - 1) ** 2).mean().backward()


@pytest.mark.parametrize(("kind", "is_told"), [(sums, True), (clears, False), (leaks, False)])
def test_gradients_that_are_summed_over_steps_of_another_optimizer_are_told(kind, is_told):
    """A save between them loses them."""
    generator, discriminator = nn.Linear(1, 1), nn.Linear(1, 1)
    ours, other = torch.optim.AdamW(generator.parameters()), torch.optim.SGD(discriminator.parameters(), 0.1)
    session = CutSession()
    session.track(generator=generator, discriminator=discriminator, ours=ours, other=other)
    for number, (x,) in enumerate(session.steps(session.loader(numbers(12), 2), 1)):
        other.zero_grad()
        (discriminator(x) ** 2).mean().backward()
        other.step()
        kind(session, generator, discriminator, number)
        if number % 2:
            ours.step()
            if kind is sums:
                ours.zero_grad()
    said = session.exactness.get("gradients", "")
    assert said.startswith("AdamW sums gradients over steps of another optimizer") if is_told else not said
    assert session.step == 6


def thaws(net):
    net[0].requires_grad_(False)
    return lambda: net[0].requires_grad_(True)


def freezes(net):
    return lambda: net[0].requires_grad_(False)


@pytest.mark.parametrize("begin", [thaws, freezes])
@pytest.mark.parametrize("wrapper", [lambda net: net, trainable])
def test_weights_that_a_script_thaws_or_freezes_at_an_epoch_stay_so(begin, wrapper):
    """A resume in a later epoch passes over that line of the script."""

    def script(session):
        net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        net[0].weight = net[1].weight  # tied
        net.append(nn.Linear(1, 1))
        change = begin(net)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        session.track(net=wrapper(net), optimizer=optimizer)
        for epoch in session.epochs(4):
            if epoch == 1:
                change()
            for batch in session.steps(session.loader(numbers(4), 2)):
                train(session, net, optimizer, batch)
        return weights_of(net), [weight.requires_grad for weight in net.parameters()]

    assert_exact(script, (2, 3, 4, 7))
    run(script, saved=run_until(script, 5))
    assert run.finished._own["requires_grad"], "of an earlier session"


def run_until(script, step):
    with pytest.raises(Cut) as cut:
        run(script, step)
    return cut.value.saved


@pytest.mark.parametrize("saved", [None, [], {}, {"net.weight": 3, "other": True}, {"net": {"weight": False}}])
def test_what_cannot_be_read_of_frozen_weights_changes_none(saved):
    def script(session):
        trained(session)
        return [weight.requires_grad for thing in session._state.tracked.modules() for weight in thing.parameters()]

    began = run(script)
    run.finished._own["requires_grad"] = saved
    assert run(script, saved=run.finished) == began == (0, [True, True])


def test_a_weight_that_cannot_have_a_gradient_is_refused():
    def script(session):
        net = nn.Linear(1, 1)
        net.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
        session.track(net=net)

    run(script)
    run.finished._own["requires_grad"] = {"net.codes": True}
    with pytest.raises(CannotRestore, match="codes"):
        run(script, saved=run.finished)


@pytest.mark.parametrize("loader_of", ["session", "own"])
@pytest.mark.parametrize("start", [0, 1])
def test_an_enumerate_around_the_steps_counts_on_so_gradients_are_accumulated_as_without_a_cut(loader_of, start):
    """Its count began anew: the optimizer stepped at other batches, and other weights came of it."""

    def script(session):
        net, optimizer = trained(session)
        data = numbers(14)
        loader = session.loader(data, 2) if loader_of == "session" else DataLoader(data, 2, shuffle=True)
        counted = -1
        for _ in session.epochs(3):
            batches = session.steps(loader)
            for number, batch in enumerate(batches, start):
                counted = number
                session.backward(batch, lambda part: ((net(part[0] / 10) - 1) ** 2).mean())
                if (number + 1 - start) % 3 == 0 or number + 1 - start == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
        return counted, weights_of(net)

    assert_exact(script, (1, 2, 4, 5, 8))


def test_an_enumerate_around_the_steps_of_all_epochs_counts_on_over_them():
    def script(session):
        net, optimizer = trained(session)
        steps = session.steps(session.loader(numbers(12), 2), 3)
        assert len(steps) == 18
        rates = []
        for number, batch in enumerate(steps):
            rates.append(number)
            train(session, net, optimizer, batch)
        return rates[-1]

    assert_exact(script, (1, 5, 6, 7, 17))


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_an_enumerate_that_begins_with_the_scripts_own_step_is_left_alone(offset):
    def script(session):
        net, optimizer = trained(session)
        counted = 0
        for number, batch in enumerate(session.steps(session.loader(numbers(12), 2), 3), session.step + offset):
            counted = number
            train(session, net, optimizer, batch)
        return counted

    assert_exact(script, (2, 5, 6, 7, 17))


@pytest.mark.parametrize("by_iteration", [False, True])
def test_what_a_step_hands_to_the_next_one_goes_on_where_it_is_held_as_the_page_says(by_iteration):
    """The hidden state of sequences that go on over several batches."""
    page = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(class Carried:.*?)```", page, re.DOTALL)[1], names)

    def script(session):
        net, head, carried = nn.RNN(1, 4), nn.Linear(4, 1), names["Carried"]()
        optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], 0.05)
        session.track(net=net, head=head, optimizer=optimizer, carried=carried)

        def batches():
            for number in range(session.step, 20):
                session.boundary()
                yield torch.full((3, 2, 1), number / 20)

        seen = []
        for item in batches() if by_iteration else session.steps(session.loader(numbers(20), 1), 1):
            x = item if by_iteration else item[0].reshape(1, 1, 1) / 20
            output, hidden = net(x, carried.value)
            ((head(output) - x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            carried.value = hidden.detach()
            seen.append(round(float(hidden.sum()), 6))
        return seen[-3:]

    assert_exact(script, (1, 7, 16))


def test_steps_of_a_loader_without_a_length_have_none():
    def script(session):
        with pytest.raises(TypeError, match="has no len"):
            len(session.steps(iter(())))
        steps = session.steps(iter(()))
        assert steps
        steps.close()
        return list(tqdm.tqdm(session.steps(session.loader(numbers(4), 2), 1), disable=True))

    assert len(run(script)[1]) == 2
