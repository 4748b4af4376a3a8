"""PyTorch Lightning's Trainer, by both of its import names.

Everything is restored when the loop of the training is about to run and has its data: then model, optimizers and loops exist, and
none of them has begun. The loops believe that they restart from a checkpoint of Lightning. A step begins at
`on_train_batch_start`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from kgorch.errors import KgorchError
from kgorch.worker.checkpoint import state_codec
from kgorch.worker.integrations import carrier, lightning_callbacks, lightning_checkpoint, lightning_steps
from kgorch.worker.integrations.lightning_loader import TrainingLoader
from kgorch.worker.integrations.lightning_parts import LightningParts
from kgorch.worker.session import Session

READ_TOGETHER = (
    "Lightning: loaders without a length that are read together are resumed exactly if they have as many batches"
)


def adapt(module: ModuleType) -> None:
    """Adapt `lightning.pytorch.trainer.trainer`, or the module of the same name in `pytorch_lightning`."""
    root = module.__name__.removesuffix(".trainer.trainer")
    fit_loop: Any = import_module(f"{root}.loops.fit_loop")._FitLoop
    evaluation_loop: Any = import_module(f"{root}.loops.evaluation_loop")._EvaluationLoop
    signals: Any = import_module(f"{root}.trainer.connectors.signal_connector")._SignalConnector
    automatic: Any = import_module(f"{root}.loops.optimization.automatic")._AutomaticOptimization
    connector: Any = import_module(f"{root}.trainer.connectors.checkpoint_connector")._CheckpointConnector
    epoch_loop: Any = import_module(f"{root}.loops.training_epoch_loop")._TrainingEpochLoop
    connector.restore_callbacks = _with_callbacks(connector.restore_callbacks)
    epoch_loop.advance = _advanced(epoch_loop.advance)
    automatic._make_closure = lightning_steps.in_parts(automatic._make_closure, _carrier_of)
    fit_loop._load_combined_loader_states = _followed(fit_loop._load_combined_loader_states)
    fit_loop.run = _restored(fit_loop.run)
    fit_loop.on_advance_start = _begun(fit_loop.on_advance_start)
    evaluation_loop.run = _marked(evaluation_loop.run)
    signals.register_signal_handlers = _unless_carried(signals.register_signal_handlers)
    trainer: Any = module.Trainer
    trainer.fit = _carried_fit(trainer.fit, root)


class LightningCarrier:
    """What carries one training.

    Args:
        root: import name of the library.

    Attributes:
        callback: what calls `begin_step`, among the Trainer's callbacks.
        awaits_batch: Lightning fetches a batch whose step has not begun.
        _is_rest: the epoch that begins is the rest of one, until its first step.
        _extends: a finished training is extended: an epoch begins.
    """

    def __init__(self, trainer: Any, session: Session, root: str) -> None:
        self._trainer, self.session, self._root = trainer, session, root
        self.callback = _callback(root, self)
        self._finetuning = import_module(f"{root}.callbacks").BaseFinetuning
        without_folder = [item for item in trainer.callbacks if getattr(item, "dirpath", "") is None]
        self._parts = LightningParts(trainer, without_folder, session)
        self._loaders: list[TrainingLoader] = []
        self._is_running = self._is_set_up = False
        self._is_rest = self._extends = self.awaits_batch = False
        self._stepped: int | None = None
        self._reported: dict[str, Any] = {}
        """The newest reported tensor of each name: held, so that no other tensor gets its address."""

    def follow(self, combined: Any) -> None:
        """Follow the training loaders, before the loop of the training iterates them: the first ones, and those loaded anew."""
        if not self._is_running:
            return
        session, epoch = self.session, self._trainer.current_epoch
        loaders = [item.loader if isinstance(item, TrainingLoader) else item for item in combined.flattened]
        self._loaders = [TrainingLoader(item, session.world_size, session.device) for item in loaders]
        for number, loader in enumerate(self._loaders):
            loader.start_at(epoch, 0)
            loader.is_open, name = self._is_set_up, f"train{number}"
            loader.on_begin = functools.partial(self._parts.restore.begin_loader, name)
            loader.on_begun = functools.partial(self._parts.restore.end_reading_again, name)
            session.add_followed(loader, name)
        self._parts.keep_data(loaders)
        # Only the loop reads by these: its setter would show them to the script, too, as `trainer.train_dataloader`.
        combined._flattened = self._loaders

    def restore_callbacks(self) -> None:
        """Restore callbacks before their `on_fit_start`, as Lightning does: some make there what they have loaded. All is restored
        later once more (`set_up`); of BaseFinetuning, then alone."""
        if self.session.resumed and not self._is_set_up:
            hook = import_module(f"{self._root}.callbacks").Callback.on_fit_start
            beginning = [
                item
                for item in self._trainer.callbacks
                if type(item).on_fit_start is not hook and not isinstance(item, self._finetuning)
            ]
            self._parts.load_callbacks(self.session.resumed.state("lightning")["callbacks"], beginning)

    def set_up(self) -> None:
        """Restore the state, once."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        if self._is_set_up:
            return
        mend = "give `Trainer(devices=…, num_nodes=…)` as many devices as there are ranks"
        carrier.require_all_ranks(self.session, "Lightning", trainer.world_size, mend)
        self._is_running = True
        loop.setup_data()
        if loop._combined_loader is None:
            return
        if not self._loaders:  # loaded before, as by `trainer.estimated_stepping_batches`
            self.follow(loop._combined_loader)
        if self.session.resumed and trainer.reload_dataloaders_every_n_epochs:
            self._load_data_of(self.session.resumed.state("lightning").get("loaded_at", 0))
        if self.session.resumed:
            lightning_callbacks.put_back(trainer, self._finetuning, self.session.resumed.state("lightning"))
        self._parts.take_optimizers()
        self.session.track(
            model=carrier.trainable(trainer.lightning_module),
            **self._optimizers(),
            lightning=self._parts,
        )
        if self.session.resumed:
            self._reported.update(getattr(trainer._logger_connector, "_callback_metrics", {}))  # by an earlier session
            self._stepped = loop.epoch_loop._batches_that_stepped
            self._is_rest = loop.epoch_progress.current.ready > loop.epoch_progress.current.processed
            if not self._is_rest and loop.epoch_loop.batch_progress.is_last_batch:
                # Lightning takes an epoch that `max_steps` has ended for one that goes on.
                loop._restarting = loop.epoch_loop.restarting = False
            self._extends = not self._is_rest and not loop.restarting
            loop.epoch_loop.batch_progress.is_last_batch = False  # of the batch that comes again
            # Where it was stopped before its last epoch, only what follows it in the script is left. Before `min_epochs` a stop
            # waits for them, unless the training is extended.
            is_asked = not self._extends and self.session.resumed.state("lightning").get("should_stop", False)
            trainer.should_stop = self.session.resumed.is_finished or is_asked
        if not trainer.lightning_module.automatic_optimization:
            self.session.note_exactness(ladder=lightning_steps.NO_LADDER)
        steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        self.session.expect(
            steps=int(steps) if 0 < steps < float("inf") else None, epochs=epochs if epochs and epochs > 0 else None
        )
        is_longest = getattr(loop._combined_loader, "_mode", "") == "max_size" and loop.max_batches != float("inf")
        for loader in self._loaders:
            loader.start_at(trainer.current_epoch, 0)  # of a checkpoint of Lightning's own
            # Of loaders that are read together, one that was at its end before the others gives nothing more in this epoch.
            loader.is_over = is_longest and loader.epoch > trainer.current_epoch
            loader.is_open = True
            if self._extends:
                loader.begin_anew()
        if trainer.should_stop:  # only what follows the training is left
            self._parts.begin(import_module(f"{self._root}.callbacks").Callback)
            self._parts.restore.begin(is_rest=False)
        self._is_set_up = True
        fetcher = loop._data_fetcher
        if any(loader.has_no_length for loader in self._loaders):  # a batch is read when the iterator is made
            self._parts.begin(import_module(f"{self._root}.callbacks").Callback)
        if self._extends and trainer.current_epoch:
            loop._resuming_from_checkpoint = False  # the epoch that begins creates the iterators
        else:
            iter(fetcher)
        if fetcher.length is None and len(self._loaders) > 1:
            self.session.note_exactness(loop=READ_TOGETHER)

    def _load_data_of(self, epoch: int) -> None:
        """Load the training data as the Trainer has loaded them last, at the beginning of this epoch. The restore follows."""
        loop = self._trainer.fit_loop
        progress = loop.epoch_progress.current
        now, progress.completed = progress.completed, epoch
        loop._combined_loader = None
        loop.setup_data()
        progress.completed = now

    def begin_epoch(self, begin: Callable[[], None]) -> None:
        """Begin an epoch or the rest of one, of which Lightning from 2.5 on leaves out `on_train_epoch_start`.

        What that sets is not in a checkpoint, as a list for the outputs of the epoch or the batches of a step. What it changes in
        model, optimizers and the states of callbacks is: the epoch has begun with that, and it is undone.

        Args:
            begin: what Lightning does.
        """
        trainer = self._trainer
        self._parts.begin(import_module(f"{self._root}.callbacks").Callback)
        if not self._is_rest:
            if self._extends:
                self.session.restore_random_states()  # once
            self._parts.restore.begin(is_rest=False)
            begin()
            return
        call, module = import_module(f"{self._root}.trainer.call"), trainer.lightning_module
        owners = lightning_callbacks.changing((module, *trainer.callbacks), self._root)
        things = {"model": module} | self._optimizers() if owners else {}
        states = [
            (item, copy.deepcopy(state)) for item in owners if item is not module and (state := item.state_dict())
        ]
        trained = lightning_callbacks.trained_weights(module)
        before = state_codec.capture(things)
        # Copies on the CPU: a second state may not fit on the device.
        large = {f"model.{name}" for name in lightning_callbacks.large_frozen_weights(module)}
        copies = {
            name: tensor if name in large else tensor.to("cpu", copy=True) for name, tensor in before.tensors.items()
        }
        begin()
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False):
            call._call_callback_hooks(trainer, "on_train_epoch_start")
            call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        lightning_callbacks.set_trained(module, trained)
        state_codec.put_back(things, before, copies)
        for callback, state in states:
            callback.load_state_dict(state)
        self._parts.restore.begin(is_rest=True)

    def _optimizers(self) -> dict[str, Any]:
        return {f"optimizer{number}": item for number, item in enumerate(self._trainer.optimizers)}

    def begin_transfer(self) -> None:
        """Begin the step before the batch goes to the device: hooks of that may draw random numbers and set attributes."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.increment_ready()  # as Lightning does behind them: the loop's state counts the batch whose step begins
        self.begin_step()
        progress.total.ready -= 1
        progress.current.ready -= 1

    def begin_step(self) -> None:
        self.awaits_batch = False
        self.report()
        self._parts.begin_step()
        loop = self._trainer.fit_loop
        if self._stepped is not None:
            # A restart counts the batch after which Lightning itself would have saved; kgorch saves before one.
            loop.epoch_loop._batches_that_stepped, self._stepped = self._stepped, None
            # The batch is counted again, and Lightning validates by this number where `check_val_every_n_epoch` is None.
            loop.epoch_loop.batch_progress.total.ready -= self._is_rest
            self._is_rest = False
            # What remains of the epoch is no restart: Lightning before 2.5 steps a scheduler twice at the end of such an epoch.
            loop._restarting = False
        fetcher = loop._data_fetcher
        if hasattr(fetcher, "iterator_wrapper") and not fetcher.fetched:
            # The step reads its batches itself (`dataloader_iter`), and has asked for none of this epoch yet.
            for loader in self._loaders:
                loader.leave()
        # Of a loader without a length a batch is read ahead.
        ahead = getattr(fetcher, "batches", None) if fetcher.length is None else None
        self.session.boundary(epoch=self._trainer.current_epoch, open_batches=None if ahead is None else 1 + len(ahead))

    def end(self) -> None:
        """The training is over. What extends it goes on in the epoch only where `max_steps` has ended it there."""
        self.report()
        loop = self._trainer.fit_loop
        if self._trainer.max_steps == -1 or loop.epoch_loop.batch_progress.is_last_batch:
            for loader in self._loaders:
                loader.leave()

    def report(self) -> None:
        """Report what was logged since the last call, at the weights of this moment.

        Lightning has collected it at the end of the batch, evaluation or epoch; `callback_metrics` would do so once more.
        What was not logged again is collected as well: the same tensor, in a new object.
        """
        connector = self._trainer._logger_connector
        current = getattr(connector, "_callback_metrics", None)
        if current is None:
            current = self._trainer.callback_metrics
        reported, is_same = self._reported, lightning_checkpoint.is_same
        logged = {name: value for name, value in current.items() if not is_same(reported.get(name), value)}
        if logged:
            reported.update(logged)
            self.session.report(**carrier.figures(logged))


def _carrier_of(trainer: Any) -> LightningCarrier | None:
    """What carries the loop that runs; None in the search of a LearningRateFinder or BatchSizeFinder, which runs the same loop
    with other callbacks and undoes all of it."""
    carried: LightningCarrier | None = getattr(trainer, "_kgorch", None)
    if carried is None:
        return None
    mine, callbacks = carried.callback, trainer.callbacks
    is_there = callbacks and (callbacks[0] is mine or any(item is mine for item in callbacks))
    return carried if is_there else None


def _callback(root: str, carried: LightningCarrier) -> Any:
    base: Any = import_module(f"{root}.callbacks").Callback
    # Lightning leaves out what cannot be called; its profiler would record each hook of a step, in some ten calls.
    hooks = (name for name in dir(base) if name.startswith("on_") and not name.endswith("_checkpoint"))
    quiet: Any = type("QuietCallback", (base,), dict.fromkeys(hooks))

    class LightningCallback(quiet):  # type: ignore[misc]
        @property
        def on_train_batch_start(self) -> Callable[..., None] | None:
            return self._begin_step if carried.awaits_batch else None  # else it began when the batch was transferred

        def _begin_step(self, *_: Any) -> None:
            carried.begin_step()  # it reads its batches itself

        def on_train_epoch_end(self, *_: Any) -> None:
            carried.report()  # before the epoch's means take the place of its last batch's values

        def on_train_end(self, *_: Any) -> None:
            carried.end()

    return LightningCallback()


def _carried_fit(original: Callable[..., Any], root: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(getattr(callback, "_early_exit", False) for callback in self.callbacks):
            return original(self, *args, **kwargs)  # a Tuner's search, which ends before the training
        with carrier.carried_training(root.partition(".")[0]) as session:
            if session is None:
                return original(self, *args, **kwargs)
            _require_own_process(self.strategy, root)
            _adapt_module(import_module(f"{root}.core.module").LightningModule)
            self._kgorch = carried = LightningCarrier(self, session, root)
            self.callbacks.insert(0, carried.callback)
            given = signature.bind(self, *args, **kwargs)
            if session.resumed:
                given.arguments.pop("ckpt_path", None)  # an older state than kgorch's
                lightning_callbacks.let_overwrite(self.callbacks, root)
            try:
                return original(*given.args, **given.kwargs)
            finally:
                self.callbacks = [item for item in self.callbacks if item is not carried.callback]
                self._kgorch = None

    return fit


def _require_own_process(strategy: Any, root: str) -> None:
    """Raises: KgorchError where the training would run in processes that the strategy starts: no rank of kgorch's is among them."""
    if isinstance(strategy.launcher, import_module(f"{root}.strategies.launchers")._MultiProcessingLauncher):
        raise KgorchError(
            f"Lightning's {type(strategy).__name__} starts its processes itself, and kgorch can save nothing in them",
            "kgorch starts a process for each rank; ddp_notebook, ddp_spawn and the like start others",
            next_step=f'leave `strategy` out, or take "ddp", and give the stage `ranks = {strategy.num_processes}`',
        )


