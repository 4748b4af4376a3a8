"""How a script around Accelerate's Accelerator is carried: which objects are tracked, and where the training goes on.

What `accelerator.prepare` has returned is tracked, and its loaders are followed. Iterations of them that begin within no other
one are numbered for each loader; one in which an optimizer steps is a training epoch. A step begins where its loader is asked for a
batch after an optimizer has stepped.

The script begins with its first epoch also where the run continues. Until the iteration of the newest save it replays: each
iteration gives one batch, with which an optimizer's step does nothing, and the state is restored before the first batch of that
iteration. So what the script computes in those epochs does not count, nothing of it is saved or logged (accelerate_loop.py,
kept_files.py), but a variable that an epoch sets is set; those that hold a number get it back with the state (script_numbers.py).
Alternative: no batch at all, with which the loss that most scripts print after an epoch has no value. Where the epoch of the newest
save has no batch left, or the training is over, the state is restored at the end of its last epoch.

A script may prepare a loader anew for each epoch: then each of them is a training loader, with the epochs that it has given itself.
Those that are prepared within an epoch have no part in this: a resumed session prepares fewer of them.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from kgorch.errors import CannotRestore
from kgorch.worker import session_end
from kgorch.worker.audit.script_objects import frames_of_script
from kgorch.worker.integrations import carrier
from kgorch.worker.integrations.accelerate_loader import WITHIN, StepLoader, follow_in_place
from kgorch.worker.integrations.accumulation_windows import AccumulationWindows
from kgorch.worker.integrations.attribute_search import Root, running_roots
from kgorch.worker.integrations.kept_files import KeptFiles
from kgorch.worker.integrations.own_attributes import OwnAttributes
from kgorch.worker.integrations.own_state import OwnState
from kgorch.worker.integrations.prepared_loaders import PreparedLoaders, bits_of, text_of
from kgorch.worker.integrations.script_numbers import ScriptNumbers
from kgorch.worker.session import Session
from kgorch.worker.wrappers import unwrapped

NOTE = (
    "Accelerate: what goes on of the script are numbers in variables of its functions and in dicts there, objects of its classes"
    " with their numbers, tensors and lists, modules, averages, schedules and random generators in variables, and numbers and"
    " tensors in attributes of the models' modules; lists and tensors in variables, dicts with lists that change, bools, and all"
    " else begin anew in each session, with what the epochs that are run through once more have put there"
)

ATTRIBUTES = "attributes"
"""Name under which those of the models' modules and of the script's objects are tracked."""

REPLAY = (
    "the script runs through the epochs that are done with one batch each; files that torch.save and save_pretrained have written"
    " there stay as they are, what the script writes otherwise is written again (docs/your-training.md)"
)

MADE = "files that were gone were written with weights that are not trained"

SECOND_TRAINING = (
    "what was prepared after the first step, with a model or optimizer, is a second training and not saved"
)

OUTSIDE = "steps that belong to no loop over a loader are saved at the next batch of one, and a resume takes those before it again"

NO_LOOP = (
    "the script's steps belong to no loop over a loader that Accelerate has prepared: none of them is counted or saved; with"
    " `attach()` and `session.boundary()` they are (docs/your-training.md)"
)

MOST_OF_STEP = 256
"""Batches of a step."""

MOST_BEFORE = 50
"""Steps before the first loop over a loader, as of a warm-up."""

AGAIN = "a loader prepared after the first step, and iterated after newer ones, begins its order anew after a resume if it shuffles"

HELD = (
    "the steps of a loop within an iteration of another loader, also of a kept iterator, are saved together at its next batch,"
    " and where it was kept over epochs the batches after a resume may be others"
)

RAN_OUT = "CUDA out of memory. So it was in the first session of this run, and kgorch does not try it again"
"""Accelerate's `find_executable_batch_size` tells an out-of-memory by the text."""

NO_LADDER = "none: the script does forward and backward itself"


