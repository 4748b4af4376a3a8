"""What programs of Lightning do besides training, in small trainings that are cut at a step."""

from __future__ import annotations

import collections

import pytest
import torch
from cut_session import Cut
from small_trainings import lightning_module, lightning_trainer_of, numbers, weights_of, whole_and_resumed
from torch import nn
from torch.utils.data import DataLoader, default_collate

from kgorch.errors import CannotRestore

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("cut_at", [5, 6, 8])
@pytest.mark.parametrize("look", ["first batch", "whole epoch"])
def test_a_callback_of_lightning_that_reads_the_training_data_takes_nothing_from_the_training(
    lightning, carried, look, cut_at
):
    class Look(lightning.Callback):
        def on_train_start(self, trainer, module):
            assert isinstance(trainer.train_dataloader, DataLoader)
            if look == "first batch":
                next(iter(trainer.train_dataloader))

        def on_validation_epoch_end(self, trainer, module):
            if look == "whole epoch" and not trainer.sanity_checking:
                list(trainer.train_dataloader)

    class Module(lightning_module(lightning)):
        def validation_step(self, batch, index):
            pass

    def script():
        module = Module()
        trainer = lightning_trainer_of(lightning, callbacks=[Look()], val_check_interval=2)
        trainer.fit(module, DataLoader(numbers(12), 2, shuffle=True), DataLoader(numbers(2), 2))
        return weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


@pytest.mark.parametrize("monitor", ["val/loss", "loss"])
def test_the_best_checkpoint_of_lightning_is_known_where_the_logger_writes_elsewhere(
    lightning, carried, tmp_path, monitor
):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning_module(lightning)):
        def validation_step(self, batch, index):
            self.log(monitor, [1.0, 0.2, 1.5, 0.5][self.trainer.current_epoch])

    def script():
        best = ModelCheckpoint(monitor=monitor)
        trainer = lightning_trainer_of(
            lightning,
            max_epochs=4,
            enable_checkpointing=True,
            logger=CSVLogger(tmp_path / "elsewhere"),
            default_root_dir=tmp_path / "root",
            callbacks=[best],
        )
        trainer.fit(Module(), DataLoader(numbers(4), 2), DataLoader(numbers(2), 2))
        return best.best_model_score.item()

    whole, resumed = whole_and_resumed(carried, script, 5)
    assert resumed == whole and whole[1] == pytest.approx(0.2)


def test_a_state_of_lightnings_callback_that_names_files_elsewhere_is_not_loaded_and_that_is_told(
    lightning, carried, tmp_path
):
    from lightning.pytorch.callbacks import ModelCheckpoint

    loaded = []

    class Best(ModelCheckpoint):
        def state_dict(self):
            return super().state_dict() | {"best_model_path": "/etc/passwd"}

        def load_state_dict(self, state):
            loaded.append(state)

    def script():
        trainer = lightning_trainer_of(lightning, enable_checkpointing=True, callbacks=[Best(dirpath=tmp_path)])
        trainer.fit(lightning_module(lightning)(), DataLoader(numbers(4), 2))

    whole_and_resumed(carried, script, 3)
    assert not loaded and "names files outside" in carried.session.exactness["hooks"]


def test_what_a_step_of_lightning_leaves_in_the_batch_is_there_for_its_hooks(lightning, carried):
    class Module(lightning_module(lightning)):
        def training_step(self, batch, index):
            batch["output"] = self.net(batch["input"])
            return batch["output"].square().mean()

        def on_train_batch_end(self, outputs, batch, index):
            assert batch["output"].shape == (2, 1)

    def script():
        module = Module()
        loader = DataLoader(numbers(12), 2, collate_fn=lambda items: {"input": default_collate(items)[0]})
        lightning_trainer_of(lightning).fit(module, loader)
        return weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, 5)
    assert resumed == whole


def test_a_config_file_that_lightnings_command_line_has_written_ends_no_later_session(lightning, carried, tmp_path):
    cli = pytest.importorskip("lightning.pytorch.cli")

    class Parser:
        def save(self, config, path, **_):
            (tmp_path / "config.yaml").write_text("lr: 0.1")

    def script():
        callback = cli.SaveConfigCallback(Parser(), {}, "config.yaml")
        trainer = lightning_trainer_of(lightning, callbacks=[callback], default_root_dir=tmp_path)
        module = lightning_module(lightning)()
        trainer.fit(module, DataLoader(numbers(12), 2))
        return weights_of(module)

    with pytest.raises(Cut) as cut:
        carried(script, 5)
    resumed = carried(script, saved=cut.value.saved)
    with pytest.raises(RuntimeError, match="to NOT exist"):
        carried(script)  # a training that begins
    (tmp_path / "config.yaml").unlink()
    assert resumed == carried(script)


