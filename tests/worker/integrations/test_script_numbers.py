"""Numbers in variables of a script around Accelerate go on where it does: counts of steps, best scores, sums of a cut epoch."""

from __future__ import annotations

import math
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tqdm
from cut_session import Cut
from small_trainings import numbers, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader

from kgorch.worker.integrations import accelerate_carrier, script_numbers

pytestmark = pytest.mark.usefixtures("alone")


def prepared(accelerator, *counts: int):
    model = nn.Linear(1, 1)
    loaders = [DataLoader(numbers(count), 2, shuffle=True) for count in counts]
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), *loaders)


@pytest.mark.parametrize(
    ("steps", "cut_at"),
    [(steps, cut_at) for steps in (12, 16, 18) for cut_at in (1, 4, 6, 7, 12, 14, 15) if cut_at < steps],
)
def test_a_training_ends_at_the_count_of_steps_that_the_script_has_set(accelerated, steps, cut_at):
    """As the examples of Transformers and Diffusers with --max_train_steps: three epochs of six steps, or a part of the last."""

    def script(accelerator):
        names = []
        model, optimizer, train = prepared(accelerator, 12)
        completed_steps = 0
        for _ in range(math.ceil(steps / len(train))):
            for batch in train:
                with accelerator.accumulate(model):
                    train_batch(accelerator, model, optimizer, batch)
                if accelerator.sync_gradients:
                    completed_steps += 1
                if completed_steps % 5 == 0:
                    names.append(f"step_{completed_steps}")
                if completed_steps >= steps:
                    break
            if completed_steps >= steps:
                break
        return completed_steps, weights_of(model), names

    (trained, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert trained == steps and resumed[:2] == whole[:2] and resumed[0] == steps
    assert resumed[2] == whole[2][cut_at // 5 :]


@pytest.mark.parametrize("cut_at", [3, 6, 8, 12, 14])
@pytest.mark.parametrize("is_divided", [False, True])
def test_the_best_score_and_the_sums_of_a_cut_epoch_go_on(accelerated, is_divided, cut_at):
    """In the script's one function, and in those that train an epoch and evaluate."""

    def trained_epoch(accelerator, model, optimizer, train):
        total, count = 0.0, 0
        for batch in train:
            total += ((model(batch[0] / 10) - 1) ** 2).mean().item()
            count += 1
            train_batch(accelerator, model, optimizer, batch)
        return total / count

    def evaluated(model, other):
        score = 0.0
        for batch in other:
            score += model(batch[0]).mean().item()
        return abs(score - 25.0)

    def divided(accelerator):
        best, best_epoch, patience, means = None, -1, 0, []
        model, optimizer, train, other = prepared(accelerator, 12, 6)
        for epoch in range(3):
            mean = trained_epoch(accelerator, model, optimizer, train)
            score = np.float64(evaluated(model, other))
            if best is None or score < best:
                best, best_epoch, patience = score, epoch, 0
            else:
                patience += 1
            means.append((mean, best, best_epoch, patience))
        return means[-1], weights_of(model)

    def whole(accelerator):
        best, best_epoch, means = math.inf, -1, []
        model, optimizer, train, other = prepared(accelerator, 12, 6)
        for epoch in range(3):
            total = 0.0
            for batch in train:
                total += ((model(batch[0] / 10) - 1) ** 2).mean().item()
                train_batch(accelerator, model, optimizer, batch)
            score = evaluated(model, other)
            if score < best:
                best, best_epoch = score, epoch
            means.append((total / len(train), best, best_epoch))
        return means[-1], weights_of(model)

    (_, first), (_, resumed) = whole_and_resumed(accelerated, divided if is_divided else whole, cut_at)
    assert resumed == first


def counted(epochs: int, limit: int = 1000):
    """A script that notes what it has at the beginning and at the end of each epoch."""

    def script(accelerator):
        notes, done = [], 0
        model, optimizer, train = prepared(accelerator, 12)
        for epoch in range(epochs):
            total, begun_at = 0, done
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                done += 1
                total += 1
                if done >= limit:
                    break
            notes.append((epoch, begun_at, total, done))
            if done >= limit:
                break
        return notes, weights_of(model)

    return script


def test_a_training_that_is_extended_goes_on_with_its_numbers(accelerated):
    _, whole = accelerated(counted(4))
    accelerated(counted(2))
    saved = accelerated.session.saved()
    assert accelerated(counted(4), saved=saved)[1][0][-2:] == whole[0][-2:] == [(2, 12, 6, 18), (3, 18, 6, 24)]


@pytest.mark.parametrize("limit", [8, 12])
def test_a_training_that_has_ended_at_its_count_is_over_when_it_is_started_again(accelerated, limit):
    steps, whole = accelerated(counted(5, limit))
    assert steps == limit
    saved = accelerated.session.saved(is_final=True)
    again = accelerated(counted(5, limit), saved=saved)[1]
    assert (again[0][-1][3], again[1]) == (limit, whole[1])


@pytest.mark.parametrize("cut_at", [8, 13, 26, 32])
@pytest.mark.parametrize("looks_before", [False, True])
def test_a_training_that_waits_for_a_better_score_is_not_ended_by_epochs_that_are_done(
    accelerated, looks_before, cut_at
):
    """Each of them has the score of the same weights, by one batch."""

    def evaluated(model, other) -> float:
        return sum(abs(model(batch[0]).mean().item() - 40) for batch in other)

    def trained(accelerator, model, optimizer, train, other, epochs):
        best, patience, scores = math.inf, 0, []
        for epoch in range(epochs):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            score = evaluated(model, other) if epoch < 5 else math.inf
            scores.append((epoch, score))
            if score < best:
                best, patience = score, 0
            else:
                patience += 1
            if patience >= 3:
                break
        return scores[-1], best, patience

    def script(accelerator):
        model, optimizer, train, other = prepared(accelerator, 12, 6)
        if looks_before:
            evaluated(model, other)
        return *trained(accelerator, model, optimizer, train, other, 20), weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 48 and resumed == whole


def bar(items):
    return tqdm.tqdm(items, disable=None)


AROUND = {
    "enumerate": enumerate,
    "enumerate from 1": lambda loader: enumerate(loader, 1),
    "enumerate of a bar": lambda loader: enumerate(bar(loader)),
    "bar of an enumerate": lambda loader: bar(enumerate(loader)),
}


@pytest.mark.parametrize("cut_at", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("around", AROUND)
def test_an_enumerate_counts_on_in_a_cut_epoch(accelerated, around, cut_at):
    """As the scripts that accumulate gradients themselves, and leave an epoch early."""

    def script(accelerator):
        counts, weights = [], []
        model, optimizer, train = prepared(accelerator, 24)
        for epoch in range(3):
            for step, batch in AROUND[around](train):
                counts.append((epoch, step))
                accelerator.backward(((model(batch[0] / 10) - 1) ** 2).mean() / 3)
                if step % 3 == 0 or step == len(train) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    weights.append(weights_of(model))
                if step == 10:
                    break
        return counts[-1], len(weights), weights[-1]

    (steps, (counts, updates, weights)), (again, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == again and resumed[0] == counts and resumed[2] == weights and resumed[1] < updates


@pytest.mark.parametrize("cut_at", [3, 7, 12, 18])
@pytest.mark.parametrize("counts", ["enumerate", "a variable"])
def test_epochs_that_become_longer_end_where_the_script_leaves_them(accelerated, counts, cut_at):
    def script(accelerator):
        model, optimizer, train = prepared(accelerator, 40)
        for epoch in range(3):
            count = 0
            for step, batch in enumerate(train):
                train_batch(accelerator, model, optimizer, batch)
                count = count + 1
                if (step + 1 if counts == "enumerate" else count) == 5 * (epoch + 1):
                    break
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert whole == resumed and whole[0] == 30


@pytest.mark.parametrize("cut_at", [2, 8])
def test_what_belongs_to_a_session_stays_as_it_is_there(accelerated, capfd, cut_at):
    sessions, took_s = [], []

    def script(accelerator):  # without `assert`: pytest has it call locals(), which has the function left alone
        sessions.append(None)
        rank, length, began_s, step = len(sessions), 100 + len(sessions), time.time(), 0
        text, items = f"session {rank}", [rank]
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(2):
            epoch_began_s, timed_s = time.perf_counter(), time.time()
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                step += 1
                items.append(step)
            took_s.append((time.perf_counter() - epoch_began_s, time.time() - timed_s, time.time() - began_s))
        return step, rank, length, text, items[0]

    _, (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == (12, 3, 103, "session 3", 3)
    assert max(map(max, took_s)) < 60
    said = [line for line in capfd.readouterr().err.splitlines() if "have got their values back" in line]
    assert said == ["kgorch: variables of the script that have got their values back: step"]


def up_for(uptime_s: float, monkeypatch) -> None:
    """The machine has booted so many seconds before this process began."""
    booted_s = time.monotonic() - uptime_s
    monkeypatch.setattr(script_numbers, "_clocks", lambda: (time.time(), time.monotonic() - booted_s))
    monkeypatch.setattr(script_numbers, "_began", (time.time() - 60, uptime_s - 60))


def test_a_score_is_no_reading_of_a_clock_on_a_machine_that_has_just_booted(accelerated, monkeypatch):
    up_for(120, monkeypatch)

    def script(accelerator):
        accuracy = 90.0
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                accuracy += 0.5
        return accuracy

    assert whole_cut_twice(accelerated, script) == [99.0, 99.0]


def whole_cut_twice(accelerated, script) -> list[object]:
    """What a training gives, and what it gives in three sessions."""
    (_, whole), saved = accelerated(script), None
    for cut_at in (8, 13):
        with pytest.raises(Cut) as cut:
            accelerated(script, cut_at, saved)
        saved = cut.value.saved
    return [whole, accelerated(script, saved=saved)[1]]


@pytest.mark.parametrize("uptime_s", [20, 10**6])
def test_a_number_that_only_epochs_that_are_done_have_moved_is_what_it_was(accelerated, monkeypatch, uptime_s):
    up_for(uptime_s, monkeypatch)

    def script(accelerator):
        worse = 0
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            worse += weights_of(model)[0] < -0.9  # as it was before the first step
        return worse, weights_of(model)

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, 14)
    assert whole[0] == 0 and whole == resumed


def test_numbers_of_numpy_go_on_as_what_they_are(accelerated):
    def script(accelerator):
        done, best = np.int64(0), np.float32(72.5)
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                done += 1
                best -= np.float32(0.5)
        return done.item(), best.item(), best.dtype

    whole, resumed = whole_cut_twice(accelerated, script)
    assert whole == resumed == (18, 63.5, np.float32)


def test_a_reference_to_what_is_gone_and_a_switch_are_no_numbers(accelerated):
    def script(accelerator):
        gone, is_safe, step = weakref.proxy(nn.Linear(1, 1)), True, 0
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                step += 1
        return is_safe, type(gone)

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    [moved] = [values for values in cut.value.saved._own["remembered"]["moved"].values() if "step" in values]
    moved |= {"is_safe": 0}
    assert accelerated(script, saved=cut.value.saved)[1][0] is True


@pytest.mark.parametrize("value", ["text", [1], {"step": 1}, "0" * 10**6])
def test_a_checkpoint_of_a_stranger_gives_variables_nothing_but_numbers(accelerated, value):
    def script(accelerator):
        step, folder = 0, "out"
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(2):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                step += 1
        return step, folder

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    remembered = cut.value.saved._own["remembered"]
    function = next(name for name in remembered["moved"] if name.endswith("script"))
    remembered["moved"][function] |= {"step": value, "folder": 7, "model": 7, "no such": 7, "other": 7}
    assert accelerated(script, saved=cut.value.saved)[1] == (4 + 1, "out")
    remembered["moved"] = value
    accelerated(script, saved=cut.value.saved)


def test_more_numbers_than_a_checkpoint_takes_end_no_training(accelerated):
    """The function of the loop has its own first."""
    made = "\n    ".join(f"number_{index} = {index}" for index in range(5000))
    source = f"""
def script(accelerator):
    {made}
    def train():
        step, large = 0, 1
        model, optimizer, loader = prepared(accelerator, 12)
        for _ in range(2):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
                step += 1
                large *= 10**3000
        return step
    return train()
"""
    names = {"prepared": prepared, "train_batch": train_batch}
    exec(source, names)
    (_, whole), (_, resumed) = whole_and_resumed(accelerated, names["script"], 8)
    assert whole == resumed == 12


class OwnTrainer:
    """As a script that keeps its numbers on an object: its end is a count of steps, and the rate is computed from it."""

    def __init__(self, accelerator, steps):
        self.accelerator, self.steps = accelerator, steps
        self.step, self.best, self.score = 0, math.inf, {"last": 0.0, "epoch": -1}
        self.model, self.optimizer, self.loader = prepared(accelerator, 12)

    def train(self):
        while self.step < self.steps:
            self.score["last"] = 0.0
            for batch in self.loader:
                self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.step)
                train_batch(self.accelerator, self.model, self.optimizer, batch)
                self.step += 1
                self.score["last"] += float(batch[0].sum())
                if self.step >= self.steps:
                    break
            self.score["epoch"] += 1
            self.best = min(self.best, self.score["last"])
        return self.step, self.best, self.score, weights_of(self.model)


@pytest.mark.parametrize("cut_at", [1, 6, 8, 12, 14])
def test_a_count_of_steps_on_the_scripts_own_object_ends_the_training_where_it_would_have(accelerated, cut_at):
    """It began anew in each session: the training never ended."""
    (steps, whole), (_, resumed) = whole_and_resumed(
        accelerated, lambda accelerator: OwnTrainer(accelerator, 15).train(), cut_at
    )
    assert steps == whole[0] == 15 and resumed == whole


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.counter, self.best_score, self.early_stop = patience, 0, None, False

    def __call__(self, score):
        if self.best_score is None or score > self.best_score:
            self.best_score, self.counter = score, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


@pytest.mark.parametrize("cut_at", [3, 12, 20, 24, 26, 30])
def test_an_early_stopping_on_an_object_stops_at_its_epoch_and_not_in_those_that_are_done(accelerated, cut_at):
    """Epochs that are done have one score all: it stopped there, and no session could go on."""

    def script(accelerator):
        model, optimizer, train = prepared(accelerator, 12)
        state = SimpleNamespace(stopping=EarlyStopping(2), by_name=defaultdict(int))
        epoch = 0
        for epoch in range(9):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                state.by_name["batches"] += 1
            state.stopping(min(epoch, 3))  # better until the fourth epoch
            if state.stopping.early_stop:
                break
        return epoch, vars(state.stopping), dict(state.by_name), weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert (steps, whole[0]) == (36, 5) and resumed == whole


class Closed:
    """Reading its attributes runs code."""

    def __init__(self):
        self.step = 0

    def __getattribute__(self, name):
        raise AssertionError(f"{name} was read")


class Slotted:
    __slots__ = ("best", "step")

    def __init__(self):
        self.step = 0


def counter():
    calls, rate = 0, 0.5

    def count():
        nonlocal calls
        calls += 1
        return calls * rate

    return count


def test_no_code_of_an_object_is_run_large_dicts_are_left_alone_and_an_object_gets_no_new_attribute(accelerated):
    def script(accelerator):
        closed, slotted, counts, large = Closed(), Slotted(), Counter(step=0), dict.fromkeys(map(str, range(1000)), 0)
        circular, count = {"step": 0}, counter()
        circular["self"] = circular
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                counts["step"] += 1
                slotted.step += 1
                counted = count()
                large["7"] += 1
                circular["step"] += 1
        held = object.__getattribute__(closed, "__dict__")
        return counts["step"], circular["step"], slotted.step, counted, large["7"], held

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    moved = cut.value.saved._own["remembered"]["moved"]

    [path] = [path for path in moved if path.endswith("script counts")]
    assert moved[path] == {"step": 8} and not any(path.endswith(" large") for path in moved)
    moved[path.replace("counts", "closed")] = {"no such": 7}
    moved[path.replace("counts", "slotted")]["best"] = 7
    assert accelerated(script, saved=cut.value.saved)[1] == (18, 18, 18, 9.0, 11, {"step": 0})


@pytest.mark.parametrize("kind", ["list", "tensor", "table"])
def test_a_dict_whose_list_begins_anew_begins_anew_as_a_whole_and_is_named(accelerated, kind):
    """Half of it came back: a place behind the end of its list."""

    def script(accelerator):
        memory = {
            "place": 0,
            "items": {"list": [], "tensor": torch.zeros(64), "table": {"weight": torch.zeros(2)}}[kind],
        }
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                if kind == "list":
                    memory["items"].append(1.0)
                elif kind == "tensor":
                    memory["items"][memory["place"]] = 1.0
                else:
                    memory["items"]["weight"] += 1.0  # as an average of the weights, whose updates are counted
                memory["place"] += 1
        return memory["place"], len(memory["items"])

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    assert not any(path.endswith(" memory") for path in cut.value.saved._own["remembered"].get("moved", {}))
    place, length = accelerated(script, saved=cut.value.saved)[1]
    assert "memory (place; items changes)" in accelerated.session.exactness["objects"], "it may count to an end"
    assert kind != "list" or place == length


def test_arrays_of_objects_and_tensors_of_an_inference_end_no_training(accelerated):
    """Each ended a good program with an error of kgorch's own."""

    class Evaluates:
        def __init__(self):
            self.rounds, self.predictions = 0, None

        @torch.inference_mode()
        def run(self, model):
            self.rounds, self.predictions = self.rounds + 1, model(torch.ones(2, 1))

    def script(accelerator):
        held = {"count": 0, "files": np.array(["a", None, "b"], dtype=object), "rows": np.zeros(2, dtype=[("x", "i4")])}
        evaluates = Evaluates()
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                held["count"] += 1
            evaluates.run(model)
        return held["count"], evaluates.rounds, weights_of(model)

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, 8)
    assert resumed == whole and whole[:2] == (18, 3)


def test_a_handle_of_an_object_is_not_given_back_and_a_score_is(accelerated):
    def script(accelerator):
        log = SimpleNamespace(handle=None, best=None)
        model, optimizer, train = prepared(accelerator, 12)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                log.handle = 7
                log.best = 0.5
        return log

    with pytest.raises(Cut) as cut:
        accelerated(script, 8)
    remembered = cut.value.saved._own["remembered"]
    values = [
        numbers for group in ("moved", "still") for path, numbers in remembered[group].items() if path.endswith(" log")
    ]
    assert values == [{"best": 0.5}]


def test_numbers_of_one_object_are_never_given_to_another(accelerated):
    """A name that leads to one record after another: what it was at the first epoch was written into others."""

    def script(accelerator):
        records = [{"id": number, "label": number * 10} for number in range(6)]
        model, optimizer, train = prepared(accelerator, 12)
        for epoch in range(4):
            for record in records[epoch:] + records[:epoch]:
                record["seen"] = 1
            chosen = records[epoch]
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
        return [(record["id"], record["label"]) for record in records], chosen["id"]

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, 21)
    assert resumed == whole == ([(number, number * 10) for number in range(6)], 3)


class Odd(type):
    """A type that cannot be hashed, and whose module is no text."""

    __hash__ = None

    def __eq__(cls, other):
        return cls is other


class Sampler(torch.utils.data.Sampler):
    """Its order is that of its own count of epochs."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 12

    def __iter__(self):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(order)


@pytest.mark.parametrize("cut_at", [2, 5])
def test_samplers_and_odd_types_are_left_alone_and_an_ordered_dict_gets_its_new_names(accelerated, cut_at):
    odd = Odd("odd", (), {"__module__": 7})

    def script(accelerator):
        seen, sampler, thing, sums = [], Sampler(), odd(), OrderedDict()
        model = nn.Linear(1, 1)
        loader = DataLoader(numbers(12), 2, sampler=sampler)
        model, optimizer, train = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)
        for _ in range(1):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                seen.append(batch[0].flatten().tolist())
                sums["total"] = sums.get("total", 0) + 1
        return seen, list(sums.items()), type(thing).__name__

    (_, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert resumed[0] == whole[0][cut_at:] and resumed[1:] == whole[1:]


def test_names_that_come_and_go_are_forgotten(accelerated, monkeypatch):
    monkeypatch.setattr(script_numbers, "MOST_PATHS", 20)
    noted = []

    class Watched(script_numbers.ScriptNumbers):
        def note(self):
            super().note()
            noted.append(max(map(len, (self._owners, self._before, self._names, self._clocks, self._left_alone))))

    monkeypatch.setattr(accelerate_carrier, "ScriptNumbers", Watched)

    def script(accelerator):
        caches = {}
        model, optimizer, train = prepared(accelerator, 12)
        for epoch in range(9):
            for number, batch in enumerate(train):
                train_batch(accelerator, model, optimizer, batch)
                caches.clear()
                caches.update({f"at{epoch}{number}{index}": {"count": index} for index in range(5)})
        return epoch

    accelerated(script)
    assert len(noted) > 50 and max(noted) < 50
