"""Small loops around Accelerate that are cut at a step: the rest must be as in an uninterrupted training, or fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from cut_session import Cut
from small_trainings import Around, goes_on, numbers, train_batch, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader

from kgorch.errors import CannotRestore
from kgorch.worker import entry, session_end
from kgorch.worker.checkpoint.resumed_state import RememberedValues
from kgorch.worker.integrations import accelerate_carrier, accelerate_loop

pytestmark = pytest.mark.usefixtures("alone")


def samples(batch) -> list[int]:
    return batch[0].flatten().int().tolist()


def shuffled(count: int = 12) -> DataLoader:
    return DataLoader(numbers(count), 2, shuffle=True)


@pytest.mark.parametrize("cut_at", [1, 3, 6, 7, 8, 14])
@pytest.mark.parametrize("before_the_step", [False, True])
def test_loaders_that_are_prepared_within_an_epoch_change_no_name(accelerated, before_the_step, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(3):
            loader = accelerator.prepare(shuffled())
            for batch in loader:
                seen.append(samples(batch))
                if before_the_step:
                    len(list(accelerator.prepare(shuffled(4))))
                train_batch(accelerator, model, optimizer, batch)
                if not before_the_step:
                    len(list(accelerator.prepare(shuffled(4))))
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)
    assert goes_on(accelerated(script, saved=accelerated.session.saved(is_final=True))[1], whole, 18)


@pytest.mark.parametrize("cut_at", [3, 7, 14])
@pytest.mark.parametrize("has_closure", [False, True])
def test_an_optimizer_around_another_one_goes_on_with_its_momentum(accelerated, has_closure, cut_at):
    """In epochs that were done it found no gradients to compute with, and no session could go on."""

    def script(accelerator):
        model = nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, Around(model.parameters()), shuffled())
        left = []
        for _ in range(3):
            for batch in loader:

                def loss_of(batch=batch):
                    loss = ((model(batch[0] / 10) - 1) ** 2).mean()
                    accelerator.backward(loss)
                    return loss

                loss_of()
                optimizer.step(loss_of if has_closure else None)
                optimizer.zero_grad()
            left.append(weights_of(model))
        return left[-1], [state["momentum_buffer"].tolist() for state in optimizer.optimizer.base.state.values()]

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and whole[0] == 18


@pytest.mark.parametrize("kind", ["fewer epochs", "another training loader"])
def test_a_script_that_trains_with_nothing_of_the_checkpoint_fails(accelerated, kind):
    def script(accelerator, epochs=3, others=0):
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(others):
            accelerator.prepare(shuffled())
        for _ in range(epochs):
            for batch in accelerator.prepare(shuffled()):
                train_batch(accelerator, model, optimizer, batch)

    with pytest.raises(Cut) as cut:
        accelerated(script, 14)
    given = {"epochs": 1} if kind == "fewer epochs" else {"others": 20}
    with pytest.raises(CannotRestore):
        accelerated(lambda accelerator: script(accelerator, **given), saved=cut.value.saved)


@pytest.mark.parametrize("cut_at", [4, 6, 8, 14])
@pytest.mark.parametrize("order", [["model", "optimizer", "loader"], ["loader", "model", "optimizer"]])
def test_what_is_prepared_by_methods_of_its_own_is_carried(accelerated, order, cut_at):
    def script(accelerator):
        seen, model = [], nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        things = {"model": model, "optimizer": optimizer, "loader": shuffled()}
        prepares = {
            "model": accelerator.prepare_model,
            "optimizer": accelerator.prepare_optimizer,
            "loader": accelerator.prepare_data_loader,
        }
        made = {name: prepares[name](things[name]) for name in order}
        scheduler = accelerator.prepare_scheduler(scheduler)
        for _ in range(3):
            for batch in made["loader"]:
                seen.append(samples(batch))
                train_batch(accelerator, made["model"], made["optimizer"], batch)
                scheduler.step()
        return seen, weights_of(made["model"]), scheduler.get_last_lr()

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)


@pytest.mark.parametrize("cut_at", [5, 6, 8, 14])
def test_a_model_that_is_prepared_again_in_each_epoch_is_the_same_one(accelerated, cut_at):
    def script(accelerator):
        model, loader, seen = nn.Linear(1, 1), shuffled(), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        for _ in range(3):
            model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
            for batch in loader:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
                schedule.step()
        return seen, weights_of(model), schedule.get_last_lr()

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)


@pytest.mark.parametrize("cut_at", [1, 2, 3, 8, 12, 14])
def test_an_iterator_that_is_made_before_the_loop_goes_on_at_its_batch(accelerated, cut_at):
    """As the unlabelled data of FixMatch, which begin anew when they are over."""

    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train, more = accelerator.prepare(model, optimizer, shuffled(), shuffled(8))
        further = iter(more)
        for _ in range(3):
            for batch in train:
                try:
                    other = next(further)
                except StopIteration:
                    further = iter(more)
                    other = next(further)
                seen.append((samples(batch), samples(other)))
                train_batch(accelerator, model, optimizer, [batch[0] + other[0] + torch.rand(1)])
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)


@pytest.mark.parametrize("cut_at", [1, 4, 6, 8, 14, None])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_look_at_a_batch_of_the_training_loader_is_no_epoch_of_it(accelerated, is_held, cut_at):
    def script(accelerator):
        model, seen, looks = nn.Linear(1, 1), [], []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        for _ in range(3):
            batches = iter(train)
            looks.append(len(next(batches)))
            if not is_held:
                del batches
            for batch in train:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
        looks.append(len(next(iter(train))))
        return seen, looks, weights_of(model)

    if cut_at is None:
        steps, whole = accelerated(script)
        assert goes_on(accelerated(script, saved=accelerated.session.saved(is_final=True))[1], whole, 18)
        return
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)


def test_a_loop_over_next_fails_where_its_epochs_are_done_and_says_why(accelerated, monkeypatch):
    def script(accelerator):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        batches = iter(train)
        for _ in range(18):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(train)
                batch = next(batches)
            train_batch(accelerator, model, optimizer, batch)

    monkeypatch.setattr(session_end, "empty_epoch", None)
    with pytest.raises(Cut) as cut:
        accelerated(script, 14)
    with pytest.raises(StopIteration) as stopped:
        accelerated(script, saved=cut.value.saved)
    entry.explain_empty_epoch(stopped.value)
    assert "take the batches by a `for` loop" in str(stopped.value)


@pytest.mark.parametrize(("steps", "is_told"), [(49, False), (60, True)])
def test_a_program_that_iterates_no_loader_is_told_that_none_of_it_is_saved(accelerated, capfd, steps, is_told):
    """As one that learns from a replay memory: it trained for hours, and nothing said so."""

    def script(accelerator):
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(steps):
            train_batch(accelerator, model, optimizer, [torch.ones(2, 1)])

    accelerated(script)
    assert ("belong to no loop" in accelerated.session.exactness.get("outside", "")) == is_told
    assert capfd.readouterr().err.count("none of them is counted or saved") == is_told


@pytest.mark.parametrize("cut_at", [2, 3])
def test_steps_outside_of_every_loop_are_taken_again_until_the_cut(accelerated, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        for _ in range(6):
            batch = next(iter(train))
            seen.append(samples(batch))
            train_batch(accelerator, model, optimizer, batch)
        return seen[cut_at:], weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and whole[0] == 6
    assert "belong to no loop" in accelerated.session.exactness["outside"]


@pytest.mark.parametrize("cut_at", [1, 2])
def test_an_epoch_that_is_looked_at_before_its_first_step_is_saved_at_its_end(accelerated, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        for _ in range(3):
            for number, batch in enumerate(train):
                seen.append(samples(batch))
                if number == 0:
                    next(iter(train))
                train_batch(accelerator, model, optimizer, batch)
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 3 and goes_on(resumed, whole, 6 * cut_at)
    assert "at its end alone" in accelerated.session.exactness["twice"]


@pytest.mark.parametrize("cut_at", [1, 8])
def test_a_loader_that_is_prepared_within_an_epoch_and_read_over_steps_is_said_to_begin_anew(accelerated, cut_at):
    def script(accelerator):
        model, further = nn.Linear(1, 1), None
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        for _ in range(3):
            for batch in train:
                further = further or iter(accelerator.prepare(shuffled(80)))
                train_batch(accelerator, model, optimizer, [batch[0] + next(further)[0]])

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert whole == resumed == (18, None)
    assert "begins anew" in accelerated.session.exactness["within"]


@pytest.mark.parametrize("anew", ["nothing", "train", "both", "others after it"])
def test_a_stage_that_is_trained_longer_goes_on_with_its_next_epoch(accelerated, anew):
    def script(accelerator, epochs=3):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        for epoch in range(epochs):
            if anew == "both":
                train, other = accelerator.prepare(shuffled(), shuffled(4))
            elif epoch and anew != "nothing":
                train = accelerator.prepare(shuffled())
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            if anew == "others after it":
                other = accelerator.prepare(shuffled(4))
            if anew in ("both", "others after it"):
                len(list(other))
        return weights_of(model)

    longer = accelerated(lambda accelerator: script(accelerator, 5))
    accelerated(script)
    ended = accelerated.session.saved()  # not as the final one: with `--extend` it is none
    assert accelerated(lambda accelerator: script(accelerator, 5), saved=ended) == longer and longer[0] == 30


@pytest.mark.parametrize("cut_at", [4, 6, 8, 10])
def test_an_evaluation_at_the_cut_is_done_whose_loader_also_evaluates_within_epochs(accelerated, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, shuffled(), shuffled(6))
        for _ in range(3):
            for number, batch in enumerate(train):
                train_batch(accelerator, model, optimizer, batch)
                if number % 2 == 0:
                    seen.append([model(batch[0]).sum().item() for batch in other])
                if number == 3:
                    break
            seen.append([model(batch[0]).sum().item() for batch in other])
        return seen, weights_of(model)

    (steps, (results, weights)), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    left = {4: 7, 6: 5, 8: 4, 10: 2}[cut_at]  # evaluations after the cut; those before it have one batch
    assert steps == 12 and len(results) == 9
    assert resumed[0][-left:] == results[-left:] and resumed[1] == weights
    assert all(len(batches) == 1 for batches in resumed[0][:-left])


def remembered(**values):
    kept = RememberedValues()
    kept.update(values)
    return kept.values


def former(saved, epochs: int, **values):
    """A checkpoint of version 0.1 with loaders for each epoch. `epochs`: those that are done."""
    for epoch in range(epochs):
        saved._own["loaders"].setdefault(f"loader{epoch}", {"epoch": epoch + 1, "batches": 0})
    saved._own["remembered"] = remembered(**values)
    return saved


@pytest.mark.parametrize("cut_at", [4, 6, 8, 14])
@pytest.mark.parametrize("anew", [False, True])
def test_a_checkpoint_that_names_the_training_loaders_alone_is_continued(accelerated, anew, cut_at):
    def script(accelerator):
        model, train, seen = nn.Linear(1, 1), shuffled(), []
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        if not anew:
            train, other = accelerator.prepare(train, shuffled(4))
        for _ in range(3):
            for batch in accelerator.prepare(shuffled()) if anew else train:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
            if not anew:
                len(list(other))
        return seen, weights_of(model)

    _, whole = accelerated(script)
    with pytest.raises(Cut) as cut:
        accelerated(script, cut_at)
    running = (cut_at - 1) // 6 if anew else 0  # at an epoch's end its loader is asked once more
    names = [f"loader{epoch}" for epoch in range(running + 1)]
    saved = former(cut.value.saved, running, drivers=names, asked=names[-1], left_at={})
    assert goes_on(accelerated(script, saved=saved)[1], whole, cut_at)


@pytest.mark.parametrize("cut_at", [3, 5, 7, 9, 11, 13])
def test_loaders_that_were_forgotten_and_come_again_go_on_at_their_place(accelerated, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        loaders = [accelerator.prepare(DataLoader(numbers(4), 2))]
        for phase in range(7):
            for batch in loaders[-1 - phase % 2 if phase else 0]:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
            if not phase:
                loaders = [accelerator.prepare(DataLoader(numbers(count), 2)) for count in (4, 4, 4)]
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 14 and goes_on(resumed, whole, cut_at)
    accelerated(script)
    assert "begins its order anew" in accelerated.session.exactness["again"]


def test_checkpoints_do_not_grow_with_the_loaders_that_are_prepared_for_each_epoch(accelerated):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(40):
            train, other = accelerator.prepare(shuffled(4), shuffled(4))
            for batch in train:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
            seen.append([samples(batch) for batch in other])
        return seen, weights_of(model)

    def size(saved) -> int:
        own = saved.own(0)
        return len(json.dumps([own["loaders"], own["remembered"]]))

    sizes, cuts = [], [6, 70]
    whole = accelerated(script)
    for cut_at in cuts:
        with pytest.raises(Cut) as cut:
            accelerated(script, cut_at)
        sizes.append(size(cut.value.saved))
        steps, (seen, weights) = accelerated(script, saved=cut.value.saved)
        assert steps == 80 and weights == whole[1][1] and whole[1][0][-len(seen[-12:]) :] == seen[-12:]
    with pytest.raises(Cut) as again:
        accelerated(script, 75, saved=cut.value.saved)
    assert size(again.value.saved) < sizes[0] * 1.2 and sizes[1] < sizes[0] * 1.2
    assert accelerated(script, saved=again.value.saved)[1][1] == whole[1][1]


def test_checkpoints_do_not_grow_with_the_further_iterations_of_the_training_loader(accelerated):
    def script(accelerator, epochs):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, DataLoader(numbers(2), 2))
        for _ in range(epochs):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            next(iter(train))  # a look at the training data
        return weights_of(model)

    accelerated(lambda accelerator: script(accelerator, 500))
    assert len(json.dumps(accelerated.session.saved().own(0)["remembered"])) < 700
    whole = accelerated(lambda accelerator: script(accelerator, 60))
    with pytest.raises(Cut) as cut:
        accelerated(lambda accelerator: script(accelerator, 60), 50)
    saved = cut.value.saved
    assert accelerated(lambda accelerator: script(accelerator, 60), saved=saved) == whole and whole[0] == 60


@pytest.mark.parametrize("cut_at", [4, 8])
def test_a_checkpoint_that_holds_a_model_twice_is_continued(accelerated, monkeypatch, cut_at):
    """As earlier versions tracked a model that was prepared again."""

    def script(accelerator):
        model, other, seen = nn.Linear(1, 1), nn.Linear(1, 2), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled())
        model, other, val = accelerator.prepare(model, other, shuffled(4))
        for _ in range(3):
            for batch in train:
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
            len(list(val))
        return seen, weights_of(model), weights_of(other)

    whole = accelerated(script)
    with pytest.raises(Cut) as cut, monkeypatch.context() as earlier:
        earlier.setattr(accelerate_carrier.AccelerateCarrier, "_is_known", lambda carried, _: carried.is_begun)
        accelerated(script, cut_at)
    saved = cut.value.saved
    assert {"model0", "model1", "model2"} <= saved.tree.keys()
    assert goes_on(accelerated(script, saved=saved)[1], whole[1], cut_at)
    with pytest.raises(Cut) as again:
        accelerated(script, 14, saved=saved)
    assert goes_on(accelerated(script, saved=again.value.saved)[1], whole[1], 14)


@pytest.mark.parametrize("is_before", [False, True])
def test_a_held_iterator_in_which_a_training_runs_is_told(accelerated, is_before):
    def script(accelerator, is_held=True):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train, val = accelerator.prepare(model, optimizer, shuffled(), shuffled(8))
        examples = iter(val)
        if is_held and is_before:
            next(examples)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                if not is_held:
                    len(list(val))
            if is_held and not is_before:
                next(examples)

    accelerated(script)
    assert "saved together" in accelerated.session.exactness["held"]
    accelerated(lambda accelerator: script(accelerator, is_held=False))
    assert "held" not in accelerated.session.exactness


@pytest.mark.parametrize("cut_at", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("by", ["the function", "the method", "of a loader prepared before the optimizer"])
def test_a_loader_that_skips_its_first_batches_is_followed(accelerated, by, cut_at):
    import accelerate

    def script(accelerator):
        model, train, seen = nn.Linear(1, 1), shuffled(20), []
        if by == "of a loader prepared before the optimizer":
            train = accelerator.prepare(train)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        else:
            model, optimizer, train = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), train)
        skips = accelerate.skip_first_batches if by == "the function" else accelerator.skip_first_batches
        for epoch in range(3):
            for batch in train if epoch else skips(train, 4):
                with accelerator.accumulate(model):
                    train_batch(accelerator, model, optimizer, batch)
                    seen.append((samples(batch), accelerator.sync_gradients))
        return seen, weights_of(model)

    options = {"gradient_accumulation_steps": 4}
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at, **options)
    windows = [4, 2, 4, 4, 2, 4, 4, 2]  # 6 batches of the first epoch, then 10 of each
    assert steps == len(windows) and [is_last for _, is_last in whole[0]].count(True) == steps
    assert len(whole[0]) == 26 and goes_on(resumed, whole, sum(windows[:cut_at]))


class Average:
    """As EMAModel of Diffusers: no module, and what it is given at a restore is what it keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [weight.detach().clone() for weight in model.parameters()]

    def step(self, model: nn.Module) -> None:
        for mean, weight in zip(self.shadow_params, model.parameters(), strict=True):
            mean.mul_(0.9).add_(weight.detach(), alpha=0.1)

    def state_dict(self):
        return {"shadow_params": self.shadow_params}

    def load_state_dict(self, state) -> None:
        self.shadow_params = state["shadow_params"]


