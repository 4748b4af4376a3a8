"""Small trainings of Lightning that are cut at a step: the rest must be as in an uninterrupted training."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cut_session import Cut
from small_trainings import (
    OfSession,
    Stream,
    lightning_module,
    lightning_trainer_of,
    numbers,
    weights_of,
    whole_and_resumed,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kgorch.worker.checkpoint import state_codec
from kgorch.worker.integrations import lightning_callbacks
from kgorch.worker.integrations.lightning_loader import TrainingLoader

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.filterwarnings("ignore")
def test_what_hooks_of_lightning_add_to_a_checkpoint_is_restored(lightning, carried):
    from lightning.pytorch.callbacks import Callback

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.loaded = self.seen = 0

        def training_step(self, batch, index):
            self.seen += 1
            return super().training_step(batch, index)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"].pop("net.bias")
            checkpoint["state_dict"]["seen"] = torch.tensor(self.seen)
            checkpoint["seen"], checkpoint["object"] = [self.seen, checkpoint["global_step"]], object()

        def on_load_checkpoint(self, checkpoint):
            self.seen, step = checkpoint["seen"]
            assert self.seen == step == checkpoint["global_step"] == checkpoint["state_dict"]["seen"] == 8
            assert checkpoint["epoch"] == 1 and len(checkpoint["optimizer_states"]) == 1

    class Data(lightning.LightningDataModule):
        asked = 0

        def train_dataloader(self):
            self.asked += 1
            return DataLoader(numbers(12), 2, shuffle=True)

        def state_dict(self):
            return {"asked": self.asked}

        def load_state_dict(self, saved):
            self.asked = 10 * saved["asked"]

    class Sums(Callback):
        """Keeps its state by hooks alone."""

        def __init__(self):
            self.sum = 0.0

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.sum += batch[0].sum().item() * trainer.global_step

        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["sums"] = self.sum

        def on_load_checkpoint(self, trainer, module, checkpoint):
            self.sum = checkpoint["sums"]

    asked = []

    def script():
        module, data, sums = Module(), Data(), Sums()
        trainer = lightning_trainer_of(lightning, callbacks=[sums])
        trainer.fit(module, datamodule=data)
        asked.append(data.asked)
        return module.seen, sums.sum, weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole and whole[1][0] == 18
    assert asked == [1, 10]


@pytest.mark.filterwarnings("ignore")
def test_an_average_of_weights_that_a_callback_of_lightning_holds_is_restored(lightning, carried):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    def script():
        module = lightning_module(lightning)()
        trainer = lightning_trainer_of(lightning, callbacks=[EMAWeightAveraging(decay=0.9)])
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return weights_of(module)  # the average: it takes the place of the weights at the end

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole


@pytest.mark.filterwarnings("ignore")
def test_the_search_of_a_learning_rate_is_not_the_training_that_is_carried(lightning, carried):
    from lightning.pytorch.tuner import Tuner

    def script():
        module = lightning_module(lightning)()
        loader = DataLoader(numbers(12), 2, shuffle=True)
        trainer = lightning_trainer_of(lightning)
        Tuner(trainer).lr_find(module, loader, num_training=5)
        trainer.fit(module, loader)
        return module.lr, weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole and whole[0] == 18


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_lightning_has_stopped_early_stays_finished(lightning, carried):
    class Module(lightning_module(lightning)):
        def on_train_batch_end(self, outputs, batch, index):
            self.trainer.should_stop = self.trainer.global_step >= 8

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning)
        trainer.fit(module, DataLoader(numbers(12), 2))
        return trainer.global_step, weights_of(module)

    whole = carried(script)
    assert whole[0] < 18
    assert carried(script, saved=carried.session.saved(is_final=True)) == whole


@pytest.mark.filterwarnings("ignore")
def test_the_best_checkpoint_of_lightning_stays_the_best_where_the_logger_gives_the_folder(lightning, carried):
    """Each session's logger has a folder of its own: `version_0`, `version_1`."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning_module(lightning)):
        def training_step(self, batch, index):
            self.log("score", -float(self.global_step))
            return super().training_step(batch, index)

    def script():
        best = ModelCheckpoint(monitor="score", mode="max", every_n_train_steps=2)
        trainer = lightning_trainer_of(
            lightning, callbacks=[best], logger=CSVLogger("logs"), enable_checkpointing=True, log_every_n_steps=1
        )
        trainer.fit(Module(), DataLoader(numbers(12), 2))
        return Path(best.best_model_path).name, float(best.best_model_score)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole


def lightning_module_that_remembers(library):
    class Module(lightning_module(library)):
        """Attribute `seen`: the samples of each batch."""

        def __init__(self):
            super().__init__()
            self.seen = OfSession()

        def training_step(self, batch, index):
            self.seen.append(batch[0].flatten().int().tolist())
            return super().training_step(batch, index)

    return Module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [8, 11, 12], ids=["in an epoch", "before its last batch", "after it"])
@pytest.mark.parametrize("every", [0, 1], ids=["loaded once", "loaded for each epoch"])
def test_a_loader_of_lightning_without_a_length_goes_on_at_its_batch(lightning, carried, every, cut_at):
    """Lightning reads one batch ahead of it, the first one before the training has begun."""

    class Module(lightning_module_that_remembers(lightning)):
        validated = 0

        def train_dataloader(self):
            return DataLoader(Stream(), 2, collate_fn=lambda rows: [torch.cat(rows)])

        def val_dataloader(self):
            return DataLoader(numbers(2), 2)

        def validation_step(self, batch, index):
            self.validated += 1

    def script():
        module = Module()
        options = {"num_sanity_val_steps": 0, "reload_dataloaders_every_n_epochs": every}
        lightning_trainer_of(lightning, **options).fit(module)
        return module.seen, weights_of(module), module.validated

    (steps, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert steps == 18 and whole[2] == 3
    assert resumed == (whole[0][cut_at:], whole[1], 3)


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_of_lightning_over_all_steps_is_restored_with_its_optimizer(lightning, carried):
    """`estimated_stepping_batches` loads the training data before there is an optimizer."""

    class Module(lightning_module(lightning)):
        def configure_optimizers(self):
            optimizer, total = super().configure_optimizers(), self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def script():
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole and whole[0] == 18
    assert "optimizer0" in carried.session._state.tracked.things


@pytest.mark.filterwarnings("ignore")
def test_the_rest_of_an_epoch_of_lightning_begins_with_its_hook_and_without_its_effect_on_the_weights(
    lightning, carried
):
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    class Module(lightning_module(lightning)):
        def on_train_epoch_start(self):
            self.outputs = []
            torch.rand(1)
            with torch.no_grad():
                self.net.weight.mul_(0.9)
            self.optimizers().param_groups[0]["lr"] *= 0.9

        def training_step(self, batch, index):
            self.outputs.append(index)
            return super().training_step(batch, index) * torch.rand(1)

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at=8)
    assert resumed == whole and whole[0] == 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("searched", ["learning rate", "batch size"])
def test_the_search_of_a_callback_of_lightning_is_no_part_of_the_training(lightning, carried, searched):
    """It runs the loop of the training before the training does."""
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

    class Module(lightning_module_that_remembers(lightning)):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(numbers(12), self.batch_size, shuffle=True)

    def script():
        module = Module()
        finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None)
        if searched == "batch size":
            finder = BatchSizeFinder(steps_per_trial=1, max_trials=2)
        lightning_trainer_of(lightning, callbacks=[finder]).fit(module)
        return module.lr, module.batch_size, module.seen, weights_of(module)

    (steps, whole), (resumed_to, resumed) = whole_and_resumed(carried, script, cut_at=5)
    assert steps == resumed_to == 3 * -(-12 // whole[1])
    assert (whole[0] != 0.1) == (searched == "learning rate") and (whole[1] > 2) == (searched == "batch size")
    tried = len(whole[2]) - steps
    assert resumed == (*whole[:2], whole[2][:tried] + whole[2][tried + 5 :], whole[3])
    assert carried.session._state.position.samples == 12 * 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [3, 14, 19])
@pytest.mark.parametrize("every", [1, 2])
def test_training_data_that_lightning_loads_anew_go_on_at_their_batch(lightning, carried, every, cut_at):
    class Module(lightning_module_that_remembers(lightning)):
        def train_dataloader(self):
            first = 100.0 * self.trainer.current_epoch
            return DataLoader(TensorDataset(torch.arange(first, first + 12)[:, None]), 2, shuffle=True)

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning, max_epochs=5, reload_dataloaders_every_n_epochs=every)
        trainer.fit(module)
        return module.seen, weights_of(module)

    (steps, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert steps == 30 and max(whole[0][-1]) >= 400 and resumed == (whole[0][cut_at:], whole[1])
    assert carried.session._state.position.samples == 2 * 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [3, 4, 5, 7, 12])
