"""Numbers and tensors in attributes of the script's objects go on: of a Trainer, a model, data sets and callbacks."""

from __future__ import annotations

import collections
import copy
import json
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_trainings import Around, lightning_module, lightning_trainer_of, numbers, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from kgorch.worker.integrations import fabric
from kgorch.worker.integrations.own_attributes import OwnAttributes, Root, data_roots

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


class Annealed(nn.Module):
    """A plain attribute changes in `forward`."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = nn.Linear(1, 1), 1.0
        self.register_buffer("places", torch.arange(3.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.temperature *= 0.9
        return self.net(x / 10) * self.temperature


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


@pytest.mark.parametrize("way", ["object", "method", "list"])
def test_what_a_trainer_of_transformers_was_given_to_call_goes_on(transformers, carried, way):
    class Smooths:
        def __init__(self):
            self.calls, self.mean = 0, 0.0

        def __call__(self, outputs, *_):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * float(outputs.predictions.mean())
            return {"mean": self.mean}

        measure = __call__

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
        model, metrics = Annealed(), Smooths()
        arguments = transformers.TrainingArguments(
            "out", use_cpu=True, report_to=[], per_device_train_batch_size=2, disable_tqdm=True, seed=3, label_names=["x"],
            remove_unused_columns=False, save_strategy="no", num_train_epochs=3, eval_strategy="epoch",
        )  # fmt: skip
        given = {"object": metrics, "method": metrics.measure, "list": None}[way]
        kind = Rewards if way == "list" else Plain
        trainer = kind(model, arguments, train_dataset=Growing(), eval_dataset=Growing(), compute_metrics=given)
        trainer.reward_funcs = [len, metrics] if way == "list" else []
        trainer.train()
        return weights_of(model), metrics.calls, metrics.mean

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


class Holder:
    """An object with attributes of all kinds."""

    def __init__(self):
        self.number, self.items, self.table, self.queue = 0, [1], {"a": 1}, collections.deque([1], maxlen=2)
        self.array, self.scalar, self.tensor, self.pair = (
            np.zeros(2),
            np.float64(0.5),
            torch.zeros(2),
            (1, torch.zeros(1)),
        )
        self.counts, self.module, self.inner = collections.Counter(), nn.Linear(1, 1), None
        self.text, self.file, self.modules = "a", None, [nn.Linear(1, 1)]
        self.large = None
        self.rng, self.legacy, self.python = np.random.default_rng(1), np.random.RandomState(2), random.Random(3)
        self.torch, self.several = torch.Generator().manual_seed(4), [random.Random(5)]

    def draw(self):
        numbers = (
            self.rng.uniform(),
            self.legacy.normal(),
            self.python.gauss(0, 1),
            float(torch.rand((), generator=self.torch)),
        )
        self.python.gauss(0, 1)
        return numbers

    def set_generators(self, rng, legacy, python, torch):
        self.rng, self.legacy, self.python, self.torch, self.several = rng, legacy, python, torch, None

    def train(self):
        self.number, self.items[0], self.table["b"], self.array[1], self.tensor[1] = 5, 2, 3, 1, 1
        self.queue.append(2)
        self.counts["x"] += 1
        self.scalar, self.pair = np.float64(0.25), (2, torch.ones(1))
        self.module.weight.data.fill_(7)

    def say(self):
        self.text = "b"

    def clear(self):
        self._modules, self._buffers, self.training = {}, {}, False  # names that a module has, too

    def change_modules(self):
        self.modules[0].weight.data.fill_(3)


def looked_at(thing, told, **options):
    label = options.pop("label", "thing")
    return OwnAttributes([Root(label, thing, **options)], (), (), "cpu", told.append)


def plain(value):
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | collections.deque) else value


def test_each_kind_of_value_comes_back_in_place():
    told, trained = [], Holder()
    saves = looked_at(trained, told)
    assert saves.state() == [["thing", {}, {}, {}, {}]]
    trained.train()
    state = saves.state()
    assert set(state[0][1]) == {"number", "items", "table", "queue", "array", "scalar", "tensor", "pair", "counts"}
    other = Holder()
    held = {name: vars(other)[name] for name in ("items", "table", "queue", "array", "tensor", "counts", "module")}
    looked_at(other, told).put_back(state)
    for name in state[0][1]:
        assert plain(vars(other)[name]) == plain(vars(trained)[name]), name
    assert other.module.weight.item() == 7 and other.queue.maxlen == 2 and not told
    assert all(vars(other)[name] is value for name, value in held.items()), "others may hold them, too"


def test_a_random_generator_goes_on_where_it_was():
    """It began anew in each session, and nobody said so."""
    told, trained, other = [], Holder(), Holder()
    saves = looked_at(trained, told)
    trained.draw(), trained.draw()
    state = saves.state()
    assert json.loads(json.dumps(state[0][3])).keys() == {"rng", "legacy", "python", "torch"} and not state[0][1]
    again = looked_at(other, told)
    again.put_back(state)
    assert other.draw() == trained.draw() and not told
    trained.several[0].random()
    assert saves.state() == [["thing"]] and "thing (several)" in told[-1]
    other.rng = None
    again.put_back(state)
    again.state()
    assert "rng: of another kind" in told[-1], "it is not there to be set"


def test_a_generator_of_a_loader_or_of_the_process_is_saved_with_that():
    told, thing = [], Holder()
    thing.set_generators(
        np.random.mtrand._rand, np.random.mtrand._rand._bit_generator, random._inst, torch.default_generator
    )
    saves = looked_at(thing, told)
    np.random.rand(), random.random(), torch.rand(1)
    assert saves.state() == [["thing", {}, {}, {}, {}]]
    thing = Holder()
    saves = OwnAttributes(
        [Root("thing", thing)], (), (), "cpu", told.append, of_loaders=lambda: [thing.torch, thing.rng]
    )
    thing.draw()
    assert saves.state()[0][3].keys() == {"legacy", "python"} and not told


@pytest.mark.parametrize(
    "state", [None, 5, "x" * 100, {}, {"state": 1}, [3, [1] * 625, None], [3, [1 << 40] * 625, None]]
)
def test_a_state_of_a_generator_from_a_stranger_is_refused_and_leaves_it_as_it_is(state):
    told, thing, untouched = [], Holder(), Holder()
    saves = looked_at(thing, told)
    saves.put_back([["thing", {}, {}, dict.fromkeys(("rng", "legacy", "python", "torch", "number", "train"), state)]])
    saves.state()
    assert thing.draw() == untouched.draw() and "rng: of another kind or size" in told[-1] and thing.number == 0


def test_a_generator_of_the_scripts_own_class_goes_on_and_one_without_a_state_hinders_nothing():
    class Own(random.Random):
        pass

    told, trained, other = [], Holder(), Holder()
    for thing in (trained, other):
        thing.python, thing.rng = Own(1), random.SystemRandom()
    saves = looked_at(trained, told)
    trained.number = 5 + trained.python.randrange(3) + int(trained.rng.random())
    looked_at(other, told).put_back(saves.state())
    assert (other.number, other.python.random()) == (trained.number, trained.python.random()) and not told


def test_a_value_that_becomes_none_comes_back_as_none():
    """A Trainer without data has None among the objects that are no state of another one."""
    told, trained, other = [], Holder(), Holder()
    saves = OwnAttributes([Root("thing", trained)], (None,), (), "cpu", told.append)
    trained.number = None
    OwnAttributes([Root("thing", other)], (None,), (), "cpu", told.append).put_back(saves.state())
    assert other.number is None and not told


@pytest.mark.parametrize("change", ["say", "change_modules"])
@pytest.mark.parametrize("is_callback", [False, True])
def test_what_changes_and_cannot_be_saved_is_named(change, is_callback):
    told, thing = [], Holder()
    saves = looked_at(thing, told, is_callback=is_callback)
    thing.number = 5
    getattr(thing, change)()
    name = "text" if change == "say" else "modules"
    assert saves.state() == [["thing"]], "half of its state would be worse than none"
    assert name in told[0] and "thing (" in told[0]


def changed_and_put_back(change, before=lambda thing: None):
    """(object after a session that changes it, the one of the next session, what was told)."""
    told, trained, other = [], Holder(), Holder()
    before(trained)
    saves = looked_at(trained, told)
    change(trained)
    state = saves.state()
    before(other)
    looked_at(other, told).put_back(state)
    return trained, other, told


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


class Keeps:
    """Optimizers in several places, and names."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], 0.1, momentum=0.9)
        self.all, self.names = [torch.optim.SGD([self.weight], 0.1, momentum=0.9)], ["a", "b", "c"]

    def train(self):
        self.weight.grad = torch.ones(2)
        self.optimizer.step()


