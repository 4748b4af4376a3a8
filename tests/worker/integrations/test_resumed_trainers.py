"""Small trainings of Transformers and Accelerate that are cut at a step: the rest must be as in an uninterrupted training."""

from __future__ import annotations

import collections
import copy
import time

import pytest
import torch
from cut_session import Cut, CutSession
from small_trainings import (
    OfSession,
    Stream,
    goes_on,
    lightning_module,
    lightning_trainer_of,
    numbers,
    train_batch,
    weights_of,
    whole_and_resumed,
)  # fmt: skip
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from kgorch.errors import KgorchError

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("order", ["model, optimizer and loader", "loader, model, optimizer", "all but the optimizer"])
def test_what_accelerate_has_prepared_before_the_optimizer_is_restored_and_followed(accelerated, order):
    def script(accelerator):
        model = nn.Linear(1, 1)
        loader = DataLoader(numbers(12), 2, shuffle=True)
        if order == "model, optimizer and loader":
            model = accelerator.prepare(model)
            optimizer, loader = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1), loader)
        elif order == "loader, model, optimizer":
            loader = accelerator.prepare(loader)
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1))
        else:
            model, loader = accelerator.prepare(model, loader)
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(3):
            for batch in loader:
                train_batch(accelerator, model, optimizer, batch)
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at=8)
    assert resumed == whole and whole[0] == 18


@pytest.mark.parametrize("kind", ["evaluates within an epoch", "two loaders at once", "evaluates first"])
def test_the_loader_whose_epochs_accelerate_counts_is_the_training_one(accelerated, kind):
    def script(accelerator):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        train, other = DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(12), 2)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, train, other)
        if kind == "evaluates first":
            len(list(other))
        for _ in range(3):
            batches = zip(train, other, strict=False) if kind == "two loaders at once" else train
            for batch in batches:
                batch = (batch[0][0] + batch[1][0],) if kind == "two loaders at once" else batch
                train_batch(accelerator, model, optimizer, batch)
                if kind == "evaluates within an epoch":
                    len(list(other))
        return weights_of(model)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at=8)
    assert resumed == whole and whole[0] == 18


