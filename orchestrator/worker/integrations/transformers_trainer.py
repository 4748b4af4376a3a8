"""Hugging Face's Trainer and its descendants (Seq2SeqTrainer, TRL's SFTTrainer).

The Trainer believes that it resumes from a checkpoint of its own: it is given a folder with its `trainer_state.json` alone, from
which it takes its counters. Weights, optimizer and random states come from kgorch's checkpoint, and its loader is followed, so it
skips nothing itself. A step begins at `on_step_begin`: then the step before it was logged and evaluated.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from kgorch.worker import tagged_json
from kgorch.worker.data import batches
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.integrations import carrier
from kgorch.worker.integrations.attribute_restore import AttributeRestore
from kgorch.worker.integrations.attribute_search import Root, data_roots, sampler_roots, script_roots
from kgorch.worker.integrations.own_attributes import OwnAttributes, tensors_held
from kgorch.worker.session import Session
from kgorch.worker.wrappers import unwrapped

STATE_FILE = "trainer_state.json"

LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler")
"""Methods that load from the folder that the Trainer resumes from. What they would load is in kgorch's checkpoint."""

NO_LADDER = "none: the Trainer makes its batches itself, of what the loader gives (GRPOTrainer: prompts)"


def adapt(module: ModuleType) -> None:
    """Adapt `transformers.trainer`."""
    cls: Any = module.Trainer
    cls.train = _carried_train(cls.train, module)
    cls.get_batch_samples = _counted(cls.get_batch_samples)
    cls.training_step = _in_microbatches(cls.training_step)
    cls.evaluate = _marked(cls.evaluate)
    if hasattr(cls, "_run_epoch"):
        cls._run_epoch = _unless_finished(cls._run_epoch)
    module.skip_first_batches = _skipping(module.skip_first_batches)  # type: ignore[attr-defined]


CALLBACKS = ("BEMACallback",)
"""See `_stateful_roots`."""

OF_SUMMARY = frozenset({"train_runtime", "train_loss", "total_flos"})
"""Together only in the last entry of a training's log."""