def test_an_optimizer_in_a_list_is_named_and_one_that_a_checkpoint_holds_is_not():
    thing, told = Keeps(), []
    saves = OwnAttributes([Root("thing", thing)], (), [thing.optimizer], "cpu", told.append)
    thing.train()
    assert not saves.state()[0][4] and not told
    thing.weight.grad = torch.ones(2)
    thing.all[0].step()
    assert saves.state() == [["thing"]] and "thing (all)" in told[0]


def test_readings_of_a_clock_are_the_sessions():
    thing = Keeps()
    saves = looked_at(thing, [])
    thing.number, thing.other, thing.train = int(time.time()) + 60, time.monotonic(), time.monotonic_ns()
    thing.tensor = 5
    assert saves.state()[0][1] == {"tensor": 5}


def test_a_list_of_names_comes_back_in_its_order_where_it_is_the_same_list():
    thing, other = Keeps(), Keeps()
    saves, restores = (OwnAttributes([Root("thing", item)], (), (), "cpu", print) for item in (thing, other))
    thing.names.reverse()
    saved, shared = saves.state(), other.names
    restores.put_back(saved)
    assert other.names == ["c", "b", "a"] and other.names is shared
    assert restores.state()[0][4]["names"]["order"].tolist() == [2, 1, 0], "the next session begins otherwise"
    thing.names.append("d")
    assert saves.state() == [["thing"]], "a name comes from no checkpoint"
    third = Keeps()
    third.names = ["a", "b", "x"]
    told = []
    misfits = OwnAttributes([Root("thing", third)], (), (), "cpu", told.append)
    misfits.put_back(saved)
    misfits.state()
    assert third.names == ["a", "b", "x"] and "thing (names: of another kind or size than it was)" in told[0]