class Line(nn.Module):
    """Attribute `seen`: the samples of each batch that it was trained with in this session."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Linear(1, 1), OfSession()

    def forward(self, x):
        if self.training:
            self.seen.append(x.flatten().int().tolist())
        return {"loss": ((self.net(x / 10) - 1) ** 2).mean()}


def transformers_trainer_of(library, model, cls=None, *, callbacks=None, **options):
    arguments = library.TrainingArguments(
        "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
        remove_unused_columns=False, **{"save_strategy": "no", "num_train_epochs": 3, **options},
    )  # fmt: skip
    data = [{"x": torch.tensor([float(number)])} for number in range(12)]
    return (cls or library.Trainer)(model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=callbacks)


@pytest.mark.filterwarnings("ignore")
def test_early_stopping_of_transformers_counts_over_sessions(transformers, carried):
    class Worse(transformers.Trainer):
        """Each evaluation is worse than the one before."""

        def evaluate(self, *args, **kwargs):
            metrics = super().evaluate(*args, **kwargs) | {"eval_score": -self.state.global_step}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def script():
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=6)
        trainer = transformers_trainer_of(
            transformers, Line(), Worse, callbacks=[stopping], eval_strategy="steps", eval_steps=2,
            metric_for_best_model="score", greater_is_better=True,
        )  # fmt: skip
        trainer.state.best_metric = 0.0
        trainer.train()
        return trainer.state.global_step

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole and whole[1] < 18


@pytest.mark.filterwarnings("ignore")
def test_a_callback_of_transformers_that_keeps_its_state_in_its_arguments_gets_it_back(transformers, carried):
    """One that has not moved is the script's: its value may be another in a later session."""

    class Counter(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
        def __init__(self, seen=0, limit=0):
            self.seen, self.limit, self.logs = seen, limit, 0

        def on_step_end(self, *_, **__):
            self.seen += 1
            self.logs += 2

        def state(self):
            return {"args": {"seen": self.seen, "limit": self.limit}, "attributes": {"logs": self.logs}}

    limits = iter((5, 5, 7))

    def script():
        counter = Counter(limit=next(limits))
        transformers_trainer_of(transformers, Line(), callbacks=[counter]).train()
        return counter.seen, counter.logs, counter.limit

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert whole[1] == (18, 36, 5) and resumed[1] == (18, 36, 7)


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_a_trainer_of_transformers_makes_itself_is_followed(transformers, carried):
    class Own(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, 2, shuffle=True)

    def script():
        model = Line()
        transformers_trainer_of(transformers, model, Own).train()
        return model.seen

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed[1] == whole[1][8:] and len(whole[1]) == 18


@pytest.mark.filterwarnings("ignore")
def test_batches_of_transformers_that_are_no_dict_are_given_on_as_they_are(transformers, carried):
    """TRL's GRPOTrainer is given a list of prompts, and makes tensors of it itself."""

    class Prompts(transformers.Trainer):
        def _prepare_inputs(self, inputs):
            assert isinstance(inputs, list)
            return {"x": torch.stack([item["x"] for item in inputs])}

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, Prompts, num_train_epochs=1)
        trainer.data_collator = list
        trainer.train()
        return len(model.seen)

    assert carried(script) == (6, 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved_at", [4, 6])
def test_a_checkpoint_of_transformers_own_is_continued_in_its_epoch(transformers, carried, monkeypatch, saved_at):
    def first():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, save_strategy="steps", save_steps=saved_at)
        trainer.train()
        return model.seen, weights_of(model)

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model)
        trainer.train(resume_from_checkpoint=f"out/checkpoint-{saved_at}")
        return model.seen, weights_of(model)

    _, (batches, weights) = carried(first)
    whole, resumed = whole_and_resumed(carried, script, cut_at=1)
    assert whole[1] == (batches[saved_at:], weights)
    assert resumed[1] == (batches[saved_at + 1 :], weights)


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_transformers_has_stopped_early_stays_finished(transformers, carried):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= 8

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, callbacks=[Stop()])
        trainer.train()
        return trainer.state.global_step, weights_of(model)

    whole = carried(script)
    assert whole[0] == 8
    assert carried(script, saved=carried.session.saved(is_final=True)) == whole


@pytest.mark.parametrize("stops_early", [True, False])
def test_a_training_around_accelerate_that_is_over_stays_finished_with_its_weights(accelerated, stops_early):
    def script(accelerator):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        train, other = DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(6), 2)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, train, other)
        for epoch in range(3):
            for number, batch in enumerate(train):
                train_batch(accelerator, model, optimizer, batch)
                if stops_early and (epoch, number) == (1, 3):
                    break
            if stops_early and epoch == 1:
                break
        return weights_of(model), len(list(other))

    whole = accelerated(script)
    assert whole[0] == (10 if stops_early else 18)
    assert accelerated(script, saved=accelerated.session.saved(is_final=True)) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [8, None], ids=["cut in the first one", "cut in the second one"])
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_second_training_of_the_script_begins_as_it_did_in_an_uninterrupted_one(
    request, carried, accelerated, library, cut_at
):
    """As the folds of a cross-validation: it is not saved, and begins anew in each session, also as no loop around Accelerate."""
    module = request.getfixturevalue(library)

    def script():
        folds = []
        for _ in range(2):
            if library == "lightning":
                model = lightning_module(module)()
                lightning_trainer_of(module).fit(model, DataLoader(numbers(12), 2, shuffle=True))
            else:
                model = Line()
                transformers_trainer_of(module, model).train()
            folds.append(weights_of(model))
        return folds

    if cut_at:
        whole, resumed = whole_and_resumed(carried, script, cut_at)
    else:
        whole = carried(script)
        resumed = carried(script, saved=carried.finished)
    assert resumed == whole and whole[1][0] != whole[1][1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [1, 3])
