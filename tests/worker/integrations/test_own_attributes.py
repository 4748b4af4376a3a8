"""Numbers and tensors in attributes of the script's objects go on: of a Trainer, a model, data sets and callbacks."""

from __future__ import annotations

import collections
import copy
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_trainings import (
    Annealed,
    Around,
    lightning_module,
    lightning_trainer_of,
    numbers,
    weights_of,
    whole_and_resumed,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from kgorch.worker.integrations import fabric

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


class Growing(Dataset):
    """What it gives hangs on an attribute that a callback sets."""

    def __init__(self):
        self.scale = 1.0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.tensor([index * self.scale])}


@pytest.mark.parametrize("cut_at", [7, 12])
@pytest.mark.parametrize("is_subset", [False, True])
def test_attributes_around_a_trainer_of_transformers_go_on(transformers, carried, cut_at, is_subset):
    class Contrastive(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.beta, self.unchanged = 0.0, torch.ones(2)
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)
            self.queue, self.sums, self.chance = (
                torch.zeros(3),
                collections.deque(maxlen=2),
                torch.Generator().manual_seed(1),
            )

        def compute_loss(self, model, inputs, **_):
            out = model(inputs["x"])
            self.teacher.places += 1
            for mean, weight in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mean.data.mul_(0.9).add_(weight.detach(), alpha=0.1)  # leaves no trace in the tensor's version
            with torch.no_grad():
                goal = self.teacher(inputs["x"])
            self.beta += 0.01 * float(torch.rand((), generator=self.chance))
            self.queue = torch.cat([out.detach().mean()[None], self.queue])[:3]
            self.sums.append(float(out.detach().sum()))
            return ((out - 1) ** 2).mean() + self.beta * ((out - goal) ** 2).mean() + (out * self.queue.sum()).mean()

    class Grows(transformers.TrainerCallback):
        def __init__(self, data):
            self.data, self.trainer, self.epochs, self.in_epoch = data, None, 0, 0
            self.sums, self.until, self.is_first = {"all": torch.zeros(1)}, 0.0, False

        def on_epoch_begin(self, *_, **__):
            self.epochs, self.in_epoch, self.until = self.epochs + 1, 0, time.time() + 3600
            self.is_first = True
            self.sums["all"] += 100

        def on_step_end(self, *_, **__):
            self.in_epoch += 1
            self.sums["all"] += 1 + 1000 * self.is_first
            self.is_first = False
            self.trainer.margin = getattr(self.trainer, "margin", 1.0) * 0.9  # an attribute of the library's own object

        def on_epoch_end(self, *_, **__):
            self.data.scale *= 0.95  # a batch is read ahead, but none of the next epoch

    def script():
        model, data = Annealed(), Growing()
        grows = Grows(data)
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3,
        )  # fmt: skip
        train = Subset(data, range(12)) if is_subset else data
        grows.trainer = trainer = Contrastive(model, arguments, train_dataset=train, callbacks=[grows])
        began_s = time.time()
        trainer.train()
        assert grows.until > began_s + 3600, "a time limit is the session's"
        assert trainer.unchanged.tolist() == [1, 1]
        averages = (
            weights_of(trainer.teacher),
            trainer.teacher.places.tolist(),
            trainer.queue.tolist(),
            list(trainer.sums),
        )
        numbers = trainer.beta, trainer.margin, data.scale, grows.epochs, grows.in_epoch, grows.sums["all"].item()
        return weights_of(model), model.temperature, numbers, averages

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == 18
    assert "attributes" not in carried.session._state.exactness.facts


class Config:
    """Of its attributes a function of the script changes one."""

    scale, seen = 1.0, collections.Counter()


steps_done = 0


