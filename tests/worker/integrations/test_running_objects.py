"""What variables of a script around Accelerate hold goes on: its objects with their lists and tensors, averages of the weights."""

from __future__ import annotations

import copy
import gc
import time
import weakref

import pytest
import torch
from cut_session import Cut
from small_trainings import numbers, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


def prepared(accelerator, count: int = 10):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    return accelerator.prepare(model, optimizer, DataLoader(numbers(count), 2, shuffle=True))


class Shadow:
    """An average by hand."""

    def __init__(self, model):
        self.weights, self.updates = [weight.detach().clone() for weight in model.parameters()], 0

    def update(self, model):
        self.updates += 1
        for mean, weight in zip(self.weights, model.parameters(), strict=True):
            mean.mul_(0.9).add_(weight.detach(), alpha=0.1)


class Diffusion:
    """As the trainers of diffusion models: a count of steps, a history, an average, batches without an end."""

    def __init__(self, accelerator):
        self.accelerator, self.step, self.losses, self.best = accelerator, 0, [], None
        self.model, self.optimizer, loader = prepared(accelerator)
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.batches, self.shadow = self.endless(loader), Shadow(self.model)

    def endless(self, loader):
        while True:
            yield from loader

    def train(self, steps):
        while self.step < steps:
            train_batch(self.accelerator, self.model, self.optimizer, next(self.batches))
            with torch.no_grad():
                for mean, weight in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(weight, 0.5)
            self.shadow.update(self.model)
            self.losses.append(float(self.model.weight))
            self.best = min(self.losses)
            self.step += 1
        return self


@pytest.mark.parametrize("cut_at", [1, 4, 5, 8, 13])
def test_a_trainer_of_the_scripts_own_goes_on_with_its_history_and_averages(accelerated, cut_at):
    """Its count of steps began anew for the sake of its list, and its average was lost."""

    def script(accelerator):
        trained = Diffusion(accelerator).train(17)
        shadow = [weight.tolist() for weight in trained.shadow.weights]
        weights = weights_of(trained.model), weights_of(trained.ema), shadow
        return trained.step, trained.best, trained.losses, trained.shadow.updates, weights

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and steps == whole[0] == len(whole[2]) == 17
    assert not {"objects", "attributes"} & accelerated.session.exactness.keys()


@pytest.mark.parametrize("cut_at", [3, 5, 9])
def test_averages_schedules_and_generators_in_variables_go_on(accelerated, cut_at):
    def trained(accelerator, model, optimizer, loader, average, schedule, chance):
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
                average.update_parameters(model)
                schedule.step()
                torch.rand(1, generator=chance)

    def script(accelerator):
        model, optimizer, loader = prepared(accelerator)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        spare, chance = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0), torch.Generator().manual_seed(1)
        schedule = torch.optim.lr_scheduler.StepLR(spare, 4)
        trained(accelerator, model, optimizer, loader, average, schedule, chance)
        drawn = torch.rand(1, generator=chance).item()
        return weights_of(model), weights_of(average), schedule.last_epoch, schedule.get_last_lr(), drawn

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and whole[1][2] == 15


class Meter:
    """Of one epoch."""

    def __init__(self, has_list):
        self.total, self.count, self.values = 0.0, 0, [] if has_list else None

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1
        if self.values is not None:
            self.values.append(value)


@pytest.mark.parametrize("cut_at", [2, 6, 8, 10, 13])
@pytest.mark.parametrize("has_list", [False, True])
def test_meters_that_each_epoch_makes_anew_have_the_values_of_their_epoch_alone(accelerated, cut_at, has_list):
    def train_epoch(accelerator, model, optimizer, loader):
        meter = Meter(has_list)
        for batch in loader:
            train_batch(accelerator, model, optimizer, batch)
            meter.update(float(model.weight))
        return meter.total, meter.count, meter.values

    def script(accelerator):
        model, optimizer, loader = prepared(accelerator)
        return [train_epoch(accelerator, model, optimizer, loader) for _ in range(3)]

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    cut = cut_at // 5
    assert resumed[cut:] == whole[cut:]


def test_an_object_that_is_gone_is_held_no_longer(accelerated):
    held = []

    def train_epoch(accelerator, model, optimizer, loader):
        meter = Meter(True)
        held.append(weakref.ref(meter))
        for batch in loader:
            train_batch(accelerator, model, optimizer, batch)
            meter.update(1.0)

    def script(accelerator):
        model, optimizer, loader = prepared(accelerator)
        for _ in range(3):
            train_epoch(accelerator, model, optimizer, loader)

    with pytest.raises(Cut):
        accelerated(script, 12)
    gc.collect()
    assert len(held) == 3 and held[0]() is held[1]() is None