def test_the_last_batches_of_an_epoch_of_transformers_without_a_length_come_again(transformers, carried, cut_at):
    """Those of the epoch's last step are fewer: the loader is at its end before the step begins."""

    class Rows(IterableDataset):
        def __iter__(self):
            return iter([{"x": row[0]} for row in Stream()])

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, max_steps=6, gradient_accumulation_steps=4)
        trainer.train_dataset = Rows()
        trainer.train()
        return model.seen, weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == (6, (whole[1][0][6 * cut_at - 2 :], whole[1][1])) and len(whole[1][0]) == 34


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [4, 6, 12])
def test_a_loader_that_begins_at_its_first_batch_gives_the_same_order_again(transformers, carried, cut_at):
    """As Accelerate's does: `iter()` of it does nothing yet. The Trainer has read the step's batch when it is saved."""

    class Rows(IterableDataset):
        def __iter__(self):
            return iter([{"x": row[0]} for row in Stream()])

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, max_steps=18)
        trainer.train_dataset = Rows()
        trainer.train()
        return model.seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert steps == 18 and resumed == (whole[0][cut_at:], whole[1])


@pytest.mark.parametrize("cut_at", [1, 5, 6, 7, 12, 14])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_loader_that_is_prepared_anew_for_each_epoch_is_followed(accelerated, evaluates, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
        for _ in range(3):
            loader = accelerator.prepare(DataLoader(numbers(12), 2, shuffle=True))
            for batch in loader:
                seen.append(batch[0].flatten().int().tolist())
                train_batch(accelerator, model, optimizer, batch)
            if evaluates:
                len(list(accelerator.prepare(DataLoader(numbers(4), 2))))
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 18 and goes_on(resumed, whole, cut_at)
    for cut_again in (cut_at + 1, 16):
        with pytest.raises(Cut) as first:
            accelerated(script, cut_at)
        with pytest.raises(Cut) as second:
            accelerated(script, cut_again, saved=first.value.saved)
        assert goes_on(accelerated(script, saved=second.value.saved)[1], whole, cut_again)
    assert goes_on(accelerated(script, saved=accelerated.session.saved(is_final=True))[1], whole, 18)


def test_a_second_training_with_the_same_accelerator_is_not_followed(accelerated):
    """Its model and optimizer are not in the checkpoint."""

    def script(accelerator):
        for _ in range(2):
            model = nn.Linear(1, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))
            for batch in accelerator.prepare(DataLoader(numbers(12), 2, shuffle=True)):
                train_batch(accelerator, model, optimizer, batch)

    accelerated(script)
    assert accelerated.session.step < 12
    assert "second training" in accelerated.session.exactness["training"]


@pytest.mark.parametrize("cut_at", [4, 5, 6, 8, 9, 11])
@pytest.mark.parametrize("evaluates", [False, True])
def test_an_epoch_that_the_script_leaves_early_is_done(accelerated, evaluates, cut_at):
    def script(accelerator):
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        train, other = DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(4), 2)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, train, other)
        for _ in range(3):
            for number, batch in enumerate(train):
                seen.append(batch[0].flatten().int().tolist())
                train_batch(accelerator, model, optimizer, batch)
                if number == 3:
                    break
            if evaluates:
                len(list(other))
        return seen, weights_of(model)

    (steps, whole), (_, resumed) = whole_and_resumed(accelerated, script, cut_at)
    assert steps == 12 and goes_on(resumed, whole, cut_at)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("begins_at", [0, 6])