def test_a_validation_that_lightning_counts_over_epochs_comes_at_the_same_steps(lightning, carried, cut_at):
    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.validated = OfSession()

        def validation_step(self, batch, index):
            self.validated.append(self.trainer.global_step)

    def script():
        module = Module()
        options = {"val_check_interval": 4, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        lightning_trainer_of(lightning, **options).fit(module, DataLoader(numbers(12), 2), DataLoader(numbers(2), 2))
        return module.validated

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert whole == (18, [4, 8, 12, 16])
    assert resumed == (18, [step for step in whole[1] if step > cut_at])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [14, None], ids=["cut in the training", "cut after it"])
def test_what_lightning_has_logged_is_there_after_a_resume(lightning, carried, cut_at):
    class Module(lightning_module(lightning)):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            if self.trainer.current_epoch == 1:
                self.log_dict({"once": loss, "count": 3.0, "spoilt": float("nan")}, prog_bar=True)
            return loss

    def script():
        trainer = lightning_trainer_of(lightning)
        trainer.fit(Module(), DataLoader(numbers(12), 2, shuffle=True))
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        return [{name: repr(value) for name, value in metrics.items()} for metrics in kinds]

    if cut_at:
        whole, resumed = whole_and_resumed(carried, script, cut_at)
    else:
        whole = carried(script)
        resumed = carried(script, saved=carried.finished)
    assert resumed == whole and {"loss", "once", "count", "spoilt"} <= whole[1][0].keys()
    carried.session._state.metrics.collect(wait=True)
    assert "once" not in carried.session._state.metrics.values


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [5, 6, 8, 12, 14])
@pytest.mark.parametrize("kind", ["one of the script", "BackboneFinetuning"])
def test_weights_that_lightning_thaws_later_are_trained_after_a_resume(lightning, carried, kind, cut_at):
    from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning

    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.backbone, train_bn=False)

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer)

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

        def training_step(self, batch, index):
            return super().training_step([self.backbone(batch[0])], index)

        def configure_optimizers(self):
            return torch.optim.AdamW((weight for weight in self.parameters() if weight.requires_grad), 0.1)

    def script():
        module, backbone = Module(), BackboneFinetuning(1, lambda epoch: 1.5, should_align=False)
        trainer = lightning_trainer_of(lightning, callbacks=[Finetuning() if kind == "one of the script" else backbone])
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True))
        options = [group["lr"] for group in trainer.optimizers[0].param_groups]
        state = {name: value.tolist() for name, value in module.state_dict().items()}
        trained = [name for name, weight in module.named_parameters() if weight.requires_grad]
        return state, trained, options, backbone.previous_backbone_lr

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and len(whole[1][2]) == 2
    assert carried(script, saved=carried.finished) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [5, 6, 9, 14, 18, 23])
@pytest.mark.parametrize("kind", ["of a class of the script", "with a schedule", "with BatchNorm"])
def test_stochastic_weight_averaging_of_lightning_goes_on_after_a_resume(lightning, carried, kind, cut_at):
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Averaging(StochasticWeightAveraging):
        """Not hashable, as a dataclass is."""

        __hash__ = None

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.first = nn.BatchNorm1d(1) if kind == "with BatchNorm" else nn.Identity()

        def training_step(self, batch, index):
            return super().training_step([self.first(batch[0])], index)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)] if kind == "with a schedule" else []
            return [optimizer], schedules

    def script():
        module = Module()
        cls = Averaging if kind == "of a class of the script" else StochasticWeightAveraging
        callbacks = [cls(0.01, swa_epoch_start=2, annealing_epochs=2)]
        trainer = lightning_trainer_of(lightning, max_epochs=4, callbacks=callbacks)
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return {name: value.tolist() for name, value in module.state_dict().items()}

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[0] == 24 + (
        kind == "with BatchNorm"
    )  # one more epoch without a step until its end
    assert carried(script, saved=carried.finished) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [2, 3, 5, 6, 11])