class TrainerParts:
    """The counters and sums of a Trainer, and the attributes of the script's objects.

    Args:
        held: the optimizer, and the modules that are tracked.
    """

    SUMS = (
        "_total_loss_scalar",
        "_globalstep_last_logged",
        "current_flos",
        "_initial_global_step",
        "_total_train_tokens",
    )
    GENERATED, OF_GENERATED = "_buffered_inputs", ("_step", "entropy_coef", "_last_world_entropy")
    """Of TRL's trainers: what was generated and is trained on for several steps, and numbers that go with it."""

    def __init__(self, trainer: Any, held: Sequence[Any], session: Session) -> None:
        self._trainer, self._held, self._session = trainer, held, session
        self.restore, self._before = AttributeRestore(), dict[int, dict[str, Any]]()
        self._arguments = {id(item): _arguments_of(item) for item in self._stateful_callbacks()}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", None)
        names = (*self.SUMS, *(self.OF_GENERATED if hasattr(trainer, self.GENERATED) else ()))
        return {
            "state": json.loads(json.dumps(dataclasses.asdict(trainer.state), default=_plain)),
            "sums": {name: getattr(trainer, name) for name in names if hasattr(trainer, name)},
            "loss": loss.clone() if isinstance(loss, torch.Tensor) else None,
            "metrics": self._collected(),
            "generated": self._generated(),
            "callbacks": [[type(item).__name__, self._state_of(item)] for item in self._stateful_callbacks()],
            **self.restore.state(),
        }

    def look_before(self) -> None:
        """Before the callbacks begin the training."""
        self._before = {id(item): tensors_held(item) for item in self._trainer.callback_handler.callbacks}

    def begin(self, *, is_rest: bool) -> None:
        """When all callbacks have begun the training: from now on they change with it.

        Args:
            is_rest: it goes on within an epoch, if it goes on.
        """
        stateful, trainer = self._stateful_callbacks(), self._trainer
        others = [item for item in trainer.callback_handler.callbacks if not any(item is one for one in stateful)]
        data = (trainer.train_dataset, trainer.eval_dataset, getattr(trainer, "processing_class", None))
        own = (trainer, trainer.args, trainer.state, trainer.control, trainer.model, trainer.model_wrapped)
        parts = (*own, trainer.optimizer, trainer.lr_scheduler, *stateful, *data)
        roots = [
            *(Root(label, thing, of_library=True) for label, thing in _of_library(trainer)),
            Root("model", trainer.model),
            Root("data_collator", trainer.data_collator, loader="train"),
            *data_roots("train_dataset", trainer.train_dataset, loader="train"),
            *data_roots("eval_dataset", trainer.eval_dataset),
            *self._sampler_roots(),
            *_function_roots(trainer),
            *(Root(type(item).__name__, item, is_callback=True) for item in others),
            *_stateful_roots(trainer.model, others),
            Root("optimizer", self._held[0]),
            *script_roots((trainer, trainer.model, trainer.data_collator, *others)),
        ]
        saved = (*self.SUMS, *self.OF_GENERATED, self.GENERATED, "_metrics", "_tr_loss")
        self.restore.attributes = OwnAttributes(
            roots, parts, self._held, trainer.args.device, lambda left: self._session.note_exactness(attributes=left),
            without=saved, of_loaders=lambda: self._session.generators_of_loaders,
        )  # fmt: skip
        self.restore.attributes.count_tensors(self._before)
        self.restore.begin(is_rest=is_rest)

    def _sampler_roots(self) -> Iterator[Root]:
        loader = self._trainer.callback_handler.train_dataloader
        return sampler_roots("train_dataloader", loader, loader="train") if isinstance(loader, DataLoader) else iter(())

    def _generated(self) -> Any:
        generated = getattr(self._trainer, self.GENERATED, None)
        if tagged_json.is_savable(generated):
            return generated
        self._session.note_exactness(
            trainer=f"{self.GENERATED} is of a type that a checkpoint cannot hold: a resume generates anew"
        )
        return None

    def _collected(self) -> dict[str, dict[str, list[Any]]]:
        """What TRL's Trainers have collected since their last log, by mode and name."""
        return {
            str(mode): {str(name): list(values) for name, values in collected.items()}
            for mode, collected in getattr(self._trainer, "_metrics", {}).items()
        }

    def _stateful_callbacks(self) -> list[Any]:
        """The callbacks whose state the Trainer itself would save, such as the counter of EarlyStoppingCallback."""
        stateful = getattr(import_module("transformers.trainer_callback"), "ExportableState", ())
        return [item for item in self._trainer.callback_handler.callbacks if isinstance(item, stateful)]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        # earlier versions of kgorch did not save where the training began, of which the loss is the mean
        for name, value in {"_initial_global_step": 0, **saved["sums"]}.items():
            setattr(self._trainer, name, value)
        if saved["loss"] is not None and hasattr(self._trainer, "_tr_loss"):
            self._trainer._tr_loss.copy_(saved["loss"])
        for mode, collected in saved.get("metrics", {}).items():
            self._trainer._metrics[mode].update(collected)
        if hasattr(self._trainer, self.GENERATED):
            setattr(self._trainer, self.GENERATED, batches.moved(saved.get("generated"), self._trainer.args.device))
        self.restore.load(saved)
        left = saved.get("callbacks", [])
        for callback in self._stateful_callbacks():
            found = next((entry for entry in left if entry[0] == type(callback).__name__), None)
            if found:
                left.remove(found)
                for name in (_arguments_of(callback) | callback.state()["attributes"]).keys() & found[1].keys():
                    setattr(callback, name, found[1][name])

    def _state_of(self, callback: Any) -> dict[str, Any]:
        """Its attributes, and those of its arguments that have moved: the others are the script's to change."""
        begun = self._arguments.get(id(callback), {})
        moved = {name: value for name, value in _arguments_of(callback).items() if begun.get(name, value) != value}
        attributes: dict[str, Any] = callback.state()["attributes"]
        return moved | attributes


def _arguments_of(callback: Any) -> dict[str, Any]:
    """Those that it keeps under their names, of what the Trainer would make it of again."""
    arguments = {name: value for name, value in callback.state().get("args", {}).items() if hasattr(callback, name)}
    return copy.deepcopy(arguments)