def test_the_mean_loss_of_transformers_is_the_same_in_each_session_of_a_finished_training(
    transformers, carried, begins_at
):
    if begins_at:
        transformers_trainer_of(transformers, Line(), save_strategy="steps", save_steps=begins_at).train()

    def script():
        own = f"out/checkpoint-{begins_at}" if begins_at else None
        trainer = transformers_trainer_of(transformers, Line(), logging_steps=5)
        loss = trainer.train(resume_from_checkpoint=own).training_loss
        script.logged = [(entry["step"], "train_loss" in entry) for entry in trainer.state.log_history]
        return loss

    whole, resumed = whole_and_resumed(carried, script, cut_at=3)
    logged = script.logged
    assert resumed[1] == pytest.approx(whole[1], rel=1e-6)
    for _ in range(2):
        assert carried(script, saved=carried.finished)[1] == pytest.approx(whole[1], rel=1e-6)
        assert script.logged == logged and logged[-1] == (18, True)


@pytest.mark.filterwarnings("ignore")
def test_the_evaluation_at_the_start_of_transformers_is_the_first_sessions_alone(transformers, carried):
    def script():
        trainer = transformers_trainer_of(transformers, Line(), eval_strategy="steps", eval_steps=3, eval_on_start=True)
        trainer.train()
        assert trainer.args.eval_on_start
        return [entry["step"] for entry in trainer.state.log_history if "eval_runtime" in entry]

    whole, resumed = whole_and_resumed(carried, script, cut_at=5)
    assert resumed == whole and whole[1][0] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [1, 3, 4])
def test_a_training_of_transformers_that_is_not_to_skip_batches_goes_on_at_its_batch(transformers, carried, cut_at):
    def script():
        model = Line()
        trainer = transformers_trainer_of(
            transformers, model, ignore_data_skip=True, gradient_accumulation_steps=4, logging_steps=1
        )
        trainer.train()
        return weights_of(model), [entry["epoch"] for entry in trainer.state.log_history]

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_what_a_script_of_transformers_logs_may_be_a_tensor(transformers, carried):
    class Logs(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            loss = model(**inputs)["loss"]
            self.log({"mine": loss.detach(), "vector": torch.ones(2), "other": object()})
            return loss

    def script():
        model = Line()
        transformers_trainer_of(transformers, model, Logs).train()
        return weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", ["on_train_begin", "on_step_end"])
@pytest.mark.parametrize("cut_at", [7, 8])
def test_a_callback_of_transformers_that_reads_the_training_data_takes_nothing_from_the_training(
    transformers, carried, hook, cut_at
):
    def look(self, args, state, control, train_dataloader=None, **_):
        next(iter(train_dataloader))

    def script():
        model = Line()
        callback = type("Look", (transformers.TrainerCallback,), {hook: look})()
        transformers_trainer_of(transformers, model, callbacks=[callback]).train()
        return weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_transformers_keeps_its_type(transformers, carried):
    class Reads(transformers.Trainer):
        def compute_loss(self, model, inputs, **_):
            return model(x=inputs.x)["loss"]

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, Reads)
        trainer.data_collator = lambda rows: transformers.BatchEncoding({"x": torch.stack([row["x"] for row in rows])})
        trainer.train()
        return weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_an_out_of_memory_is_kgorchs_and_not_the_batch_size_finder_of_transformers(transformers, carried):
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer = transformers_trainer_of(transformers, Line(), callbacks=[Fails()], auto_find_batch_size=True)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        carried(trainer.train)
    assert trainer.args.auto_find_batch_size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [7, 8])