def _followed(original: Callable[..., Any]) -> Callable[..., Any]:
    """The last thing before the Trainer creates the iterators of its training data."""

    @functools.wraps(original)
    def load_combined_loader_states(self: Any) -> None:
        if carried := _carrier_of(self.trainer):
            carried.follow(self._combined_loader)
        original(self)

    return load_combined_loader_states


def _with_callbacks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore_callbacks(self: Any) -> None:
        original(self)
        if carried := _carrier_of(self.trainer):
            carried.restore_callbacks()

    return restore_callbacks


def _restored(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any) -> None:
        if carried := _carrier_of(self.trainer):
            carried.set_up()
        original(self)

    return run


def _begun(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_advance_start(self: Any) -> None:
        if carried := _carrier_of(self.trainer):
            carried.begin_epoch(functools.partial(original, self))
        else:
            original(self)

    return on_advance_start


def _advanced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def advance(self: Any, *args: Any) -> None:
        if not (carried := _carrier_of(self.trainer)):
            original(self, *args)
            return
        carried.awaits_batch = True
        try:
            original(self, *args)
        finally:
            carried.awaits_batch = False

    return advance


def _adapt_module(kind: Any) -> None:
    """Adapt LightningModule, once: it may not be there yet when the Trainer is imported."""
    original = getattr(kind, "_on_before_batch_transfer", None)
    if original and not hasattr(original, "__wrapped__"):  # without it a step begins at `on_train_batch_start`
        kind._on_before_batch_transfer = _transferred(original)


def _transferred(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_before_batch_transfer(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = getattr(self, "_trainer", None)
        if batch is not None and trainer and (carried := _carrier_of(trainer)) and carried.awaits_batch:
            carried.begin_transfer()
        return original(self, batch, *args, **kwargs)

    return on_before_batch_transfer


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any) -> Any:
        carried = _carrier_of(self.trainer)
        if not carried:
            return original(self)
        counts = not self.trainer.sanity_checking
        if counts:
            carried.report()  # before its metrics take the place of the batch's
        with carried.session.evaluation():
            outputs = original(self)
            if counts:
                carried.report()
        return outputs

    return run


def _unless_carried(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's handler of SIGTERM ends the training at once; kgorch's saves first. Slurm's signals come through kgorch, too."""

    @functools.wraps(original)
    def register_signal_handlers(self: Any) -> None:
        if not getattr(self.trainer, "_kgorch", None):
            original(self)

    return register_signal_handlers