def test_a_list_of_names_that_is_made_and_shuffled_at_each_begin_comes_back_in_its_order():
    """As where `train_dataloader` lists the files and shuffles them: a session begins with an order of its own."""
    thing, other = Keeps(), Keeps()
    thing.names, other.names = [("b", 1), ("a", 1.0), ("c", 0), ("a", 1)], [("a", 1), ("a", 1.0), ("b", 1), ("c", 0)]
    saves, restores = (OwnAttributes([Root("thing", item)], (), (), "cpu", print) for item in (thing, other))
    made_anew = [(f"{name}", number) for name, number in thing.names]
    thing.names = [made_anew[place] for place in (2, 0, 3, 1)]
    restores.put_back(saves.state())
    assert [*map(repr, other.names)] == ["('c', 0)", "('b', 1)", "('a', 1)", "('a', 1.0)"]
    thing.names = [("d", 1)]
    assert saves.state() == [["thing"]], "a name comes from no checkpoint"


@pytest.mark.parametrize(
    "state", [5, {}, {"order": torch.tensor([9, 9, 9]), "of": 0}, {"order": [1], "of": "x"}, {"param_groups": 5}]
)
def test_states_of_a_stranger_are_refused(state):
    thing, told = Keeps(), []
    saves = OwnAttributes([Root("thing", thing)], (), (), "cpu", told.append)
    saves.put_back([["thing", {}, {}, {}, dict.fromkeys(("optimizer", "all", "names", "weight", "train"), state)]])
    saves.state()
    assert thing.names == ["a", "b", "c"] and len(thing.all) == 1 and callable(thing.train)
    assert thing.weight.tolist() == [1, 1] and thing.optimizer.param_groups[0]["lr"] == 0.1


def test_the_device_of_a_batch_is_no_state():
    """Of each batch another object. The script's name may also be one of the library's own, as Lightning's `_device`."""

    def trains(thing):
        thing.number, thing.file = 3, torch.device("cpu")

    trained, other, told = changed_and_put_back(trains)
    assert trained.file == torch.device("cpu") and (other.number, other.file) == (3, None)
    assert not any(told)