class Named(Dataset):
    """What it reads is in a list of names, which the script shuffles in place."""

    def __init__(self):
        self.names = [(f"row{number}", number) for number in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": torch.tensor([float(self.names[index][1])])}


class Critic:
    """Trained beside the model, by an optimizer and a schedule that no library knows."""

    def __init__(self):
        self.net = nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, total_steps=40)

    def step(self, x):
        global steps_done
        steps_done += 1
        Config.scale *= 0.95
        Config.seen["steps"] += 1
        self.optimizer.zero_grad()
        loss = (self.net(x / 10) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return Config.scale * loss.item() / (1 + steps_done / 10)


def begin_anew():
    global steps_done
    steps_done, Config.scale = 0, 1.0
    Config.seen.clear()


def changed(critic, data):
    lr = critic.optimizer.param_groups[0]["lr"]
    return steps_done, Config.scale, dict(Config.seen), weights_of(critic.net), lr, list(data.names)


@pytest.mark.parametrize("cut_at", [1, 7, 12])
def test_optimizers_names_globals_and_class_attributes_around_a_trainer_of_transformers_go_on(
    transformers, carried, cut_at
):
    class Adversarial(transformers.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.critic = Critic()

        def compute_loss(self, model, inputs, **_):
            return (model(inputs["x"]) - 1).square().mean() * self.critic.step(inputs["x"])

    class Changes(transformers.TrainerCallback):
        def __init__(self):
            self.data, self.first = None, []

        def on_train_begin(self, *_, model, **__):
            self.first = [weight.detach().clone() for weight in model.parameters()]

        def on_epoch_begin(self, *_, **__):
            random.shuffle(self.data.names)

        def on_step_end(self, args, *_, **__):
            args.max_grad_norm *= 0.9

    def script():
        begin_anew()
        model, data, changes = nn.Linear(1, 1), Named(), Changes()
        changes.data = data
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3,
        )  # fmt: skip
        optimizers = Around(model.parameters()), None
        trainer = Adversarial(model, arguments, train_dataset=data, callbacks=[changes], optimizers=optimizers)
        trainer.train()
        first = [weight.item() for weight in changes.first]
        return weights_of(model), arguments.max_grad_norm, changed(trainer.critic, data), first

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == 18 and whole[1][2][0] == 18
    assert "attributes" not in carried.session._state.exactness.facts


@pytest.mark.parametrize("cut_at", [1, 7, 12])
def test_optimizers_names_globals_and_class_attributes_around_a_trainer_of_lightning_go_on(lightning, carried, cut_at):
    class Adversarial(lightning_module(lightning)):
        def __init__(self, beta=1.0):
            super().__init__()
            self.save_hyperparameters()
            self.critic = Critic()

        def configure_optimizers(self):
            return Around(self.net.parameters())

        def training_step(self, batch, index):
            self.hparams.beta *= 0.95
            return (self.net(batch["x"] / 10) - self.hparams.beta).square().mean() * self.critic.step(batch["x"])

        def on_train_epoch_start(self):
            random.shuffle(data.names)

    data = None

    def script():
        nonlocal data
        begin_anew()
        random.seed(1)
        module, data = Adversarial(), Named()
        lightning_trainer_of(lightning).fit(module, DataLoader(data, 2))
        return weights_of(module), changed(module.critic, data)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == 18 and whole[1][1][0] == 36, "the optimizer computes each batch twice"
    assert "attributes" not in carried.session._state.exactness.facts


@pytest.mark.parametrize("cut_at", [7, 12, 13])
def test_attributes_of_a_module_and_its_callbacks_go_on_in_lightning(lightning, carried, cut_at):
    class Average(lightning.Callback):
        """Its shadow is made before the training is restored."""

        def __init__(self):
            self.shadow, self.epochs, self.rng = None, 0, random.Random(1)

        def on_fit_start(self, trainer, module):
            self.shadow = {name: value.detach().clone() for name, value in module.state_dict().items()}

        def on_train_epoch_start(self, trainer, module):
            self.epochs += 1

        def on_train_batch_end(self, trainer, module, *_):
            for name, value in module.state_dict().items():
                self.shadow[name].mul_(0.9).add_(value, alpha=0.1 * self.rng.random())

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.net, self.outputs, self.history, self.rng = Annealed(), [], [], np.random.default_rng(1)

        def training_step(self, batch, index):
            loss = ((self.net(batch[0] * self.rng.uniform(0.5, 1)) - 1) ** 2).mean()
            self.outputs.append(loss.detach())
            return loss

        def on_train_epoch_end(self):
            self.history.append(torch.stack(self.outputs).mean().item())
            self.outputs.clear()

    def script():
        module, average = Module(), Average()
        lightning_trainer_of(lightning, callbacks=[average]).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        shadow = {name: value.tolist() for name, value in average.shadow.items()}
        return weights_of(module), module.net.temperature, module.history, shadow, average.epochs

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and len(whole[1][2]) == 3
    assert "attributes" not in carried.session._state.exactness.facts


class Counted(Dataset):
    """What it gives hangs on what was read before."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.reads += 1
        return {"x": torch.tensor([index * (1 + self.reads / 100)])}


class Collates:
    def __init__(self):
        self.calls, self.shift = 0, 0.0

    def __call__(self, rows):
        self.calls += 1
        return {"x": torch.stack([row["x"] for row in rows]) * (1 + self.calls / 100) + self.shift}


@pytest.mark.parametrize("cut_at", [1, 7, 11, 12])
def test_what_is_counted_while_reading_counts_no_batch_twice_in_transformers(transformers, carried, cut_at):
    """A resume reads again what such an epoch has used: the counts were too high, and so was what hangs on them."""

    class Shifts(transformers.TrainerCallback):
        def __init__(self, collator):
            self.collator = collator

        def on_epoch_begin(self, *_, **__):
            self.collator.shift = self.collator.calls / 10

        def on_step_end(self, _, state, *__, **___):
            if state.global_step == 8:  # a batch is read ahead
                self.collator.shift += 0.5

    def script():
        model, data, collator = Annealed(), Counted(), Collates()
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3,
        )  # fmt: skip

        class Trained(transformers.Trainer):
            def compute_loss(self, model, inputs, **_):
                return ((model(inputs["x"]) - 1) ** 2).mean()

        Trained(model, arguments, train_dataset=data, data_collator=collator, callbacks=[Shifts(collator)]).train()
        return weights_of(model), data.reads, collator.calls, collator.shift

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[1][1:3] == (36, 18)
    assert "attributes" not in carried.session._state.exactness.facts


class CountedStream(IterableDataset):
    """Without a length: Lightning reads a batch ahead."""

    def __init__(self):
        self.reads = self.passes = 0

    def __iter__(self):
        self.passes += 1
        for index in range(12):
            self.reads += 1
            yield {"x": torch.tensor([index * (self.passes + self.reads / 100)])}


class Module(nn.Module):
    """Mixed into a LightningModule."""

    def training_step(self, batch, index):
        parts = batch if isinstance(batch, list) else [batch]  # of several loaders
        return sum(((self.net(part["x"]) - 1) ** 2).mean() for part in parts)


@pytest.mark.parametrize("cut_at", [1, 6, 7, 11, 12])
@pytest.mark.parametrize("kind", ["counts", "two that count", "stream", "annealed", "new generator"])
def test_what_the_loader_reads_by_is_as_it_was_in_lightning(lightning, carried, kind, cut_at):
    """Data that count their reads, that a callback changes at each step, or that are made anew for each epoch."""

    class Anneals(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if kind == "annealed":
                self.data.scale *= 0.95

    class Drawn(Dataset):
        def __init__(self, epoch):
            self.rng = np.random.default_rng(epoch)

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return {"x": torch.tensor([index * self.rng.uniform()], dtype=torch.float32)}

    class Own(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Drawn(self.trainer.current_epoch), 2, shuffle=True)

    class Trained(Module, lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.net = Annealed()

    def script():
        module, callback = Trained(), Anneals()
        data = {
            "counts": Counted,
            "two that count": Counted,
            "stream": CountedStream,
            "annealed": Growing,
            "new generator": Own,
        }[kind]()
        callback.data, options = data, {"reload_dataloaders_every_n_epochs": 1} if kind == "new generator" else {}
        trainer = lightning_trainer_of(lightning, callbacks=[callback], **options)
        loader = (
            data if kind == "new generator" else DataLoader(data, 2, collate_fn=Collates(), shuffle=kind == "counts")
        )
        trainer.fit(module, [loader, DataLoader(Counted(), 2)] if kind == "two that count" else loader)
        return weights_of(module), [getattr(data, name, 0) for name in ("reads", "passes", "scale")]

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("cut_at", [1, 6, 7, 11])
@pytest.mark.parametrize("draws", ["the process's", "its own"])
@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"])
@pytest.mark.parametrize("kind", ["of the module", "of the data", "of a stream"])
def test_what_is_done_to_a_batch_on_its_way_to_the_device_is_done_once(lightning, carried, kind, hook, draws, cut_at):
    """Lightning does it before `on_train_batch_start`: the batch of a cut is transferred once more."""

    def transfer(self, batch, *_):
        self.seen += 1
        noise = torch.rand((), generator=self.rng if draws == "its own" else None)
        return {"x": batch["x"] + noise * self.seen}

    class Augments:
        def __init__(self):
            super().__init__()
            self.rng, self.seen = torch.Generator().manual_seed(1), 0

    class Data(Augments, lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Growing(), 2, shuffle=True)

    class Trained(Augments, Module, lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.net = Annealed()

    def script():
        setattr(Data if kind == "of the data" else Trained, hook, transfer)
        module, data = Trained(), Data()
        loader = DataLoader(CountedStream() if kind == "of a stream" else Growing(), 2)
        lightning_trainer_of(lightning).fit(module, data if kind == "of the data" else loader)
        return weights_of(module), module.seen, data.seen

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("cut_at", [3, 9, 11, 15])
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_loading_processes_have_what_the_data_were_when_their_epoch_began(request, carried, library, cut_at):
    """What a callback changes in an epoch they see from the next one on; those of a resumed session had it at once."""
    library = request.getfixturevalue(library)

    def script():
        data, model = Growing(), nn.Linear(1, 1)
        if library.__name__ == "transformers":

            class Scales(library.TrainerCallback):
                def on_step_end(self, *_, **__):
                    data.scale *= 0.9

            class Squares(library.Trainer):
                def compute_loss(self, model, inputs, **_):
                    return (model(inputs["x"] / 10) - 1).square().mean()

            arguments = library.TrainingArguments(
                "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
                remove_unused_columns=False, save_strategy="no", num_train_epochs=3, dataloader_num_workers=1,
            )  # fmt: skip
            Squares(model, arguments, train_dataset=data, callbacks=[Scales()]).train()
            return weights_of(model), data.scale

        class Module(lightning_module(library)):
            def training_step(self, batch, index):
                return ((self.net(batch["x"] / 10) - 1) ** 2).mean()

            def on_train_batch_end(self, *_):
                data.scale *= 0.9

        torch.manual_seed(3)
        module = Module()
        lightning_trainer_of(library).fit(module, DataLoader(data, 2, num_workers=1))
        return weights_of(module), data.scale

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("cut_at", [3, 8, 11])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_weights_by_which_a_sampler_draws_go_on_in_lightning(lightning, carried, workers, cut_at):
    """Hard examples come more often: an epoch is drawn by the weights of its begin, the next one by those of its end."""

    def script():
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(12), 12, generator=torch.Generator().manual_seed(1))

        class Module(lightning_module(lightning)):
            def on_train_batch_end(self, _, batch, index):
                weights = sampler.weights.clone()
                weights[batch[0].long().flatten()] += 3
                sampler.weights = weights

        torch.manual_seed(3)
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12), 2, sampler=sampler, num_workers=workers))
        return weights_of(module), sampler.weights.tolist()

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


class EasyFirst(torch.utils.data.Sampler):
    """A curriculum, which counts its passes."""

    def __init__(self):
        self.passes, self.generator = 0, torch.Generator().manual_seed(1)

    def __len__(self):
        return 12

    def __iter__(self):
        self.passes += 1
        return iter(
            torch.argsort(torch.arange(12) + torch.rand(12, generator=self.generator) * 3 * self.passes).tolist()
        )


@pytest.mark.parametrize("cut_at", [3, 8, 12, 15])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_passes_of_a_sampler_go_on_in_transformers(transformers, carried, workers, cut_at):
    """Its first pass came again in each session."""

    def script():
        samplers = []

        class Curriculum(transformers.Trainer):
            def _get_train_sampler(self, *_):
                samplers.append(EasyFirst())
                return samplers[-1]

            def compute_loss(self, model, inputs, **_):
                return (model(inputs["x"] / 10) - 1).square().mean()

        model = nn.Linear(1, 1)
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3, dataloader_num_workers=workers,
        )  # fmt: skip
        Curriculum(model, arguments, train_dataset=Growing()).train()
        return weights_of(model), samplers[-1].passes

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("cut_at", [1, 6, 7, 13])
@pytest.mark.parametrize("looks_before", [0, 2])
def test_data_of_a_validation_in_lightning_go_on(lightning, carried, looks_before, cut_at):
    class Crops(Growing):
        def __init__(self):
            super().__init__()
            self.rng, self.reads = np.random.default_rng(1), 0

        def __getitem__(self, index):
            self.reads += 1
            return {"x": torch.tensor([index + self.rng.uniform()], dtype=torch.float32)}

    class Trained(Module, lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.net, self.sum = Annealed(), torch.zeros(1)

        def validation_step(self, batch, _):
            self.sum += batch["x"].sum()

    def script():
        module, crops = Trained(), Crops()
        trainer = lightning_trainer_of(lightning, num_sanity_val_steps=looks_before)
        trainer.fit(module, DataLoader(Growing(), 2), DataLoader(crops, 4, collate_fn=Collates()))
        return weights_of(module), module.sum.item(), crops.reads, float(crops.rng.uniform())

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("way", ["object", "method", "list", "slots", "closure"])
def test_what_a_trainer_of_transformers_was_given_to_call_goes_on(transformers, carried, way):
    class Smooths:
        def __init__(self):
            self.calls, self.mean = 0, 0.0

        def __call__(self, outputs, *_):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * float(outputs.predictions.mean())
            return {"mean": self.mean}

        measure = __call__

    class Slotted:
        __slots__ = ("calls", "mean")
        __init__, __call__ = Smooths.__init__, Smooths.__call__

    def closure():
        calls, means = 0, [0.0]

        def measure(outputs):
            nonlocal calls
            calls += 1
            means.append(0.9 * means[-1] + 0.1 * float(outputs.predictions.mean()))
            return {"mean": means[-1]}

        return measure, lambda: (calls, means)

    class Plain(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            out = model(inputs["x"])
            loss = ((out - 1) ** 2).mean()
            return (loss, {"out": out}) if return_outputs else loss

    class Rewards(Plain):
        """Calls a list of functions, as the trainers of TRL do."""

        def evaluate(self, *_, **__):
            self.reward_funcs[1](SimpleNamespace(predictions=next(self.model.parameters()).detach()))

    def script():
        model, metrics = Annealed(), Slotted() if way == "slots" else Smooths()
        measure, measured = closure()
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3, label_names=["x"],
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3, eval_strategy="epoch",
        )  # fmt: skip
        given = {"method": getattr(metrics, "measure", None), "list": None, "closure": measure}.get(way, metrics)
        kind = Rewards if way == "list" else Plain
        trainer = kind(model, arguments, train_dataset=Growing(), eval_dataset=Growing(), compute_metrics=given)
        trainer.reward_funcs = [len, metrics] if way == "list" else []
        trainer.train()
        return weights_of(model), *(measured() if way == "closure" else (metrics.calls, metrics.mean))

    whole, resumed = whole_and_resumed(carried, script, 13)
    assert resumed == whole and whole[1][1] == 3


@pytest.mark.parametrize("cut_at", [4, 8, 12, 13])
def test_attributes_of_modules_go_on_in_a_loop_around_accelerate(accelerated, cut_at):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.steps, self.running = Annealed(), 0, torch.zeros(1)

        def forward(self, x):
            self.steps += 1
            self.running = 0.9 * self.running + x.mean().detach()
            return self.net(x) + 0.01 * self.running

    def script(accelerator):
        model = Steps()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(numbers(12), 2, shuffle=True))
        for _ in range(3):
            for batch in loader:
                train_batch_of(accelerator, model, optimizer, batch)
        return weights_of(model), model.steps, model.net.temperature, model.running.tolist()

    whole, resumed = whole_and_resumed(accelerated, script, cut_at)
    assert resumed == whole and whole[1][1] == 18


def train_batch_of(accelerator, model, optimizer, batch):
    accelerator.backward(((model(batch[0]) - 1) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_of_fabric_is_told_that_it_is_not_carried(lightning, monkeypatch, capsys):
    from lightning.fabric import fabric as library

    told = []
    monkeypatch.setattr(library.Fabric, "backward", library.Fabric.backward)
    monkeypatch.setattr(fabric.worker, "launch", lambda: "launch")
    monkeypatch.setattr(fabric.event_sender, "send_late", lambda launch, kind, facts: told.append(facts))
    fabric.adapt(library)
    made = library.Fabric(accelerator="cpu", devices=1)
    model, optimizer = made.setup(net := nn.Linear(1, 1), torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        made.backward(model(torch.ones(1)).sum())
        optimizer.step()
    assert len(told) == 1 and "Fabric is not carried" in told[0]["loop"]
    assert capsys.readouterr().err.count("Fabric is not carried") == 1


drawn = random.Random(5)
read = collections.Counter()


class Draws(Dataset):
    """Reads by what its module holds."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        read["samples"] += 1
        return {"x": torch.tensor([index + drawn.random()])}


class Slotted:
    """Has no attributes of its own, and answers for all."""

    __slots__ = ("held",)

    def __init__(self):
        self.held = {}

    def __getattr__(self, name):
        return self.held[name]


slotted = Slotted()


@pytest.mark.parametrize("cut_at", [3, 5])
def test_what_data_read_by_in_a_module_is_left_to_the_batches_that_are_read_again(transformers, carried, cut_at):
    """It came back as it was at the save, and what was read again changed it once more. An object that has no attributes of
    its own, and answers for all, ended the training."""

    def script():
        drawn.seed(5)
        read.clear()
        model = nn.Linear(1, 1)
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3,
            remove_unused_columns=False, save_strategy="no", num_train_epochs=1,
        )  # fmt: skip

        class Squares(transformers.Trainer):
            def compute_loss(self, model, inputs, **_):
                return (model(inputs["x"] / 10) - 1).square().mean()

        Squares(model, arguments, train_dataset=Draws()).train()
        return weights_of(model), dict(read)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[1][1] == {"samples": 12}