class TrainerLoader(FollowedLoader):
    """The training data.

    Attributes:
        is_open: the loop reads it. Whoever reads it before has an iteration of their own: the Trainer, which counts tokens, and
            `on_train_begin` of callbacks.
    """

    is_open = False

    @property
    def is_saved_at_end(self) -> bool:
        """The position to continue from is the end of an epoch."""
        with contextlib.suppress(TypeError):  # without a length
            return self._saved is not None and -(-self.next_batch * self._ranks_before // self._world) >= len(self)
        return False

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self.is_open else iter(self._loader)


def _of_library(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Objects of Transformers that a script changes while it trains: a callback anneals the clipping, the smoothing, a weight of a
    loss."""
    model = unwrapped(trainer.model)
    yield "trainer", trainer
    for owner, name in (
        (trainer, "args"),
        (trainer, "label_smoother"),
        (model, "config"),
        (model, "generation_config"),
    ):
        if (thing := getattr(owner, name, None)) is not None:
            yield name, thing


def _stateful_roots(model: Any, callbacks: Sequence[Any]) -> Iterator[Root]:
    """Objects of libraries with a state that none of them saves: TRL's averages of the weights, PEFT's importances of AdaLoRA."""
    for item in callbacks:
        if type(item).__name__ in CALLBACKS:
            yield Root(type(item).__name__, item, is_callback=True, of_library=True, has_all=True)
    allocator = getattr(getattr(unwrapped(model), "base_model", None), "rankallocator", None)
    if allocator is not None:
        yield Root("rankallocator", allocator, of_library=True, has_all=True)


def _function_roots(trainer: Any) -> Iterator[Root]:
    """What the Trainer was given to call: objects of the script, and those whose methods were given."""
    for name in ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "reward_funcs"):
        given = getattr(trainer, name, None)
        for number, item in enumerate(given if isinstance(given, list | tuple) else [given]):
            yield Root(f"{name}.{number}" if number else name, getattr(item, "__self__", item))


class TransformersCarrier:
    """What carries one training.

    Attributes:
        folder: what the Trainer resumes from; None where the stage begins.
        open_batches: batches of the running step that were read.
        is_extended: the training that it continues had ended an epoch, and begins another.
        loader, parts: the followed loader and the Trainer's counters, once it has made its own.
    """

    def __init__(self, trainer: Any, session: Session, folder: str | None) -> None:
        self.trainer, self.session, self.folder = trainer, session, folder
        self.open_batches: int | None = None
        self.loader: TrainerLoader | None = None
        self.is_extended = False
        self.parts: TrainerParts
        self._script_loader: Any = None

    def follow(self, loader: Any) -> TrainerLoader:
        self._script_loader = loader
        self.loader = TrainerLoader(loader, self.session.world_size, self.session.device)
        self.session.add_followed(self.loader, "train")
        return self.loader

    def track(self) -> None:
        """Before the first step, when the Trainer has built all of its parts."""
        trainer, session = self.trainer, self.session
        without_gpu = "use `TrainingArguments(use_cpu=True)` where there is no GPU"
        carrier.require_all_ranks(session, "Transformers", trainer.accelerator.num_processes, without_gpu)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        things = {"model": carrier.trainable(trainer.model_wrapped), "optimizer": optimizer}
        if trainer.lr_scheduler is not None:
            things["scheduler"] = trainer.lr_scheduler
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            things["scaler"] = scaler
        if getattr(trainer.args, "sync_ref_model", False) and getattr(trainer, "ref_model", None) is not None:
            things["ref_model"] = trainer.ref_model  # TRL: the reference follows the model
        if further := carrier.further_weights([optimizer], [trainer.model_wrapped, trainer.model]):
            things["further_weights"] = further
        held = [item for name, item in things.items() if name not in ("scheduler", "scaler")]
        self.parts = TrainerParts(trainer, [optimizer, trainer.model, *held], session)
        session.track(**things, trainer=self.parts)
        if self.loader is not None:  # the epoch of a checkpoint of the Trainer's own
            self.loader.start_at(int(trainer.state.epoch or 0), 0)
            if self.loader.is_saved_at_end:
                self.is_extended = not session.resumed.is_finished
                self.loader.begin_anew()
                if not session.resumed.is_finished:
                    session.restore_random_states()
            self.loader.is_open = True
            self.loader.on_begin = functools.partial(self.parts.restore.begin_loader, "train")
            self.loader.on_begun = functools.partial(self.parts.restore.end_reading_again, "train")
            trainer.callback_handler.train_dataloader = (
                self._script_loader
            )  # a callback that reads it takes no place in the epoch
        session.expect(steps=trainer.state.max_steps, epochs=int(trainer.state.num_train_epochs))

    def begin_step(self) -> None:
        args, state = self.trainer.args, self.trainer.state
        self.parts.restore.begin_step()
        batches = self.open_batches or args.gradient_accumulation_steps
        samples = batches * self.trainer._train_batch_size * self.session.world_size
        self.session.boundary(samples=samples, epoch=int(state.epoch or 0), open_batches=self.open_batches)


def _callbacks(module: ModuleType, carried: TransformersCarrier) -> tuple[Any, Any]:
    """The first and the last of a Trainer's callbacks: the others begin the training with its state, and a step behind the save."""
    base: Any = module.TrainerCallback

    class FirstCallback(base):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            carried.track()
            carried.parts.look_before()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            carried.begin_step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            carried.parts.restore.begin_step()  # of a training that was over there was none

    class LastCallback(base):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            carried.parts.begin(is_rest=not carried.is_extended)

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            carried.parts.restore.begin(is_rest=True)

        def on_epoch_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            if carried.session.resumed.is_finished:  # before `_run_epoch`: an epoch without a step
                control.should_log = control.should_evaluate = control.should_save = False

        def on_train_end(self, *_: Any, **__: Any) -> None:
            if (loss := getattr(carried.trainer, "_tr_loss", None)) is not None:
                # The sum has it by now, of this rank alone. It is added again where the training ends again or, of all ranks,
                # where it is logged.
                carried.trainer._total_loss_scalar -= loss.item()

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            carried.session.report(**carrier.figures(logs or {}))

    return FirstCallback(), LastCallback()


def _carried_train(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with carrier.carried_training("transformers") as session:
            if session is None:
                return original(self, resume_from_checkpoint, *args, **kwargs)
            with _resume_folder(session, self.args.output_dir) as folder:
                self._kgorch = carried = TransformersCarrier(self, session, folder)
                callbacks, (first, last) = self.callback_handler.callbacks, _callbacks(module, carried)
                callbacks.insert(0, first)
                callbacks.append(last)
                try:
                    with _followed(self, carried), _arguments(self.args, is_resumed=folder is not None):
                        return original(self, folder or resume_from_checkpoint, *args, **kwargs)
                finally:
                    callbacks.remove(first)
                    callbacks.remove(last)
                    self._kgorch = None

    return train


@contextlib.contextmanager
def _arguments(args: Any, *, is_resumed: bool) -> Iterator[None]:
    """The arguments with which the Trainer does what kgorch does, or a session would do once more, switched off."""
    names = ["auto_find_batch_size"]  # the memory ladder answers
    if is_resumed:
        names += ["eval_on_start", "ignore_data_skip"]
    former = {name: value for name in names if (value := getattr(args, name, False))}
    for name in former:
        setattr(args, name, False)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(args, name, value)


def _plain(value: Any) -> Any:
    """For JSON: what a script has logged may be a tensor or an array."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextlib.contextmanager
def _resume_folder(session: Session, output: str) -> Iterator[str | None]:
    """A folder with the saved `trainer_state.json`; None where the stage begins. `output`: where the Trainer's own files lie."""
    if not session.resumed:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kgorch-") as folder:
        state = session.resumed.state("trainer")["state"]
        # the summary of a training that is over is logged once more where it ends again, or later
        state["log_history"] = [entry for entry in state.get("log_history", ()) if not entry.keys() >= OF_SUMMARY]
        if not carrier.stays_in(state.get("best_model_checkpoint"), output):  # the Trainer would load it
            state["best_model_checkpoint"] = None
        Path(folder, STATE_FILE).write_text(json.dumps(state))
        yield folder


def _unless_from(folder: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Loads nothing from our folder."""

    @functools.wraps(original)
    def load(checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return None if checkpoint == folder else original(checkpoint, *args, **kwargs)

    return load


def _at_its_place(carried: TransformersCarrier, original: Callable[..., Any]) -> Callable[..., Any]:
    """Begins where the loader is. Of a loader without a length the Trainer takes all of `max_steps` for one epoch."""

    @functools.wraps(original)
    def init_training_state(*args: Any, **kwargs: Any) -> Any:
        counted = original(*args, **kwargs)
        try:
            len(carried.loader or ())
        except TypeError:
            return carried.session.resumed.place_of("train")
        return counted

    return init_training_state


def _unless_finished(original: Callable[..., Any]) -> Callable[..., Any]:
    """No epoch of a training that was stopped before its last one: what follows it in the script is left."""

    @functools.wraps(original)
    def run_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        carried = getattr(self, "_kgorch", None)
        if not carried or not carried.session.resumed.is_finished:
            return original(self, *args, **kwargs)
        self.control.should_training_stop = True
        return None

    return run_epoch


def _skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    """`skip_first_batches`. A followed loader is in its place already, unless the Trainer continues from its own checkpoint."""

    @functools.wraps(original)
    def skip_first_batches(loader: Any, count: int = 0) -> Any:
        if not isinstance(loader, FollowedLoader):
            return original(loader, count)
        loader.start_at(loader.epoch, count)
        return loader

    return skip_first_batches


@contextlib.contextmanager
def _followed(trainer: Any, carried: TransformersCarrier) -> Iterator[None]:
    """Follows what `get_train_dataloader` of this Trainer returns, and loads nothing from our folder. Its class, which may be the
    script's or a library's, may have methods of its own."""
    get_loader = trainer.get_train_dataloader
    methods = {"get_train_dataloader": lambda: carried.follow(get_loader())}
    if carried.folder:
        found = {name: getattr(trainer, name) for name in LOADS if hasattr(trainer, name)}
        methods |= {name: _unless_from(carried.folder, method) for name, method in found.items()}
        if hasattr(trainer, "_init_training_state"):
            methods["_init_training_state"] = _at_its_place(carried, trainer._init_training_state)
    own = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(own)


def _counted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_batch_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        carried = getattr(self, "_kgorch", None)
        if carried and carried.session.resumed.is_finished:
            return [], None  # the Trainer ends a training whose epoch has no batch
        read = original(self, *args, **kwargs)
        if carried:
            carried.open_batches = len(read[0])
        return read

    return get_batch_samples


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        carried = getattr(self, "_kgorch", None)
        with carried.session.evaluation() if carried else contextlib.nullcontext():
            return original(self, *args, **kwargs)

    return evaluate


def _in_microbatches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each call in as many parts as the memory settings ask for."""

    @functools.wraps(original)
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        carried = getattr(self, "_kgorch", None)
        if not carried:
            return original(self, model, inputs, num_items_in_batch)
        if not isinstance(inputs, Mapping):
            carried.session.note_exactness(ladder=NO_LADDER)
            return original(self, model, inputs, num_items_in_batch)

        def work(part: Any, weight: float) -> torch.Tensor:
            if weight == 1:  # in the collator's own type, as BatchEncoding
                return original(self, model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
            part = part if type(inputs) is dict else type(inputs)(part)  # type: ignore[call-arg]
            # A loss that is divided by the number of items of the whole step (tokens) is divided by the part's share of it and
            # weighted by that share: so the parts add up to it, and those of a loss that is a mean add up to the mean. Which of
            # both it is cannot be known: many models take the number and do not use it.
            items = None if num_items_in_batch is None else num_items_in_batch * weight
            backward = self.accelerator.backward
            self.accelerator.backward = lambda loss, **kwargs: backward(loss * weight, **kwargs)
            try:
                return original(self, model, part, items)  # type: ignore[no-any-return]
            finally:
                del self.accelerator.backward

        return carried.session.accumulate(dict(inputs), work, scaler=getattr(self.accelerator, "scaler", None))

    return training_step