def test_a_switch_of_a_session_and_a_handle_stay_its_own_and_what_cannot_be_saved_stays_whole(accelerated):
    """The flag of a handler of signals would end each session that follows."""

    class Killer:
        def __init__(self):
            self.now, self.handle, self.seen, self.lines = False, None, [], {"a"}

        def note(self, step):
            self.now, self.handle = True, 7
            self.seen.append(step)
            self.lines.add(str(step))

    class Plain:
        def __init__(self):
            self.now, self.handle, self.seen = False, None, []

        def note(self, step):
            self.now, self.handle = True, 7
            self.seen.append(step)

    def script(accelerator):
        killer, plain = Killer(), Plain()
        model, optimizer, loader = prepared(accelerator)
        began = None
        for _ in range(3):
            for step, batch in enumerate(loader):
                train_batch(accelerator, model, optimizer, batch)
                began = began or (plain.now, plain.handle)
                killer.note(step)
                plain.note(step)
        return began, len(plain.seen), len(killer.seen)

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    resumed = accelerated(script, saved=cut.value.saved)[1]
    assert resumed[1] == 15 and resumed[2] < 15
    objects = cut.value.saved._own["own"]["attributes"]["objects"]
    saved = {label.rpartition(".")[2]: parts for label, *parts in objects}
    assert saved["Plain plain"][0].keys() == {"seen"} and saved["Killer killer"] == []


@pytest.mark.parametrize("cut_at", [6, 8, 11])
def test_what_is_as_it_began_comes_back_all_the_same(accelerated, cut_at):
    """The epochs that are run through once more have changed it, and nothing was there to put back."""

    class Stopper:
        def __init__(self):
            self.best, self.bad, self.seen, self.sums = 0.0, [], 0, [0.0, 0.0]

        def note(self, value, is_better):
            self.seen += 1
            if is_better:
                self.best, self.bad = value, []
            else:
                self.bad.append(value)

    def script(accelerator):
        stopper = Stopper()
        model, optimizer, loader = prepared(accelerator)
        told = []
        for epoch in range(3):
            for number, batch in enumerate(loader):
                train_batch(accelerator, model, optimizer, batch)
                stopper.note(number, epoch == 1)
            told.append((stopper.best, list(stopper.bad), stopper.seen))
        return told[-1]

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole


def test_an_object_gets_nothing_of_another_one_of_its_class(accelerated):
    class Seen:
        def __init__(self):
            self.values = []

    def script(accelerator):
        best, current = None, Seen()
        model, optimizer, loader = prepared(accelerator)
        steps = 0
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
                steps += 1
                current.values.append(steps)
                if steps == 7:
                    best = Seen()
                    best.values = [100, 101]
        return current.values, best and best.values

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, 9)
    assert resumed[0] == whole[0] == list(range(1, 16))


def test_flags_and_clocks_in_tables_and_data_stay_the_sessions(accelerated):
    class Data(Dataset):
        def __init__(self):
            self.reads, self.cache = 0, {}

        def __len__(self):
            return 10

        def __getitem__(self, index):
            self.reads += 1
            self.cache[index] = torch.tensor([float(index)])
            return (self.cache[index],)

    class Session:
        def __init__(self, data):
            self.data, self.flags, self.starts, self.values = data, {"stop": False}, {}, []

        def note(self):
            self.flags["stop"], self.starts["epoch"] = True, time.perf_counter()
            self.values.append(1.0)

    def script(accelerator):
        model = nn.Linear(1, 1)
        data = Data()
        held = Session(data)
        loader = DataLoader(data, 2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
                held.note()
        return len(held.values)

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    objects = {
        label.rpartition(".")[2]: parts for label, *parts in cut.value.saved._own["own"]["attributes"]["objects"]
    }
    assert [*objects] == ["Session held"] and objects["Session held"][0].keys() == {"values"}
    assert accelerated(script, saved=cut.value.saved)[1] == 15


def test_odd_objects_end_no_training_and_cost_nothing_else(accelerated):
    class Odd(dict):
        def items(self):
            raise RuntimeError("not now")

    class Holds:
        def __init__(self):
            self.odd, self.values = Odd(a=1), []

    def script(accelerator):
        holds, lazy, chance = Holds(), nn.LazyLinear(2), torch.Generator().manual_seed(1)
        model, optimizer, loader = prepared(accelerator)
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
                holds.odd["b"] = torch.rand(1, generator=chance)
        return torch.rand(1, generator=chance).item(), lazy.in_features

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, 8)
    assert resumed == whole
