"""What libraries around a Trainer keep beside the model and its optimizer goes on."""

from __future__ import annotations

import importlib

import pytest
import torch
from small_trainings import lightning_module, lightning_trainer_of, numbers, weights_of, whole_and_resumed
from torch.utils.data import DataLoader, Dataset

from kgorch.worker.integrations import lightning_metrics

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
    lightning_metrics.put_back(module, {"mean": state, "none": state})
    lightning_metrics.put_back(module, state)
    assert before == {name: getattr(module["mean"], name) for name in before} and module["mean"]._update_count == 0
