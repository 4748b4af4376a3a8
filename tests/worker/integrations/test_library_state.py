"""What libraries around a Trainer keep beside the model and its optimizer goes on."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from small_trainings import Annealed, lightning_module, lightning_trainer_of, numbers, weights_of, whole_and_resumed
from torch.utils.data import DataLoader, Dataset

from kgorch.worker.integrations import metric_states
from kgorch.worker.integrations.attribute_search import Root
from kgorch.worker.integrations.own_attributes import OwnAttributes

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]

STEPS = 24


class Words(Dataset):
    def __init__(self):
        self.words = torch.randint(1, 20, (32, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 32

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words.sum() > 60).long()}


def bert(transformers):
    transformers.set_seed(2)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=2,
        max_position_embeddings=8,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def trainer_of(transformers, model, callbacks=(), **options):
    arguments = transformers.TrainingArguments(
        "out", use_cpu=True, report_to=[], per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no",
        max_steps=STEPS, learning_rate=1e-2, logging_steps=3, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Words(), callbacks=list(callbacks))


@pytest.mark.parametrize("cut_at", [3, 17])
def test_the_averages_of_trl_and_the_weights_that_they_began_with_go_on(transformers, carried, cut_at):
    """The model that it writes at the end was another one."""
    trl = pytest.importorskip("trl")

    def script():
        average = trl.BEMACallback(update_freq=2, update_after=2)
        trainer = trainer_of(transformers, bert(transformers), [average])
        trainer.train()
        theta0 = [weight.tolist() for weight in average.theta0_params]
        return weights_of(trainer.model), weights_of(average.running_model), theta0

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == STEPS
    assert "attributes" not in carried.session._state.exactness.facts


@pytest.mark.parametrize("cut_at", [7, 13])
def test_the_importances_by_which_adalora_allocates_ranks_go_on(transformers, carried, cut_at):
    peft = pytest.importorskip("peft")

    class Allocates(transformers.TrainerCallback):
        def on_optimizer_step(self, args, state, control, model, **_):
            model.base_model.update_and_allocate(state.global_step)
            if state.global_step == 14:  # the last ones are forgotten
                seen[:] = [average.sum().item() for average in model.base_model.rankallocator.exp_avg_ipt.values()]

    seen = []

    def script():
        config = peft.AdaLoraConfig(
            init_r=4, target_r=1, tinit=3, tfinal=8, deltaT=2, total_step=STEPS, task_type="SEQ_CLS",
            target_modules=["query", "value", "dense"],
        )  # fmt: skip
        model = peft.get_peft_model(bert(transformers), config)
        trainer_of(transformers, model, [Allocates()]).train()
        ranks = {name: int((weight != 0).sum()) for name, weight in model.named_parameters() if "lora_E" in name}
        return [weight.tolist() for weight in model.parameters() if weight.requires_grad], ranks, [*seen]

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == STEPS
    assert len(set(whole[1][1].values())) > 1, "ranks were allocated"


@pytest.mark.parametrize("counts", ["no", "all"])
def test_what_a_trainer_has_logged_is_there_after_a_resume_also_where_it_counts_tokens(transformers, carried, counts):
    """It then adds to each entry what else only the last one has, and all of them were lost."""

    def script():
        trainer = trainer_of(transformers, bert(transformers), include_num_input_tokens_seen=counts)
        trainer.train()
        return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]

    whole, resumed = whole_and_resumed(carried, script, 10)
    assert resumed == whole and len(whole[1]) == STEPS // 3


@pytest.mark.parametrize("resets", ["at the end", "at the begin"])
@pytest.mark.parametrize("cut_at", [5, 11, 14])
def test_what_metrics_of_a_module_have_collected_in_a_cut_epoch_goes_on_in_lightning(
    lightning, carried, cut_at, resets
):
    torchmetrics = pytest.importorskip("torchmetrics")
    binary = importlib.import_module("torchmetrics.classification")

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
            self.group = torchmetrics.MetricCollection([binary.BinaryPrecision(), binary.BinaryRecall()])
            self.told = []

        def metrics(self):
            return self.mean, self.all, self.group

        def training_step(self, batch, index):
            given = self.net(batch[0] / 10)
            loss = ((given - 1) ** 2).mean()
            self.mean.update(loss.detach())
            self.all.update(given.detach().flatten())
            self.group.update(torch.sigmoid(given.detach() - 0.5), (batch[0] > 3).int())
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_start(self):
            if resets == "at the begin":
                for metric in self.metrics():
                    metric.reset()

        def on_train_epoch_end(self):
            told = {name: float(value) for name, value in self.group.compute().items()}
            self.told.append([float(self.mean.compute()), self.all.compute().tolist(), told])
            if resets == "at the end":
                self.all.reset()
                self.group.reset()

    def script():
        torch.manual_seed(3)
        module, trainer = Module(), lightning_trainer_of(lightning)
        trainer.fit(module, DataLoader(numbers(10), 2))
        return module.told[-1], weights_of(module), float(trainer.callback_metrics["mean"])

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


def metrics_of(torchmetrics):
    """One of each kind, in what holds them: alone, in a collection, a dict, a list, around others."""
    binary = importlib.import_module("torchmetrics.classification")
    return SimpleNamespace(
        alone=torchmetrics.MeanMetric(),
        group=torchmetrics.MetricCollection([binary.BinaryPrecision(), binary.BinaryRecall()]),
        table={"max": torchmetrics.MaxMetric(), "all": torchmetrics.CatMetric()},
        items=[torchmetrics.SumMetric()],
        running=torchmetrics.RunningMean(window=3),
        extremes=torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
        tracked=torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True),
    )


def update(metrics, values):
    value = float(values.mean())
    for metric in (metrics.alone, *metrics.table.values(), *metrics.items, metrics.running, metrics.extremes):
        metric.update(value)
    metrics.extremes.compute()
    metrics.group.update(torch.sigmoid(values.flatten() + 0.3), (values.flatten() > -0.4).int())
    metrics.tracked.update(value)


def computed(metrics):
    one = {name: float(value) for name, value in metrics.group.compute().items()}
    several = [metrics.alone, *metrics.table.values(), *metrics.items, metrics.running]
    return [
        one,
        *(metric.compute().tolist() for metric in several),
        {name: float(value) for name, value in metrics.extremes.compute().items()},
        metrics.tracked.compute_all().tolist(),
    ]


@pytest.mark.parametrize("cut_at", [4, 8, 13])
def test_metrics_around_a_trainer_of_transformers_go_on(transformers, carried, cut_at):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Trainer(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made = metrics_of(torchmetrics)
            self.alone, self.group, self.table, self.items = made.alone, made.group, made.table, made.items
            self.running, self.extremes, self.tracked = made.running, made.extremes, made.tracked

        def compute_loss(self, model, inputs, **_):
            out = model(inputs["x"])
            update(self, out.detach())
            return ((out - 1) ** 2).mean() * (1 + self.running.compute())

    class Tracks(transformers.TrainerCallback):
        def __init__(self):
            self.trainer, self.mean = None, torchmetrics.MeanMetric()

        def on_epoch_begin(self, *_, **__):
            self.trainer.tracked.increment()

        def on_step_end(self, _, state, __, **___):
            self.mean.update(state.global_step)

    def script():
        torch.manual_seed(3)
        model, callback = Annealed(), Tracks()
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3,
        )  # fmt: skip
        data = [{"x": torch.tensor([float(number) - 5])} for number in range(12)]
        callback.trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        callback.trainer.train()
        return weights_of(model), computed(callback.trainer), float(callback.mean.compute())

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


def test_a_metric_beside_what_is_none_is_named():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Holds:
        def __init__(self):
            self.mixed = None

    told, thing = [], Holds()
    thing.mixed = {"mean": torchmetrics.MeanMetric(), "name": "a"}
    saves = OwnAttributes([Root("thing", thing)], (), (), "cpu", told.append)
    assert saves.state() == [["thing", {}, {}, {}, {}]] and not told
    thing.mixed["mean"].update(1.0)
    assert saves.state() == [["thing"]] and "thing (mixed)" in told[0]


@pytest.mark.parametrize("length", [10**9, 0, -1, True, "2"])
def test_a_tracker_has_no_length_of_a_stranger(length):
    torchmetrics = pytest.importorskip("torchmetrics")
    tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True)
    tracker.increment()
    metric_states.put_back(tracker, {"": {"length": length}})
    assert len(tracker) == 2, "the metric that it copies, and a copy"


@pytest.mark.parametrize(
    "state",
    [
        5,
        {"updates": 1},
        {"updates": "1", "values": {"mean_value": torch.ones(()), "weight": torch.ones(())}},
        {"updates": 1, "values": {"mean_value": torch.ones(()), "compute": torch.ones(())}},
        {"updates": 1, "values": {"mean_value": [torch.ones(())], "weight": torch.ones(())}},
        {"updates": 1, "values": {"mean_value": torch.ones((), dtype=torch.int64), "weight": torch.ones(())}},
    ],
)
def test_a_state_of_a_metric_from_a_stranger_is_left_out(state):
    torchmetrics = pytest.importorskip("torchmetrics")
    module = torch.nn.ModuleDict({"mean": torchmetrics.MeanMetric()})
    before = {name: getattr(module["mean"], name).clone() for name in module["mean"]._defaults}
    metric_states.put_back(module, {"mean": state, "none": state})
    metric_states.put_back(module, state)
    assert before == {name: getattr(module["mean"], name) for name in before} and module["mean"]._update_count == 0