def test_a_reference_that_follows_the_model_of_trl_and_its_counters_go_on(transformers, carried, cut_at):
    class Sync(transformers.TrainerCallback):
        def __init__(self, reference):
            self.reference = reference

        def on_step_end(self, args, state, control, model=None, **_):
            for kept, weight in zip(self.reference.parameters(), model.parameters(), strict=True):
                kept.data.lerp_(weight.data, 0.5)

    class Preferences(transformers.Trainer):
        """What DPOTrainer does with its reference and counters."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ref_model = Line().requires_grad_(False)
            self.args.sync_ref_model = True
            self._metrics = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}
            self._total_train_tokens = 0
            self.add_callback(Sync(self.ref_model))

        def compute_loss(self, model, inputs, **_):
            self._total_train_tokens += inputs["x"].numel()
            self._metrics["train"]["tokens"] = [self._total_train_tokens]
            self._metrics["train"]["sums"].append(inputs["x"].sum().item())
            with torch.no_grad():
                reference = self.ref_model(**inputs)["loss"]
            return model(**inputs)["loss"] + (model.net.weight * reference).sum()

        def log(self, logs, *args, **kwargs):
            means = {name: sum(values) / len(values) for name, values in self._metrics["train"].items()}
            super().log({**logs, **means}, *args, **kwargs)
            self._metrics["train"].clear()

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, Preferences, logging_steps=5)
        trainer.train()
        logged = [(entry.get("tokens"), entry.get("sums")) for entry in trainer.state.log_history]
        return weights_of(model), weights_of(trainer.ref_model), logged

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_loads_weights_in_its_own_way_loads_none_of_kgorchs_folder(transformers, carried):
    """As the one of sentence-transformers."""

    class Own(transformers.Trainer):
        def _load_from_checkpoint(self, folder, model=None):
            raise AssertionError(f"no model in {folder}")

    def script():
        model = Line()
        transformers_trainer_of(transformers, model, Own).train()
        return weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at=7)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_weights_of_a_loss_that_transformers_trains_beside_the_model_go_on(transformers, carried):
    class WithLoss(transformers.Trainer):
        """Its optimizer has weights that its model has not, as with the losses of sentence-transformers."""

        def create_optimizer(self, model=None):
            self.head = nn.Linear(1, 1)
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.head.parameters()], 0.1)
            return self.optimizer

        def compute_loss(self, model, inputs, **_):
            self.head.zero_grad()  # the Trainer clears the gradients of its model alone
            return self.head(model(**inputs)["loss"][None]).square().sum()

    def script():
        model = Line()
        trainer = transformers_trainer_of(transformers, model, WithLoss)
        trainer.train()
        return weights_of(model), weights_of(trainer.head)

    whole, resumed = whole_and_resumed(carried, script, cut_at=7)
    assert resumed == whole


def test_weights_that_an_optimizer_has_beside_what_accelerate_has_prepared_go_on(accelerated):
    def script(accelerator):
        model, head = nn.Linear(1, 1), nn.Linear(1, 1)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(12), 2, shuffle=True))
        for _ in range(3):
            for batch in loader:
                accelerator.backward((head(model(batch[0] / 10)) - 1).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return weights_of(model), weights_of(head)

    whole, resumed = whole_and_resumed(accelerated, script, cut_at=8)
    assert resumed == whole and whole[0] == 18


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [7, 8, 9])
def test_what_a_trainer_of_trl_has_generated_for_several_steps_is_trained_on_to_its_end(transformers, carried, cut_at):
    class Generates(transformers.Trainer):
        """What GRPOTrainer and RLOOTrainer do: a batch is generated, and trained on in four steps."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._step, self._buffered_inputs = 0, None

        def compute_loss(self, model, inputs, **_):
            if self._step % 4 == 0 or self._buffered_inputs is None:
                self._buffered_inputs = [{"x": inputs["x"] * torch.rand(1), "names": None} for _ in range(4)]
            inputs = {"x": self._buffered_inputs[self._step % 4]["x"]}
            self._step += 1
            return model(**inputs)["loss"]

    def script():
        model = Line()
        transformers_trainer_of(transformers, model, Generates).train()
        return weights_of(model)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("holds", ["numbers", "an average", "tensors", "a file", "a text that changes"])
