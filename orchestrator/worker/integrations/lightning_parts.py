"""The state of Lightning's Trainer besides model and optimizers, as one object that is tracked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kgorch.errors import CannotRestore
from kgorch.worker import tagged_json
from kgorch.worker.integrations import carrier, lightning_callbacks, lightning_checkpoint, metric_states
from kgorch.worker.integrations.attribute_restore import AttributeRestore
from kgorch.worker.integrations.attribute_search import Root, data_roots, script_roots
from kgorch.worker.integrations.own_attributes import OwnAttributes
from kgorch.worker.script_code import is_own_function
from kgorch.worker.session import Session

REPLACED = (
    "the Trainer has other optimizers than it began with (`trainer.strategy.setup_optimizers()`): no checkpoint holds them, and"
    " each session begins with the first ones again"
)


class LightningParts:
    """Loops, callbacks, schedulers and scaling of a Trainer, and what the script's hooks add to a checkpoint of Lightning.

    Args:
        without_folder: callbacks whose `dirpath` the script has left to Lightning.
        session: is told what cannot be saved, in words: `hooks`, what they add; `attributes`, of the script's objects;
            `optimizers`, that were made anew.
    """

    calls_hooks = True

    def __init__(self, trainer: Any, without_folder: Sequence[Any], session: Session) -> None:
        self._trainer, self._without_folder, self._session = trainer, without_folder, session
        self._optimizers: list[Any] = []
        self._is_replaced = False
        self.restore = AttributeRestore()
        self._metrics: Any = None  # what they had collected, until the first step

    def begin_step(self) -> None:
        """A step begins; before it the hooks of an epoch's begin have run, which reset metrics."""
        self.restore.begin_step()
        if self._metrics:
            metric_states.put_back(self._trainer.lightning_module, self._metrics)
            self._metrics = None

    def begin(self, base: Any) -> None:
        """The training begins, or what is left of it: from now on the attributes of the script's objects change with it.

        Args:
            base: Lightning's class of callbacks. Objects that save by themselves what they need are left to it.
        """
        if self.restore.attributes is not None:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        saves = {name: getattr(base, name) for name in ("state_dict", "on_save_checkpoint")}
        callbacks = [
            item for item in trainer.callbacks if all(getattr(type(item), name) is own for name, own in saves.items())
        ]
        modules = [Root("module", module)]
        if is_own_function(type(module).on_save_checkpoint):
            modules = [Root(f"module.{name}", part) for name, part in module.named_children()]
        data = trainer.datamodule
        roots = [
            *modules,
            *([Root("datamodule", data)] if data and not is_own_function(type(data).state_dict) else []),
            *_roots_of(_loaders_of(trainer.fit_loop)),
            *data_roots("val", _loaders_of(trainer.fit_loop.epoch_loop.val_loop)),
            *(Root(type(item).__name__, item, is_callback=True) for item in callbacks),
            Root("hparams", module.hparams, of_library=True, has_all=True),
            *(Root(f"optimizer{number}", item) for number, item in enumerate(trainer.optimizers)),
            *script_roots((module, data, *callbacks)),
        ]
        schedules = (config.scheduler for config in trainer.lr_scheduler_configs)
        known = (
            trainer,
            module,
            data,
            *trainer.callbacks,
            *trainer.loggers,
            *trainer.optimizers,
            *schedules,
            trainer.strategy,
        )
        self.restore.attributes = OwnAttributes(
            roots, known, [module, *trainer.optimizers], module.device, lambda left: self._session.note_exactness(attributes=left),
            of_loaders=lambda: self._session.generators_of_loaders,
        )  # fmt: skip

    def keep_data(self, loaders: Sequence[Any]) -> None:
        """The training reads by these loaders now."""
        if self.restore.attributes is not None:
            self.restore.attributes.keep_data(root.thing for root in _roots_of(loaders))

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        self._check_optimizers()
        parts = {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": self._savable(
                {item.state_key: saved for item in trainer.callbacks if (saved := item.state_dict())}, "state_dict"
            ),
            "should_stop": trainer.should_stop,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "loaded_at": max(0, trainer.fit_loop._last_train_dl_reload_epoch),
            "progress": {"epoch": trainer.current_epoch, "global_step": trainer.global_step},
            "trained_weights": lightning_callbacks.trained_weights(trainer.lightning_module),
            "logged": lightning_checkpoint.logged_by(trainer),
            "metrics": self._savable(metric_states.states_of(trainer.lightning_module), "a metric"),
            "datamodule": self._savable(trainer.datamodule.state_dict() if trainer.datamodule else {}, "state_dict"),
        }
        parts |= self.restore.state() | ({"replaced": True} if self._is_replaced else {})
        return parts | self._added_by_hooks(lightning_checkpoint.like_its_own(trainer, parts))

    def take_optimizers(self) -> None:
        """Those of this moment are tracked."""
        self._optimizers = list(self._trainer.optimizers)

    def _check_optimizers(self, *, was_replaced: bool = False) -> None:
        """Tell of others than those that are tracked, in this session or one before."""
        pairs = itertools.zip_longest(self._trainer.optimizers, self._optimizers)
        if was_replaced or any(one is not other for one, other in pairs):
            self._is_replaced = True
            self._session.note_exactness(optimizers=REPLACED)

    def _added_by_hooks(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What the `on_save_checkpoint` of callbacks and module add or replace, also among the weights."""
        trainer, before, weights = self._trainer, dict(checkpoint), checkpoint["state_dict"]
        weights_before = dict(weights)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
        added = lightning_checkpoint.difference(before, checkpoint)
        is_weights = [
            name for name, value in added.items() if value is weights
        ]  # under another name: kgorch saves them
        return {
            "module": self._savable({name: value for name, value in added.items() if name not in is_weights}),
            "weights": self._savable(lightning_checkpoint.difference(weights_before, weights)),
            "is_weights": is_weights,
        }

    def _savable(self, added: dict[str, Any], hook: str = "on_save_checkpoint") -> dict[str, Any]:
        refused = {name for name, value in added.items() if not tagged_json.is_savable(value)}
        if refused:
            what = f"{', '.join(sorted(map(str, refused)))} of {hook}: of a type that a checkpoint cannot hold"
            self._session.note_exactness(hooks=what)
        return {name: value for name, value in added.items() if name not in refused}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Call the hooks in the order of Lightning, which restores loops and schedulers after them."""
        trainer = self._trainer
        saved["callbacks"] = callbacks = self._trusted(saved["callbacks"])
        checkpoint = lightning_checkpoint.like_its_own(trainer, saved)
        checkpoint |= {name: dict(checkpoint["state_dict"]) for name in saved.get("is_weights", ())}
        checkpoint["state_dict"] |= saved.get("weights", {})
        checkpoint |= saved["module"]
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        if saved.get("datamodule") and trainer.datamodule:
            trainer.datamodule.load_state_dict(saved["datamodule"])
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        for callback in trainer.callbacks:
            if state := callbacks.get(callback.state_key):
                if any(callback is one for one in self._without_folder) and state.get("dirpath"):
                    # Lightning has taken the folder of this session's logger, and loads nothing that lies in another one.
                    callback.dirpath = state["dirpath"]
                callback.load_state_dict(state)
        self.restore.load(saved)
        self._metrics = saved.get("metrics")
        self._check_optimizers(was_replaced=bool(saved.get("replaced")))
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        trainer.fit_loop.load_state_dict(saved["loops"])
        lightning_checkpoint.put_back_logged(trainer, saved.get("logged", {}))
        if lightning_callbacks.is_averaging(trainer, callbacks):
            trainer.lr_scheduler_configs.clear()  # its own is created at the beginning of the epoch, with its state
            return
        if len(configs := trainer.lr_scheduler_configs) != len(states := saved["schedulers"]):
            raise CannotRestore(
                f"the training had {len(states)} learning rate schedulers when it was saved, and begins with {len(configs)}",
                "they were made anew in the course of the training, as by `trainer.strategy.setup_optimizers()`",
                next_step="return the same optimizers and schedulers from configure_optimizers in every session, and change their"
                " param_groups in place of making new ones; or make each part of the training a stage of its own",
            )
        for config, state in zip(configs, states, strict=True):
            config.scheduler.load_state_dict(state)

    def load_callbacks(self, states: dict[str, Any], callbacks: Iterable[Any]) -> None:
        """Load the states of these callbacks alone."""
        trusted = self._trusted(states)
        for callback in callbacks:
            if state := trusted.get(callback.state_key):
                callback.load_state_dict(state)

    def _trusted(self, states: dict[str, Any]) -> dict[str, Any]:
        """The saved states of the callbacks, without those that name files elsewhere."""
        trainer = self._trainer
        trusted = dict(states)
        folders = (trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers))
        for callback in trainer.callbacks:
            state, own = states.get(callback.state_key, {}), vars(callback)
            # What the script has set itself is no stranger's, as the name of a metric with a slash.
            strange = {
                name: value for name, value in state.items() if name not in own or not _is_equal(value, own[name])
            }
            if not carrier.stays_in(strange, *folders, own.get("dirpath")):
                del trusted[callback.state_key]
                what = (
                    f"the state of {type(callback).__name__} is lost: it names files outside of the Trainer's folders"
                )
                self._session.note_exactness(hooks=what)
        return trusted


def _is_equal(value: Any, own: Any) -> bool:
    """False where they cannot be compared, as lists of tensors."""
    try:
        return bool(value == own)
    except (RuntimeError, ValueError, TypeError):
        return False


def _loaders_of(loop: Any) -> list[Any]:
    combined = loop._combined_loader
    return [getattr(item, "loader", item) for item in combined.flattened] if combined is not None else []


def _roots_of(loaders: Sequence[Any]) -> Iterator[Root]:
    for number, item in enumerate(loaders):
        yield from data_roots(f"train.{number}", item, loader=f"train{number}")