def test_a_state_of_lightnings_callback_that_no_checkpoint_can_hold_is_told_and_ends_nothing(lightning, carried):
    class Newest(lightning.Callback):
        def __init__(self):
            self.indices = collections.deque(maxlen=3)

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.indices.append(index)

        def state_dict(self):
            return {"indices": self.indices}

    def script():
        module = lightning_module(lightning)()
        lightning_trainer_of(lightning, callbacks=[Newest()]).fit(module, DataLoader(numbers(12), 2))
        return weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, 5)
    assert resumed == whole and "Newest of state_dict" in carried.session.exactness["hooks"]


@pytest.mark.parametrize("cut_at", [5, 7, 10])
def test_a_stop_of_lightning_that_waits_for_the_least_number_of_epochs_is_remembered(lightning, carried, cut_at):
    from lightning.pytorch.callbacks import EarlyStopping

    class Module(lightning_module(lightning)):
        def validation_step(self, batch, index):
            # worse once, and better than ever after a resume
            self.log("loss", [1.0, 2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4][self.trainer.current_epoch])

    def script():
        module, stopping = Module(), EarlyStopping("loss", patience=1)
        trainer = lightning_trainer_of(
            lightning, callbacks=[stopping], min_epochs=4, max_epochs=8, num_sanity_val_steps=0
        )
        trainer.fit(module, DataLoader(numbers(6), 2), DataLoader(numbers(2), 2))
        return trainer.current_epoch, weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and whole[1][0] == 4


@pytest.mark.parametrize("cut_at", [5, 6])
def test_a_callback_of_lightning_that_makes_its_parts_when_the_training_begins_has_its_state_then(
    lightning, carried, cut_at
):
    class Evaluator(lightning.Callback):
        """As SSLOnlineEvaluator of lightning-bolts."""

        def __init__(self):
            self.loaded = None

        def load_state_dict(self, state):
            self.loaded = state

        def state_dict(self):
            return {"net": self.net.state_dict()}

        def on_fit_start(self, trainer, module):
            self.net = nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.net.parameters(), 0.01)
            if self.loaded:
                self.net.load_state_dict(self.loaded["net"])

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            self.net(batch[0] / 10).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def script():
        module, evaluator = lightning_module(lightning)(), Evaluator()
        lightning_trainer_of(lightning, callbacks=[evaluator]).fit(module, DataLoader(numbers(12), 2))
        return weights_of(module), weights_of(evaluator.net)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole


def test_the_sentence_with_which_lightning_has_stopped_early_is_no_path(lightning, carried):
    from lightning.pytorch.callbacks import EarlyStopping

    class Module(lightning_module(lightning)):
        def validation_step(self, batch, index):
            self.log("val/acc", 1.0)

    def script():
        stopping = EarlyStopping("val/acc", patience=1)
        trainer = lightning_trainer_of(lightning, callbacks=[stopping], max_epochs=8)
        trainer.fit(Module(), DataLoader(numbers(6), 2), DataLoader(numbers(2), 2))
        return stopping.stopped_epoch, stopping.stopping_reason_message

    whole = carried(script)
    assert whole[1][0] and "val/acc" in whole[1][1]
    assert carried(script, saved=carried.finished)[1] == whole[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut_at", [4, 8, 13])
def test_a_training_of_lightning_that_prunes_goes_on(lightning, carried, cut_at):
    """From the end of the first epoch on its weights have other names."""
    from lightning.pytorch.callbacks import ModelPruning

    class Module(lightning_module(lightning)):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))

    def script():
        module = Module()
        pruning = ModelPruning("l1_unstructured", amount=0.2, use_lottery_ticket_hypothesis=False)
        lightning_trainer_of(lightning, callbacks=[pruning]).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return sorted(module.state_dict()), weights_of(module)

    whole, resumed = whole_and_resumed(carried, script, cut_at)
    assert resumed == whole and 0.0 in whole[1][1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedules", [False, True])
def test_optimizers_that_are_made_anew_in_a_training_of_lightning_are_told(lightning, carried, schedules):
    class Module(lightning_module(lightning)):
        switched = False

        def on_train_epoch_start(self):
            if self.current_epoch == 1 and not self.switched:
                self.switched = True
                self.trainer.strategy.setup_optimizers(self.trainer)

        def configure_optimizers(self):
            if not self.switched:
                return torch.optim.AdamW(self.parameters(), 0.1)
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if schedules else []

    def script():
        module = Module()
        lightning_trainer_of(lightning).fit(module, DataLoader(numbers(12), 2, shuffle=True))
        return weights_of(module)

    def told():
        return carried.session._state.exactness.facts.get("optimizers", "")

    carried(script)
    assert "has other optimizers than it began with" in told()
    if schedules:
        with pytest.raises(CannotRestore, match="had 1 learning rate schedulers when it was saved, and begins with 0"):
            whole_and_resumed(carried, script, 13)
    else:
        whole, resumed = whole_and_resumed(carried, script, 13)
        assert resumed != whole and "has other optimizers than it began with" in told(), "and in the next session, too"