def test_a_callback_of_the_script_goes_on_with_its_numbers_or_is_named(transformers, carried, tmp_path, holds):
    class Counts(transformers.TrainerCallback):
        def __init__(self):
            self.steps, self.recent, self.best, self.place, self.rate = 0, [], {}, str(tmp_path), lambda: 0.5

        def on_train_begin(self, args, state, control, model=None, **_):
            self.began_s, self.at_s, self.seen, self.model = time.time(), None, weights_of(model), model
            self.history = state.log_history
            if holds == "an average":
                self.average = copy.deepcopy(model)
            elif holds == "tensors":
                self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
                self.queue = collections.deque(maxlen=3)
            elif holds == "a file":
                self.file = open(tmp_path / "log", "w")
            elif holds == "a text that changes":
                self.text = ""

        def on_step_end(self, args, state, control, model=None, **_):
            self.steps += 1
            self.at_s = time.monotonic()
            self.recent = [*self.recent, self.steps][-3:]
            self.best["step"] = self.steps
            if holds == "an average":
                for mean, value in zip(self.average.parameters(), model.parameters(), strict=True):
                    mean.data.mul_(0.9).add_(value.detach(), alpha=0.1)
            elif holds == "tensors":
                for name, value in model.state_dict().items():
                    self.shadow[name].mul_(0.9).add_(value, alpha=0.1)
                self.queue.append(value.clone())
            if holds == "a text that changes":
                self.text = str(self.steps)

    def script():
        counts, model, began_s = Counts(), Line(), time.time()
        trainer = transformers_trainer_of(transformers, model, callbacks=[counts], logging_steps=5)
        trainer.train()
        assert counts.began_s >= began_s and counts.at_s, "an instant is the session's"
        assert counts.history is trainer.state.log_history
        script.seen = counts.seen
        averages = [weights_of(counts.average)] if holds == "an average" else []
        if holds == "tensors":
            averages = [item.tolist() for item in (*counts.shadow.values(), *counts.queue)]
        return weights_of(model), counts.steps, counts.recent, counts.best, averages

    (steps, whole), (resumed_steps, resumed) = whole_and_resumed(carried, script, cut_at=7)
    restored = script.seen
    told = carried.session._state.exactness.facts.get("attributes", "")
    assert resumed_steps == steps and resumed[0] == whole[0]
    if holds in ("numbers", "an average", "tensors"):
        assert resumed == whole and not told
    else:
        assert resumed[1:3] == (steps - 7, [9, 10, 11]) and "Counts (" in told
    assert carried(script)[1] and script.seen != restored, "it begins with the weights that were restored"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize(
    ("data", "first", "later"),
    [
        ("list", {}, {"num_train_epochs": 5}),
        ("list", {"max_steps": 8}, {"max_steps": 14}),
        ("stream", {"max_steps": 8}, {"max_steps": 14}),
    ],
)
def test_a_training_of_transformers_that_is_extended_has_the_bits_of_one_that_was_as_long_from_the_beginning(
    transformers, carried, data, accumulate, first, later
):
    class Counts(transformers.TrainerCallback):
        epochs = in_epoch = 0

        def on_epoch_begin(self, *_, **__):
            self.epochs, self.in_epoch = self.epochs + 1, 0

        def on_step_end(self, *_, **__):
            self.in_epoch += 1

    def script(**options):
        model, counts = Line(), Counts()
        trainer = transformers_trainer_of(
            transformers, model, lr_scheduler_type="constant", gradient_accumulation_steps=accumulate, logging_steps=5,
            callbacks=[counts],
            # without a length an epoch is all of `max_steps`: the shorter training would evaluate once more
            eval_strategy="no" if data == "stream" else "epoch", **options,
        )  # fmt: skip
        if data == "stream":
            trainer.train_dataset = [{"x": item} for item in torch.arange(12.0)[:, None]]
            trainer.get_train_dataloader = lambda: DataLoader(Shuffled(trainer.train_dataset), 2)
        loss = trainer.train().training_loss
        return (
            model.seen,
            weights_of(model),
            pytest.approx(loss),
            trainer.state.global_step,
            counts.epochs,
            counts.in_epoch,
        )

    steps, (seen, *_) = carried(lambda: script(**first))
    saved = carried.session.saved()
    _, whole = carried(lambda: script(**first | later))
    _, extended = carried(lambda: script(**first | later), saved=saved)
    assert steps and len(extended[0]) == len(whole[0]) - len(seen) > 0
    assert extended == (whole[0][len(seen) :], *whole[1:])
    finished = carried.session.saved(is_final=True)
    assert carried(lambda: script(**first | later), saved=finished)[1][1:] == whole[1:]


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_that_was_stopped_after_an_epoch_begins_none_when_it_ends_again(
    transformers, carried
):
    class Stops(transformers.TrainerCallback):
        epochs = 0

        def on_epoch_begin(self, *_, **__):
            self.epochs += 1

        def on_epoch_end(self, _, __, control, **___):
            control.should_training_stop = self.epochs == 2

    def script():
        stops = Stops()
        transformers_trainer_of(transformers, Line(), callbacks=[stops]).train()
        return stops.epochs

    assert carried(script) == (12, 2)
    assert carried(script, saved=carried.finished)[1] == 2