class AccelerateCarrier:
    """What carries one script.

    Attributes:
        has_started: the script has iterated a loader.
        is_begun: the state is restored, or the training began with this session.
        is_freed: the script has called `Accelerator.free_memory`.
        is_replaying: the script is at epochs that earlier sessions have done.
        outer: the loader of the iteration that runs within no other one.
        trained: numbers of the iterations in which an optimizer has stepped, from 1, as bits, by the loader's name.
    """

    def __init__(self, accelerator: Any, session: Session) -> None:
        without_gpu = "use `Accelerator(cpu=True)` where there is no GPU"
        carrier.require_all_ranks(session, "Accelerate", accelerator.num_processes, without_gpu)
        self._accelerator, self.session = accelerator, session
        self.things: dict[str, Any] = {}
        self._repeated: dict[str, Any] = {}
        """The same, and once more what was prepared again: so earlier versions tracked it."""
        resumed = session.resumed
        self.trained: dict[str, int] = {name: bits_of(text) for name, text in resumed.get("trained", {}).items()}
        self._counts: dict[str, int] = resumed.get("counts", {})  # iterations of the training loaders
        self._saved_counts = {**self._counts}  # the others grow in this session
        self._saved_at: list[Any] | None = _whole(resumed.get("at"))
        """Name and number of the iteration whose batch the newest step begins with; whether it is over; whether it had no more."""
        self._saved_number: float = resumed.get("number", math.inf)  # of loaders that were prepared
        self._at = self._saved_at
        self._prepared = PreparedLoaders(**resumed.get("prepared", {}))
        self.left_at: dict[str, int] = resumed.get("left_at", {})
        """Batch at which the script has left each epoch of a loader; 0 where it was not the same one."""
        self._former: list[str] | None = None
        """Training loaders by a checkpoint of an earlier version, which knew epochs that are done in place of iterations."""
        if not self._at and (drivers := resumed.get("drivers", [resumed.get("driver")])) != [None]:
            self._former, self._saved_at = drivers, [resumed.get("asked"), 0, False, False]
        # Of a training that is over: iterations of the training loaders, until the state is restored.
        single = sum(f"loader{number}" not in self._counts for number in self._prepared.numbers)
        self._left = sum(self._counts.values()) + single if resumed.is_finished else 0
        self.is_replaying = bool(self._left if resumed.is_finished else self._saved_at)
        self.has_started = self.is_begun = self.is_freed = False
        self._has_stepped = self._has_boundary = self._is_second = self._is_inner_asked = False
        self._steps_before = 0  # of the first loop over a loader
        self._without_step = 0  # batches of epochs that are done since an optimizer was asked to step
        self._asker: FrameType | None = None  # the generator of the script that has asked for the last of them
        self._is_replay_told = False
        self.loaders: dict[str, StepLoader] = {}
        self._earlier: list[StepLoader] = []  # prepared before the first optimizer
        self._number = self._within = 0  # of loaders that were prepared outside of all iterations, and within one
        self._epochs = 0  # of all training loaders
        self.outer: StepLoader | None = None
        session.note_exactness(loop=NOTE, ladder=NO_LADDER)
        session.name_untracked("accelerator.prepare() or accelerator.register_for_checkpointing()")
        while _hooks:
            _hooks.pop().remove()
        _hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: self._before_step(optimizer)))
        _hooks.append(register_optimizer_step_post_hook(lambda *_: self.after_step()))
        self.windows = AccumulationWindows(accelerator, session, lambda: (*self.loaders.values(), *self._earlier))
        self._own_state = OwnState(session.resumed)
        self._numbers, self._kept_files = ScriptNumbers(session), KeptFiles()
        if self.is_replaying:  # also of what is saved before the first epoch
            self._kept_files.open()
        accelerator.register_load_state_pre_hook(lambda _, folder: self._note_loaded(folder))
        session.at_end(self._check_begun)
        carrier.note_version(session, "accelerate")

    def follow_earlier(self, items: tuple[Any, ...]) -> None:
        """Follow the loaders that the script has from earlier calls of `prepare`. `items`: what the newest call gives it."""
        for number, loader in enumerate(self._accelerator._dataloaders):
            if not any(loader is item for item in items):
                name = f"earlier{number}"
                followed = follow_in_place(loader, self, name)
                self._recall(followed)
                self._earlier.append(followed)
                self.session.add_followed(followed, name)

    def start_over(self) -> None:
        """The script prepares a model again that it has freed, as `find_executable_batch_size` does after an out-of-memory.

        Where no step was taken, the training begins with this one. A run that continues can do so until its state is restored.
        """
        self.is_freed = False
        if self._is_second or self._has_stepped or (self.is_begun and self.session.resumed):
            return
        if self.is_begun:
            self.session.untrack()
            self.session.remember(freed=self._number)
        for loader in (*self.loaders.values(), *self._earlier):
            self.session.drop_followed(loader.name)
        self.things, self._repeated, self.loaders, self._earlier, self.outer = {}, {}, {}, [], None
        self.is_begun = self._has_boundary = False

    def add_prepared(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a call of `prepare` has returned; loaders come back as ones that are followed."""
        is_later = self.is_begun or self.outer is not None
        return self._add_later(items) if is_later else tuple(self.add(item) for item in items)

    def add(self, item: Any) -> Any:
        """What `prepare` has returned; a loader comes back as one that is followed."""
        if isinstance(item, DataLoader):
            return self._add_loader(item)
        if isinstance(item, StepLoader):  # prepared before
            return item
        kinds = {nn.Module: "model", torch.optim.Optimizer: "optimizer"}
        word = next((word for cls, word in kinds.items() if isinstance(item, cls)), "other")
        if hasattr(item, "state_dict"):
            for things in [self._repeated] if self._is_known(item) else [self.things, self._repeated]:
                number = sum(name.startswith(word) for name in things)
                things[f"{word}{number}"] = _inner(item)
        return item

    def _add_loader(self, item: Any) -> StepLoader:
        if self.outer is not None:
            self._within += 1
            return StepLoader(item, self, f"within{self._within}")
        number, self._number = self._number, self._number + 1
        self.session.remember(number=self._number)
        loader = StepLoader(item, self, f"loader{number}", number, self._epochs)
        self._recall(loader)
        if self._prepared.has_forgotten(number) and not self.session.resumed.place_of(loader.name)[0]:
            loader.is_forgotten = True
        else:
            self._follow(loader)
        return loader

    def _recall(self, loader: StepLoader) -> None:
        """What a checkpoint of an earlier version holds of the loader."""
        if self._former is None or self._saved_at is None:
            return
        done = max(0, self.session.resumed.place_of(loader.name)[0] - loader.first_epoch)
        if loader.name in self._former:
            self.trained[loader.name] = (2 << done) - 2
        if loader.name == self._saved_at[0]:
            self._saved_at[1] = done + 1

    def _follow(self, loader: StepLoader) -> None:
        self.loaders[loader.name] = loader
        self.session.add_followed(loader, loader.name)

    def _add_later(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """`add` for a call after the first step: only the loaders of the same training are followed."""
        trained = [item for item in items if isinstance(item, nn.Module | torch.optim.Optimizer)]
        if not all(self._is_known(item) for item in trained):
            if not self._is_second:
                print(f"kgorch: {SECOND_TRAINING}: make it a stage of its own", file=sys.stderr, flush=True)
            self._is_second = True
            self.session.note_exactness(training=SECOND_TRAINING)
        if self._is_second:
            return items
        return tuple(self.add(item) if isinstance(item, DataLoader) else item for item in items)

    def _note_loaded(self, folder: str) -> None:
        """The script loads a state of its own. Raises: CannotRestore."""
        if not self.has_started:
            self._own_state.note(folder)

    def begin(self) -> None:
        """Restore the state, before the first step of this session."""
        self._own_state.check()
        self.is_begun, accelerator = True, self._accelerator
        if self.is_replaying:
            self._end_replay()
        project = accelerator.project_configuration
        saves = self.session.resumed.get("saves")
        if type(saves) is int:  # it is a part of a folder's name, and the checkpoint may be a stranger's
            project.iteration = saves  # number of the next `save_state`
        self.session.remember(saves=project.iteration, own_state=self._own_state.name)
        session_end.empty_epoch = None
        for item in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
            if not self._is_known(item):
                self.add(item)  # prepared before the first optimizer
        things = {
            name: carrier.trainable(item) if name.startswith("model") else item for name, item in self._things().items()
        }
        further = carrier.further_weights(accelerator._optimizers, accelerator._models)
        custom = {f"custom{number}": item for number, item in enumerate(self._accelerator._custom_objects)}
        if further is not None:
            custom["further_weights"] = further
        scaler = getattr(self._accelerator, "scaler", None)
        optimizers = [_inner(item) for item in accelerator._optimizers]
        prepared = (
            accelerator, scaler, *accelerator._models, *accelerator._optimizers, *accelerator._schedulers, *accelerator.trackers,
            *accelerator._dataloaders, *accelerator._custom_objects, *self.loaders.values(), *self.things.values(),
        )  # fmt: skip
        if not self.session.resumed or ATTRIBUTES in self.session.resumed.names:  # earlier versions had none
            custom[ATTRIBUTES] = OwnAttributes(
                [*(Root(f"model{number}", item) for number, item in enumerate(accelerator._models)),
                 *(Root(f"optimizer{number}", item) for number, item in enumerate(optimizers))], prepared,
                [*accelerator._models, *optimizers], accelerator.device,
                lambda left: self.session.note_exactness(attributes=left), of_loaders=lambda: self.session.generators_of_loaders,
                running=lambda: running_roots({id(item) for item in prepared}), has_numbers=self._numbers.has_numbers_of,
            )  # fmt: skip
            self._numbers.saves_objects = True
        self.session.track(**things, **custom, **({"scaler": scaler} if scaler is not None else {}))
        self._restore_numbers()

    def _restore_numbers(self) -> None:
        if (names := self._numbers.restore()) and self.session.rank == 0:
            said = f"kgorch: variables of the script that have got their values back: {', '.join(names)}"
            print(said, file=sys.stderr, flush=True)

    def _end_replay(self) -> None:
        """Clear what the epochs that are done have left, where no checkpoint holds it."""
        self.is_replaying, self._asker, accelerator = False, None, self._accelerator
        if (made := self._kept_files.close()) and self.session.rank == 0:
            names = ", ".join(map(str, made[:5]))
            print(f"kgorch: {MADE} ({len(made)}): {names}", file=sys.stderr, flush=True)
        groups = (group["params"] for item in accelerator._optimizers for group in item.param_groups)
        for weight in itertools.chain(*groups, *(model.parameters() for model in accelerator._models)):
            weight.grad = None
        for loader in (*self.loaders.values(), *self._earlier):
            loader.forget_first()
        accelerator.step = 0  # batches of a window of accumulation: none is open where a step begins

    def _things(self) -> dict[str, Any]:
        names = self.session.resumed.names
        saved = {name: item for name, item in self._repeated.items() if name in names}
        is_whole = all(any(item is one for one in saved.values()) for item in self.things.values())
        return saved if is_whole and saved.keys() > self.things.keys() else self.things

    def note_left(self, loader: StepLoader, batch: int, number: int) -> None:
        """The script has left this iteration of the loader at this batch; 0 where it has read all of it."""
        if not self._is_trained(loader, number):
            return
        known = self.left_at.get(loader.name)
        batch = batch if known in (None, batch) else 0
        if batch != known:
            self.left_at[loader.name] = batch
            self.session.remember(left_at=self.left_at)

    def _is_known(self, item: Any) -> bool:
        return any(unwrapped(_inner(item)) is unwrapped(one) for one in self.things.values())

    def enter(self, loader: StepLoader) -> int:
        """An iteration begins. Returns its number for this loader; 0 where it is within another one."""
        if self.outer is not None and (self.outer is not loader or self._is_trained(loader, loader.iterations)):
            return 0
        self.outer = loader  # in place of an iterator of the same loader that the script may still hold
        loader.iterations += 1
        if self.is_driver(loader):
            self._epochs += 1
        if self.is_driver(loader) and not loader.is_forgotten:
            self._counts[loader.name] = loader.iterations
            self.session.remember(counts=self._counts)
        if loader.name.startswith("within"):
            self.session.note_exactness(within=WITHIN)
        return loader.iterations

    def leave(self, loader: StepLoader, number: int) -> None:
        """An iteration is over."""
        if self.outer is loader and loader.iterations == number:
            self.outer = None
            if self._at and self._at[:2] == [loader.name, number]:
                self._numbers.note()
                self._remember_at([loader.name, number, True, False])

    def gives(self, loader: StepLoader, number: int) -> str:
        """What an iteration gives.

        "one": a batch to no effect; "nothing"; "all" without its place; "place": what is left by its place.
        """
        resumed, was_begun, self.has_started = self.session.resumed, self.is_begun, True
        if self.is_replaying and not (number and self._begins(loader, number)):
            if loader.number is not None and loader.number < resumed.get("freed", 0):
                raise torch.cuda.OutOfMemoryError(RAN_OUT)
            is_epoch = bool(number) and self.is_driver(loader)
            if is_epoch and not self._is_replay_told and self.session.rank == 0:
                self._is_replay_told = True
                print(f"kgorch: {REPLAY}", file=sys.stderr, flush=True)
            if is_epoch:
                self._left -= 1
                self._numbers.set_back()
            self._without_step += is_epoch
            self._asker = _asking_generator() if is_epoch else self._asker
            # An epoch that an `except StopIteration` begins is one of a loop that counts steps: it would count too many.
            return "nothing" if is_epoch and isinstance(sys.exception(), StopIteration) else "one"
        if self.is_replaying and self._is_within_step():
            self._without_step += 1
            return "one"
        if not was_begun:
            self.begin()
        is_trained = self._is_trained(loader, number)
        if resumed.is_finished:
            is_further = self.is_driver(loader) and number > self._saved_counts.get(loader.name, 0)
            return "nothing" if is_trained or is_further else "all"
        if not number and self.outer is loader:
            return "all"
        if was_begun and is_trained:
            return "nothing"
        if loader.is_forgotten:
            loader.is_forgotten, loader.is_kept = False, True
            self._follow(loader)
            self.session.note_exactness(again=AGAIN)
        return "place"

    @property
    def place_of_outer(self) -> tuple[str, int]:
        """Name and number of the iteration that runs within no other one."""
        return (self.outer.name, self.outer.iterations) if self.outer is not None else ("", 0)

    def after_one(self, loader: StepLoader, number: int, within: tuple[str, int]) -> str:
        """The script is done with a batch of `gives`. Returns: what the iteration gives besides, as there.

        Args:
            within: the outer iteration when the batch was given.
        """
        if not number and self.place_of_outer != within:  # an iterator that the script keeps
            return "one" if self.is_replaying else "place"
        if not self.is_replaying or not number:
            return "nothing"
        is_place = self._saved_at is not None and self._saved_at[:2] == [loader.name, number]
        if self._begins(loader, number):
            if self._is_within_step():
                self._without_step += 1
                return "one"
            self.begin()
            return "place"
        if self.session.resumed.is_finished:
            if self.is_driver(loader) and (is_place or self._left <= 0):
                self.begin()
        elif self._saved_at and is_place and self._saved_at[3]:
            self.begin()
            return "place"
        elif self._saved_at and is_place and self._saved_at[2]:
            self._restore_numbers()  # before the code between two epochs; all else with the next epoch
        return "nothing"

    def _is_within_step(self) -> bool:
        """Whether the script has taken a part of a step's batches from a generator of its own (`cycle(loader)`), which gave it one
        for each epoch that is done: the place is one between two steps."""
        if not 0 < self._without_step < MOST_OF_STEP or self._asker is None:
            return False
        return _asking_generator() is self._asker  # one that an epoch makes anew counts from its begin

    def _begins(self, loader: StepLoader, number: int) -> bool:
        """Whether the session goes on with this iteration, and not after it."""
        assert self._saved_at
        name, saved, is_over, is_at_end = self._saved_at
        if (name, saved) == (loader.name, number):
            # After a training loader's last batch it goes on at the end: what the script computes there has a value then.
            is_done = self.is_driver(loader) if self.session.resumed.is_finished else is_over or is_at_end
            return not is_done
        if is_over and (loader.number or 0) >= self._saved_number:
            return True  # prepared for an epoch that the training is extended by
        # The next epoch, also where an evaluation at which it was cut does not come again.
        is_next = self.is_driver(loader) and number >= self._trained_of(loader).bit_length()
        return is_next and (is_over or name not in self.trained)

    def is_driver(self, loader: StepLoader) -> bool:
        """An optimizer has stepped in an iteration of this loader."""
        return bool(self._trained_of(loader))

    def _trained_of(self, loader: StepLoader) -> int:
        return self.trained.get(loader.name) or (2 if self._prepared.was_driver(loader.number) else 0)

    def _is_trained(self, loader: StepLoader, number: int) -> bool:
        return bool(self._trained_of(loader) >> number & 1)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. In an epoch that is done its step has no effect: it finds no gradients. One around another
        optimizer (SAM) finds zeros, for it computes with them; the other one finds none."""
        self._without_step = 0
        for outer in map(_inner, self._accelerator._optimizers) if self.is_replaying else ():
            within = [item for item in vars(outer).values() if isinstance(item, torch.optim.Optimizer)]
            if optimizer is outer or any(optimizer is item for item in within):
                optimizer.zero_grad(set_to_none=optimizer is not outer or not within)

    def after_step(self) -> None:
        """An optimizer has stepped."""
        loader, self._has_stepped = self.outer, self._has_stepped or self.is_begun
        if not session_end.is_open() or self._is_second or self.session.resumed.is_finished:
            return
        if loader is None:
            self._steps_before += not self.is_begun
            if self.is_begun and not self.trained:
                self.session.note_exactness(outside=OUTSIDE)
            elif self._steps_before == MOST_BEFORE:
                self.session.note_exactness(outside=NO_LOOP)
                if self.session.rank == 0:
                    print(f"kgorch: {NO_LOOP}", file=sys.stderr, flush=True)
            return
        if self.is_replaying and self.is_driver(loader):
            return
        if not self.is_begun:
            raise CannotRestore(
                f"the script trains with {loader.name}, which the checkpoint does not know as a training loader",
                next_step="prepare the loaders in the same order as in the sessions before",
            )
        if self._is_inner_asked:
            self.session.note_exactness(held=HELD)
        number, is_new = loader.iterations, not self.is_driver(loader)
        if self._is_trained(loader, number):
            return
        self.trained[loader.name] = self._trained_of(loader) | 1 << number
        if is_new:
            self._epochs += number
            self._counts[loader.name] = number
            if loader.number is not None:
                self._forget(self._prepared.next_driver(loader.number, self._number))
        trained = {name: text_of(bits) for name, bits in self.trained.items()}
        self.session.remember(trained=trained, counts=self._counts)

    def _forget(self, last: int) -> None:
        """Of loaders for one epoch that are over, only the training ones stay known. Args: last: number of the newest of them."""
        for name, loader in list(self.loaders.items()):
            if not self._prepared.first <= (loader.number or 0) <= last or not loader.is_over:
                continue
            del self.loaders[name]
            self.session.drop_followed(name)
            loader.is_forgotten = True
            self.left_at.pop(name, None)
            self._counts.pop(name, None)
            if self.trained.pop(name, None):
                self._prepared.drivers |= 1 << (loader.number or 0)
        self._prepared.last = max(self._prepared.last, last)
        self.session.remember(left_at=self.left_at, prepared=self._prepared.plain)

    def _remember_at(self, at: list[Any]) -> None:
        if self._at != at:
            self._at = at
            self.session.remember(at=at)

    def before_batch(self, asked: StepLoader) -> None:
        """A loader is asked for a batch."""
        # Also between two steps within one batch of the outer loader.
        self._is_inner_asked = asked is not self.outer and self.outer is not None and self.session.is_step_done
        if asked is not self.outer or (self._has_boundary and not self.session.is_step_done):
            return  # within a step of the training loader: a resume goes on with its next batch
        self._has_boundary = True
        self.windows.note()
        self._numbers.note()
        self._remember_at([asked.name, asked.iterations, False, asked.is_at_end])
        # Of a loader for each epoch, the first one that is followed is in its only epoch for good.
        epochs = [loader.epoch for loader in self.loaders.values() if self.is_driver(loader)]
        self.session.boundary(open_batches=0, epoch=max(epochs) if len(epochs) > 1 else None)

    def _check_begun(self) -> None:
        self._kept_files.close()
        resumed = self.session.resumed
        if resumed and not self.is_begun and (not resumed.is_finished or self._epochs):
            raise CannotRestore(
                f"the script has ended before its place at step {resumed.step}: nothing was restored",
                "it has fewer epochs, its loaders are prepared in another order, or it ends early by what its lists or"
                " switches hold, which begin anew",
                next_step="let it train as in the sessions before, or begin a new run with `kgorch start PLAN --fresh`",
            )


_hooks: list[Any] = []
"""Those of the newest carrier."""


def _whole(at: list[Any] | None) -> list[Any] | None:
    """`at` of a checkpoint; earlier versions did not know whether the iteration had more batches."""
    return at and [*at, False][:4]


def _inner(item: Any) -> Any:
    """The optimizer inside Accelerate's; anything else as it is."""
    return getattr(item, "optimizer", item) if isinstance(item, torch.optim.Optimizer) else item


def _asking_generator() -> FrameType | None:
    """The generator of the script that iterates a loader now, unless a function does."""
    frame = next(iter(frames_of_script()), None)
    return frame if frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR else None