@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_loaders_of_lightning_with_different_lengths_go_on_at_their_batches(lightning, carried, mode, cut_at):
    from lightning.pytorch.utilities import CombinedLoader

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.seen = OfSession()

        def training_step(self, batch, index):
            self.seen.append([None if one is None else one[0].flatten().int().tolist() for one in batch.values()])
            return super().training_step([sum(one[0].sum() for one in batch.values() if one).view(1, 1)], index)

    def script():
        module = Module()
        loaders = {"a": DataLoader(numbers(12), 2, shuffle=True), "b": DataLoader(numbers(6), 2, shuffle=True)}
        lightning_trainer_of(lightning).fit(module, CombinedLoader(loaders, mode))
        return module.seen, weights_of(module)

    (steps, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert steps == 18 and resumed == (whole[0][cut_at:], whole[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [2, 6, 8])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_training_step_of_lightning_that_reads_its_batches_itself(lightning, carried, batches, cut_at):
    class Module(lightning_module_that_remembers(lightning)):
        def training_step(self, dataloader_iter):
            for _ in range(batches):
                batch, index, _ = next(dataloader_iter)
                loss = super().training_step(batch, index)
            return loss

    def script():
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12 * batches), 2, shuffle=True))
        return module.seen, weights_of(module)

    (steps, whole), (_, resumed) = whole_and_resumed(carried, script, cut_at)
    assert steps == 18 and resumed == (whole[0][cut_at * batches :], whole[1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by_position", [True, False])
def test_a_checkpoint_that_the_script_gives_to_lightning_counts_in_the_first_session(lightning, carried, by_position):
    class Module(lightning_module(lightning)):
        loaded = 0

        def on_load_checkpoint(self, checkpoint):
            self.loaded += 1

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning)
        loader = DataLoader(numbers(12), 2, shuffle=True)
        arguments = {} if by_position else {"ckpt_path": "first.ckpt"}
        trainer.fit(module, loader, *((None, None, "first.ckpt") if by_position else ()), **arguments)
        return module.loaded, weights_of(module)

    first = lightning_trainer_of(lightning, max_epochs=1)
    first.fit(Module(), DataLoader(numbers(12), 2))
    first.save_checkpoint("first.ckpt")
    with pytest.raises(Cut) as cut:
        carried(script, 2)
    whole = carried(script)
    Path("first.ckpt").unlink()
    assert carried(script, saved=cut.value.saved) == whole and whole[1][0] == 1


def trained(module) -> list[str]:
    return [name for name, weight in module.named_parameters(remove_duplicate=False) if weight.requires_grad]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved_by", ["this kgorch", "an earlier one"])
def test_a_weight_of_lightning_with_two_names_is_trained_after_a_resume(lightning, carried, saved_by):
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
            self.head.weight = self.net.weight

        def training_step(self, batch, index):
            return super().training_step([self.head(self.backbone(batch[0]))], index)

        def configure_optimizers(self):
            return torch.optim.AdamW((weight for weight in self.parameters() if weight.requires_grad), 0.1)

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning, callbacks=[BackboneFinetuning(5)])
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return weights_of(module), trained(module)

    whole = carried(script)
    with pytest.raises(Cut) as cut:
        carried(script, 8)
    if saved_by == "an earlier one":
        names = cut.value.saved.own(0)["own"]["lightning"]["trained_weights"]
        names[:] = [name for name in names if name != "head.weight"]
    assert carried(script, saved=cut.value.saved) == whole


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [4, 8, 14, None])
@pytest.mark.parametrize("kind", ["thaws", "freezes", "turns over"])
def test_weights_that_a_module_of_lightning_thaws_or_freezes_itself_are_so_after_a_resume(
    lightning, carried, kind, cut_at
):
    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
            self.backbone.requires_grad_(kind != "thaws")

        def on_train_epoch_start(self):
            if kind == "turns over":
                for weight in self.backbone.parameters():
                    weight.requires_grad = not weight.requires_grad
            elif self.current_epoch == 1:
                self.backbone.requires_grad_(kind == "thaws")

        def training_step(self, batch, index):
            return super().training_step([self.backbone(batch[0])], index)

    def script():
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        counts = [part.track_running_stats for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
        return {name: value.tolist() for name, value in module.state_dict().items()}, trained(module), counts

    if cut_at:
        whole, resumed = whole_and_resumed(carried, script, cut_at)
    else:
        whole = carried(script)
        resumed = carried(script, saved=carried.finished)
    assert resumed == whole and whole[1][2] == [True]


def test_weights_that_another_strategy_of_lightning_names_otherwise_are_left_alone(lightning):
    module = lightning_module(lightning)()
    trainer = SimpleNamespace(lightning_module=module, callbacks=[])
    lightning_callbacks.put_back(trainer, object, {"trained_weights": ["net._fsdp_wrapped_module.weight"]})
    assert trained(module) == ["net.weight", "net.bias"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", ["epochs", "steps", "BackboneFinetuning", "a loader without a length", "a validation", "an earlier kgorch"]
)
def test_an_extension_of_a_training_of_lightning_is_as_if_it_had_been_as_long(lightning, carried, kind, monkeypatch):
    from lightning.pytorch.callbacks import BackboneFinetuning

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.backbone, self.begun = nn.Linear(1, 1), OfSession()

        def on_train_epoch_start(self):
            self.begun.append(self.current_epoch)
            torch.rand(1)
            if kind != "BackboneFinetuning":
                self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + self.current_epoch)

        def training_step(self, batch, index):
            return super().training_step([self.backbone(batch[0])], index)

        def validation_step(self, batch, index):
            torch.rand(1)

        def configure_optimizers(self):
            return torch.optim.AdamW((weight for weight in self.parameters() if weight.requires_grad), 0.1)

    def script(epochs):
        module, callbacks = Module(), [BackboneFinetuning(2)] if kind == "BackboneFinetuning" else []
        length = {"max_epochs": -1, "max_steps": 6 * epochs} if kind == "steps" else {"max_epochs": epochs}
        trainer = lightning_trainer_of(lightning, callbacks=callbacks, num_sanity_val_steps=0, **length)
        loader = DataLoader(numbers(12), 2, shuffle=True, generator=torch.Generator().manual_seed(5))
        if kind == "a loader without a length":
            loader = DataLoader(Stream(), 2, collate_fn=lambda rows: [torch.cat(rows)])
        trainer.fit(module, loader, DataLoader(numbers(2), 2) if kind == "a validation" else None)
        return module.begun, weights_of(module), [group["lr"] for group in trainer.optimizers[0].param_groups]

    steps, whole = carried(lambda: script(4))
    with monkeypatch.context() as patch:
        if kind == "an earlier kgorch":
            patch.setattr(TrainingLoader, "leave", lambda _: None)
        carried(lambda: script(2))
    saved = carried.session.saved()
    assert kind == "an earlier kgorch" or saved.manifest.position.epoch == 2
    assert carried(lambda: script(4), saved=saved) == (24, ([2, 3], *whole[1:])) and steps == 24