def audited(accelerator):
    """A model, its optimizer and data, as under a supervisor: the audit is for a supervised training."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    prepared = accelerator.prepare(model, optimizer, shuffled())
    accelerator._kgorch.session._state.launch = SimpleNamespace()
    return prepared


@pytest.mark.parametrize("is_given", [False, True])
def test_an_average_and_a_schedule_that_accelerate_was_not_given_go_on_all_the_same(accelerated, capsys, is_given):
    def script(accelerator):
        model, optimizer, train = audited(accelerator)
        ema, schedule = Average(model), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if is_given:
            schedule = accelerator.prepare(schedule)
            accelerator.register_for_checkpointing(ema)
        total = torch.zeros(())
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
                schedule.step()
                ema.step(model)
                total += batch[0].mean()
        return [value.item() for mean in ema.shadow_params for value in mean.flatten()], schedule.get_last_lr()

    whole, resumed = whole_and_resumed(accelerated, script, 8)
    assert resumed == whole
    assert "untracked" not in accelerated.session.exactness and "untracked" not in capsys.readouterr().out


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_tensor_in_a_variable_that_changes_is_named(accelerated, capsys, is_changed):
    def script(accelerator):
        model, optimizer, train = audited(accelerator)
        queue = torch.zeros(3)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, [batch[0] + queue.mean()])
                if is_changed:
                    queue += 0.1
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, 8)
    assert (resumed == whole) == (not is_changed)
    named, said = accelerated.session.exactness.get("untracked", ""), capsys.readouterr().out
    advice = "give it to accelerator.prepare() or accelerator.register_for_checkpointing()"
    assert ("`queue` (tensor)" in named) == (advice in named and advice in said) == is_changed == bool(named)


@pytest.mark.parametrize("cut_at", [3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["whole epochs", "a look", "left early", "a number of the script's", "prepared anew"])
def test_a_seedable_sampler_has_the_order_that_accelerate_gives_it(accelerated, monkeypatch, kind, cut_at):
    from accelerate.utils import DataLoaderConfiguration

    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, train = accelerator.prepare(model, optimizer, shuffled(8))
        for epoch in range(3):
            if kind == "a look" and epoch != 1:
                next(iter(train))
            elif kind == "a number of the script's":
                train.set_epoch(epoch + 5)
            elif kind == "prepared anew":
                train = accelerator.prepare(shuffled(8))
            for number, batch in enumerate(train):
                seen.append(samples(batch))
                train_batch(accelerator, model, optimizer, batch)
                if kind == "left early" and number == 2:
                    break
        return seen, weights_of(model)

    options = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at, **options)
    assert steps == (9 if kind == "left early" else 12) and goes_on(resumed, whole, cut_at)
    monkeypatch.setattr(accelerate_loop, "worker", SimpleNamespace(launch=lambda: None))
    assert accelerated(script, **options) == (0, whole)


@pytest.mark.parametrize("cut_at", range(1, 8))
@pytest.mark.parametrize(("count", "is_first"), [(10, False), (16, False), (28, False), (10, True)])
def test_a_loader_that_is_kept_over_epochs_ends_windows_of_accumulation_as_it_did(accelerated, count, is_first, cut_at):
    """is_first: it was prepared before the optimizer."""

    def script(accelerator):
        model, more, seen = nn.Linear(1, 1), shuffled(count), []
        more = accelerator.prepare(more) if is_first else more
        model, optimizer, train = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), shuffled())
        more = more if is_first else accelerator.prepare(more)
        further = iter(more)
        for _ in range(4):
            for batch in train:
                try:
                    other = next(further)
                except StopIteration:
                    further = iter(more)
                    other = next(further)
                with accelerator.accumulate(model):
                    train_batch(accelerator, model, optimizer, [torch.cat([batch[0], other[0]])])
                    seen.append((samples(batch), samples(other), accelerator.sync_gradients))
        return seen, weights_of(model)

    options = {"gradient_accumulation_steps": 3}
    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at, **options)
    ends = [number for number, step in enumerate(whole[0], 1) if step[-1]]
    assert steps == len(ends) >= 8 and goes_on(resumed, whole, ends[cut_at - 1])
    assert "asked in each step" in accelerated.session.exactness["windows"]