class Shuffled(IterableDataset):
    """Samples in another order each time, without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[number] for number in torch.randperm(len(self.samples)))


@pytest.mark.filterwarnings("ignore")
def test_a_training_of_transformers_without_a_length_has_steps_and_no_number_of_epochs(transformers, carried):
    """It stood for no end, and the supervisor refused each message that told of it."""

    def script():
        trainer = transformers_trainer_of(transformers, Line(), max_steps=4)
        trainer.get_train_dataloader = lambda: DataLoader(Shuffled(trainer.train_dataset), 2)
        trainer.train()

    carried(script)
    position = carried.session._state.position
    assert (position.steps_total, position.epochs_total) == (4, 0)


@pytest.mark.filterwarnings("ignore")
def test_a_finished_training_of_transformers_has_all_of_its_epochs(transformers, carried):
    carried(lambda: transformers_trainer_of(transformers, Line()).train())
    assert carried.session._state.position.epoch == 3


def test_samples_of_an_evaluation_are_none_of_the_training(accelerated):
    def script(accelerator):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        train, other = DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(8), 2)
        model, optimizer, train, other = accelerator.prepare(model, optimizer, train, other)
        for _ in range(3):
            for batch in train:
                train_batch(accelerator, model, optimizer, batch)
            len(list(other))

    accelerated(script)
    assert accelerated.session._state.position.samples == 3 * 12
    facts = accelerated.session._state.exactness.facts
    assert facts["ladder"] == "none: the script does forward and backward itself" and "memory" not in facts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
def test_ranks_that_would_train_for_themselves_are_refused(request, carried, monkeypatch, library):
    """As with Accelerate without a GPU: a checkpoint would hold a part of the weights of each of them."""
    two = property(lambda _: 2, lambda *_: None)
    monkeypatch.setattr(CutSession, "world_size", two, raising=False)
    if library == "accelerate":
        run = request.getfixturevalue("accelerated")
        script = lambda accelerator: accelerator.prepare(  # noqa: E731
            model := nn.Linear(1, 1), torch.optim.AdamW(model.parameters(), 0.1)
        )
    elif library == "transformers":
        run, module = carried, request.getfixturevalue("transformers")
        script = lambda: transformers_trainer_of(module, Line()).train()  # noqa: E731
    else:
        run, module = carried, request.getfixturevalue("lightning")
        script = lambda: lightning_trainer_of(module).fit(lightning_module(module)(), DataLoader(numbers(4)))  # noqa: E731
    with pytest.raises(KgorchError, match=r"trains with 1 process\(es\), and the stage has 2 ranks") as error:
        run(script)
    assert "ranks = 1" in error.value.next_step


@pytest.mark.parametrize("devices", [1, 2])
def test_a_strategy_of_lightning_that_starts_processes_itself_is_refused_before_it_does(lightning, carried, devices):
    """The first of them waited for ever."""

    def script():
        made = lightning.Trainer(accelerator="cpu", devices=devices, strategy="ddp_notebook", logger=False)
        made.fit(lightning_module(lightning)(), DataLoader(numbers(4)))

    with pytest.raises(KgorchError, match="starts its processes itself") as error:
        carried(script)
    assert f"`ranks = {devices}`" in str(error.value.next_step)