def test_a_cache_is_not_put_back_without_what_it_holds():
    """A data set with the number of the open shard, and its lines."""

    def opens(thing):
        thing.number, thing.file = 3, ["lines"]

    _, other, told = changed_and_put_back(opens)
    assert (other.number, other.file) == (0, None) and "thing (file)" in told[0]


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_sparse_csr(), lambda: torch.empty(1, device="meta"),
        lambda: 1 << 63,
        lambda: np.zeros(1 << 20), lambda: np.array(["a"]), lambda: [[0.0] * 101] * 100, lambda: {(1, 2): 3}, lambda: [[[[[1]]]]],
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), lambda: [collections.Counter()], lambda: {1, 2},
        lambda: collections.defaultdict(int, {1: 2}), lambda: collections.deque([1], maxlen=2),
    ],
)  # fmt: skip
def test_what_a_checkpoint_cannot_hold_is_named_and_stops_no_save(value):
    """The last two are lost with their kind where a new process has not made them yet."""
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    thing.large = value()
    assert saves.state() == [["thing"]] and "thing (large)" in told[0]


def test_what_one_object_is_to_two_attributes_stays_so_or_is_two():
    def shares(thing):
        thing.large = thing.tensor

    def parts(thing):
        thing.tensor = torch.tensor([6.0, 6.0])
        thing.large = torch.tensor([7.0, 7.0])

    _, other, _ = changed_and_put_back(parts, before=shares)
    assert (other.tensor.tolist(), other.large.tolist()) == ([6, 6], [7, 7])
    _, other, _ = changed_and_put_back(lambda thing: thing.tensor.add_(1), before=shares)
    assert other.tensor is other.large and other.tensor.tolist() == [1, 1]


def test_what_data_and_a_callback_share_stays_one_whenever_each_is_put_back():
    def made():
        data, callback, told = Holder(), Holder(), []
        callback.table = data.table
        return (
            data,
            callback,
            OwnAttributes([Root("data", data, loader="train"), Root("callback", callback)], (), (), "cpu", told.append),
        )

    trained, _, saves = made()
    trained.table["b"] = 3
    data, callback, attributes = made()
    for loader in ("", "train", None):
        attributes.put_back(saves.state(), loader=loader)
        assert data.table is callback.table and data.table == {"a": 1, "b": 3}


def test_weights_are_not_written_through_an_attribute_that_began_as_one_of_them():
    model, told, thing = nn.Linear(1, 1), [], Holder()
    with torch.no_grad():
        model.weight.fill_(5)
    thing.tensor = model.weight.detach()
    saves = OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)
    saves.put_back([["thing", {"tensor": torch.full((1, 1), -9.0)}, {}]])
    assert model.weight.item() == 5 and thing.tensor.item() == -9


def test_a_leaf_that_the_script_trains_by_itself_stays_the_same():
    def begins(thing):
        thing.tensor = torch.zeros(1, requires_grad=True)
        thing.large = thing.tensor  # as its optimizer holds it

    def steps(thing):
        thing.tensor.data.add_(1)

    _, other, _ = changed_and_put_back(steps, before=begins)
    assert other.large is other.tensor and other.tensor.requires_grad and other.tensor.item() == 1


def test_a_module_that_shares_weights_with_the_model_goes_on_with_its_own():
    model, told = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), []

    def sharing():
        thing = Holder()
        thing.module = nn.Sequential(model[0], nn.Linear(1, 1))
        return thing, OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)

    thing, saves = sharing()
    thing.module[1].weight.data.fill_(7)
    state = saves.state()
    other, its = sharing()
    its.put_back(state)
    assert other.module[1].weight.item() == 7 and other.module[0] is model[0] and not told


def test_a_model_of_very_many_modules_leaves_room_for_the_callbacks(monkeypatch):
    monkeypatch.setattr("kgorch.worker.integrations.own_attributes.MOST_OBJECTS", 5)
    told, thing = [], Holder()
    model = nn.Sequential(*(Annealed() for _ in range(9)))
    saves = OwnAttributes([Root("model", model), Root("thing", thing)], (), [model], "cpu", told.append)
    thing.number = 5
    assert ["thing", {"number": 5}, {}, {}, {}] in saves.state() and "(more than 5 objects)" in told[0]


def test_a_metric_of_a_callback_and_weights_that_are_in_no_state_dict_are_named():
    class Metric(nn.Module):
        total = 0

    class Hides(nn.Linear):
        def state_dict(self, *_, **__):
            return {}

    told, thing = [], Holder()
    thing.module, thing.inner = Metric(), Hides(1, 1)
    saves = looked_at(thing, told, is_callback=True)
    thing.number = 5
    thing.inner.weight.data += 1
    assert saves.state()[0] == ["thing"] and "thing (inner, module, modules)" in told[0]


def test_what_is_larger_than_the_training_is_named_and_not_saved(monkeypatch):
    monkeypatch.setattr("kgorch.worker.integrations.own_attributes.MOST_BYTES", 100)
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    thing.large = torch.ones(100)
    assert saves.state() == [["thing"]] and "thing (large)" in told[0]


def test_a_stranger_sets_nothing_but_numbers_and_tensors_that_the_script_sets_itself():
    told, thing = [], Holder()
    saves = looked_at(thing, told)
    for values in (
        {"text": "/etc/passwd"},
        {"train": 5},
        {"unknown": 5},
        {"__class__": 5},
        {"number": "x"},
        {"items": ["x"]},
    ):
        saves.put_back([["thing", values, {}]])
    saves.put_back(
        [["thing", {}, {"module": {"weight": torch.ones(3, 3)}, "number": {}}], ["another", {"number": 1}, {}]]
    )
    saves.state()
    assert "thing (module: of another kind or size than it was)" in told[-1]
    thing.module = Annealed()
    saves.put_back([["thing", {}, {"module": {**Annealed().state_dict(), "places": torch.ones(1)}}]])
    saves.state()
    assert "thing (module: of another kind or size than it was)" in told[-1]
    assert thing.module.places.tolist() == [0, 1, 2]
    module = Annealed()
    values = {"net": 3, "forward": 5, "training": 0, "_modules": {}, "temperature": 0.5}
    looked_at(module, told).put_back([["thing", values, {}]])
    assert isinstance(module.net, nn.Linear) and callable(module.forward)
    assert module.training and module.temperature == 0.5
    values = {"weight": 4, "_modules": {"a": 1}, "_buffers": {"b": 1}}
    looked_at(module.net, told, label="trainer").put_back([["trainer", values, {}]])
    assert not module.net._modules and not module.net._buffers and isinstance(module.net.weight, nn.Parameter)
    saves.put_back([["thing", {"number": 3}]])  # as an earlier version has written it
    assert (thing.text, thing.items, thing.number, callable(thing.train)) == ("a", [1], 3, True)
    for saved in (
        None,
        {},
        [None],
        [[]],
        [["thing", 5]],
        [[5, {}]],
        [["thing", {5: 5, "number": {"a": [[[[[[5]]]]]]}}]],
    ):
        saves.put_back(saved)
    assert thing.number == 3


def test_an_object_whose_code_fails_is_named_and_costs_no_run():
    class Fails(nn.Linear):
        def state_dict(self, *args, **kwargs):
            raise RuntimeError("not now")

    told, thing = [], Holder()
    thing.table = Fails(1, 1)
    saves = looked_at(thing, told)
    thing.number, thing.inner = 5, Fails(1, 1)
    assert saves.state()[0] == ["thing"] and "thing (RuntimeError)" in told[0]


def test_a_tensor_of_a_graph_and_one_that_the_checkpoint_holds_are_none_of_an_object():
    told, thing, model = [], Holder(), nn.Linear(2, 2)
    saves = OwnAttributes([Root("thing", thing)], (), [model], "cpu", told.append)
    thing.tensor, thing.large = model(torch.ones(2)), model.weight.detach()
    thing.module = model
    with torch.no_grad():
        model.weight.add_(1)
    assert saves.state() == [["thing", {}, {}, {}, {}]] and not told


def test_objects_in_objects_are_looked_at_and_those_of_libraries_are_not():
    told, outer = [], Holder()
    outer.inner = Holder()
    saves = looked_at(outer, told)
    outer.inner.number = 9
    assert [entry[0] for entry in saves.state()] == ["thing", "thing.inner"] and saves.state()[1][1] == {"number": 9}
    assert looked_at(collections.UserDict(), told).state() == []
    names = [root.label for root in data_roots("train", {"a": Subset(numbers(3), [0]), "b": DataLoader(numbers(2))})]
    assert names == ["train.a", "train.b.collate_fn", "train.a.dataset", "train.b.dataset"]