@pytest.mark.filterwarnings("ignore")
def test_a_validation_that_lightning_counts_over_epochs_comes_at_the_same_steps_of_an_extension(lightning, carried):
    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.validated = OfSession()

        def validation_step(self, batch, index):
            self.validated.append(self.trainer.global_step)

    def script(epochs):
        module = Module()
        options = {"val_check_interval": 4, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
        trainer = lightning_trainer_of(lightning, max_epochs=epochs, **options)
        trainer.fit(module, DataLoader(numbers(12), 2), DataLoader(numbers(2), 2))
        return module.validated

    carried(lambda: script(2))
    assert carried(lambda: script(4), saved=carried.session.saved()) == (24, [16, 20, 24])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [3, 8])
def test_the_base_of_adapters_is_not_copied_where_the_rest_of_an_epoch_of_lightning_begins(
    lightning, carried, monkeypatch, cut_at
):
    class Module(lightning_module(lightning)):
        """Its teacher is set at the beginning of each epoch, of the first one to the values that it has."""

        def __init__(self):
            super().__init__()
            self.base = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 1)).requires_grad_(False)
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)

        def on_train_epoch_start(self):
            self.teacher.load_state_dict(self.net.state_dict())

        def training_step(self, batch, index):
            return super().training_step([self.base(batch[0]) + self.teacher(batch[0])], index)

    def script():
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return {name: value.tolist() for name, value in module.state_dict().items()}

    copied, put_back = set(), state_codec.put_back

    def watched(things, before, copies):
        copied.update(name for name, tensor in copies.items() if tensor is not before.tensors[name])
        put_back(things, before, copies)

    monkeypatch.setattr(state_codec, "put_back", watched)
    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole
    assert {"model.net.weight", "model.teacher.weight"} <= copied and "model.base.0.weight" not in copied


@pytest.mark.parametrize("cut_at", [4, 8])
def test_a_callback_that_keeps_its_tensors_under_the_name_of_their_attribute_goes_on(lightning, carried, cut_at):
    """As the averages of weights of many projects."""

    class Average(lightning.Callback):
        shadow: dict

        def on_fit_start(self, trainer, module):
            self.shadow = {name: weight.detach().flatten().repeat(2) for name, weight in module.named_parameters()}

        def on_train_batch_end(self, trainer, module, *_):
            for name, weight in module.named_parameters():
                self.shadow[name].mul_(0.9).add_(weight.detach().flatten(), alpha=0.1)

        def state_dict(self):
            return {"shadow": self.shadow}

        def load_state_dict(self, state):
            self.shadow = state["shadow"]

    def script():
        average, module = Average(), lightning_module(lightning)()
        trainer = lightning_trainer_of(lightning, callbacks=[average])
        trainer.fit(module, DataLoader(numbers(24), 2, shuffle=True))
        return weights_of(module), {name: tensor.tolist() for name, tensor in average.shadow.items()}

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole
