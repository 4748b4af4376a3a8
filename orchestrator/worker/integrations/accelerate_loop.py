"""Loops that the script writes itself around Hugging Face's Accelerator.

What `accelerator.prepare` has returned is tracked, and its loaders are followed. A step begins where the training loader is asked
for a batch after an optimizer has stepped. The script begins with its first epoch also where the run continues: then the
training loader is empty for the epochs that are done, the other loaders give one batch, and the state is restored before the
first batch that is left. Where the training is over, the state is restored before the first batch of any loader, and the training
loader stays empty. So what the script computes in those epochs does not count, and neither does what it keeps in plain
variables.

A script may prepare a loader anew for each epoch: then each of them is a training loader, with the epochs that it has given itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from kgorch import worker
from kgorch.worker import session_end
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward
from kgorch.worker.integrations import carrier
from kgorch.worker.session import Session
from kgorch.worker.wrappers import unwrapped

NOTE = "Accelerate: plain variables of the script begin anew in each session"

SECOND_TRAINING = (
    "what was prepared after the first step, with a model or optimizer, is a second training and not saved"
)

NO_LADDER = "no memory ladder: the script does forward and backward itself"


def adapt(module: ModuleType) -> None:
    """Adapt `accelerate.accelerator`."""
    cls: Any = module.Accelerator
    cls.prepare = _tracked(cls.prepare)


class AccelerateCarrier:
    """What carries one script.

    Attributes:
        drivers: names of the training loaders; empty until an optimizer has stepped. The last one is the newest.
    """

    def __init__(self, accelerator: Any, session: Session) -> None:
        self._accelerator, self.session = accelerator, session
        self.things: dict[str, Any] = {}
        resumed = session.resumed
        # Earlier versions knew one.
        self.drivers: list[str] = resumed.get("drivers", [resumed["driver"]] if "driver" in resumed else [])
        self.asked: str | None = resumed.get("asked")  # the loader before whose batch the newest step has begun
        self.left_at: dict[str, int] = resumed.get("left_at", {})
        """Batch at which the script has left each epoch of a loader; 0 where it was not the same one."""
        self.is_begun = self._has_boundary = self._is_second = False
        self.loaders: list[StepLoader] = []
        self.iterated: list[StepLoader] = []  # in the order in which these iterations began
        session.note_exactness(loop=NOTE, memory=NO_LADDER)
        carrier.note_version(session, "accelerate")

    def follow_earlier(self, items: tuple[Any, ...]) -> None:
        """Follow the loaders that the script has from earlier calls of `prepare`. `items`: what the newest call gives it."""
        for number, loader in enumerate(self._accelerator._dataloaders):
            if not any(loader is item for item in items):
                name = f"earlier{number}"
                self.session.add_followed(_follow_in_place(loader, self, name), name)

    def add(self, item: Any) -> Any:
        """What `prepare` has returned; a loader comes back as one that is followed."""
        if isinstance(item, DataLoader):
            name = f"loader{len(self.loaders)}"
            loader = StepLoader(
                item, self, name, sum(one.iterations for one in self.loaders if one.name in self.drivers)
            )
            self.loaders.append(loader)
            self.session.add_followed(loader, name)
            return loader
        if isinstance(item, StepLoader) or self._is_known(item):  # prepared before
            return item
        kinds = {nn.Module: "model", torch.optim.Optimizer: "optimizer"}
        word = next((word for cls, word in kinds.items() if isinstance(item, cls)), "other")
        if hasattr(item, "state_dict"):
            number = sum(name.startswith(word) for name in self.things)
            self.things[f"{word}{number}"] = _inner(item)
        return item

    def add_later(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """`add` for a call after the first step: only the loaders of the same training are followed."""
        trained = [item for item in items if isinstance(item, nn.Module | torch.optim.Optimizer)]
        if not all(self._is_known(item) for item in trained):
            self._is_second = True
            self.session.note_exactness(training=SECOND_TRAINING)
        if self._is_second:
            return items
        return tuple(self.add(item) if isinstance(item, DataLoader) else item for item in items)

    def begin(self) -> None:
        """Restore the state, before the first batch of this session."""
        self.is_begun, accelerator = True, self._accelerator
        for item in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
            self.add(item)  # where it was prepared before the first optimizer
        things = {
            name: carrier.trainable(item) if name.startswith("model") else item for name, item in self.things.items()
        }
        custom = {f"custom{number}": item for number, item in enumerate(self._accelerator._custom_objects)}
        scaler = getattr(self._accelerator, "scaler", None)
        self.session.track(**things, **custom, **({"scaler": scaler} if scaler is not None else {}))

    def note_left(self, loader: StepLoader, batch: int) -> None:
        """The script has left an epoch of the loader at this batch; 0 where it has read all of it."""
        known = self.left_at.get(loader.name)
        batch = batch if known in (None, batch) else 0
        if batch != known:
            self.left_at[loader.name] = batch
            self.session.remember(left_at=self.left_at)

    def _is_known(self, item: Any) -> bool:
        return any(unwrapped(_inner(item)) is unwrapped(one) for one in self.things.values())

    def before_batch(self, asked: StepLoader) -> None:
        """A loader is asked for a batch."""
        if self.session.resumed.is_finished:  # an evaluation after the training
            return
        if self._has_boundary and not self.session.is_step_done:
            return
        drivers = [loader for loader in self.iterated if loader.name in self.drivers]
        if self._has_boundary and not drivers:
            # Not the one that is asked: that may be an evaluation within the epoch. Of two that are read together, it is the first.
            giving = [asked] if self.drivers else [*self.iterated, asked]
            if drivers := [loader for loader in giving if loader.has_given][:1]:
                self.drivers.append(drivers[0].name)
            elif not self.drivers:
                self.drivers.append(asked.name)
            self.session.remember(drivers=self.drivers)
        if drivers and asked is not drivers[0]:
            return  # within a step of the training loader: a resume goes on with its next batch
        self._has_boundary = True
        if self.asked != asked.name:
            self.asked = asked.name
            self.session.remember(asked=asked.name)
        # Of a loader for each epoch, the first one that is followed is in its only epoch for good.
        epochs = [loader.epoch for loader in self.loaders if loader.name in self.drivers]
        self.session.boundary(open_batches=0, epoch=max(epochs) if len(epochs) > 1 else None)


class StepLoader(FollowedLoader):
    """A loader that `prepare` has returned.

    Args:
        first_epoch: number of its first epoch; that of the training for a loader that is prepared anew for each epoch.

    Attributes:
        name: in the checkpoint.
        iterations: how often the script has iterated it.
    """

    def __init__(self, loader: Iterable[Any], carried: AccelerateCarrier, name: str, first_epoch: int = 0) -> None:
        super().__init__(loader, carried.session.world_size, carried.session.device)
        self._carrier, self.name, self._first_epoch = carried, name, first_epoch
        self.iterations = 0
        self.start_at(first_epoch, 0)

    def before_batch(self) -> None:
        self._carrier.before_batch(self)

    @property
    def has_given(self) -> bool:
        """The running iteration has given a batch."""
        return self._given > 0

    def __iter__(self) -> Iterator[Any]:
        carried = self._carrier
        is_driver = self.name in carried.drivers
        if carried.session.resumed.is_finished:
            if not carried.is_begun:
                carried.begin()
            return iter(()) if is_driver else iter(self._loader)
        self.iterations += 1
        is_done = self.iterations <= self._saved_epochs
        if is_driver and is_done:
            return iter(())
        if carried.drivers and not carried.is_begun and (is_done or not (is_driver or self.name == carried.asked)):
            return itertools.islice(iter(self._loader), 1)
        if not carried.is_begun:
            carried.begin()
        return self._registered(super().__iter__())

    def _registered(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the carrier knows how long they are iterated, and where the script leaves them."""
        self._carrier.iterated.append(self)
        running, is_whole = None, not self.next_batch
        try:
            for batch in itertools.islice(batches, self._rest()):
                running = self.running
                yield batch
        except GeneratorExit:
            self._leave(running, is_whole=is_whole)
            raise
        else:
            self._leave(running, is_whole=is_whole)
        finally:
            self._carrier.iterated.remove(self)

    def _rest(self) -> int | None:
        """Batches of an epoch that continues, where the script has left every epoch before it at one batch; None for all.

        The script may count them in a variable of its own, which begins anew.
        """
        if self._saved is None or self._ranks_before != self._world:
            return None
        left_at = self._carrier.left_at.get(self.name, 0)
        return left_at - self.next_batch if 0 < self.next_batch < left_at else None

    def _leave(self, running: LoaderFastForward | None, *, is_whole: bool) -> None:
        """The epoch is over. A loop that leaves it before its end goes on with the next one, also after a resume.

        Args:
            is_whole: it was no rest of one, where a count of the script's own begins anew.
        """
        batch = 0
        if running is not None and running is self.running and not running.is_over:
            batch = running.batches_used + running.back
            self._end()
        if is_whole:
            self._carrier.note_left(self, batch)

    @property
    def _saved_epochs(self) -> int:
        """Epochs of this loader that earlier sessions have done."""
        return self._carrier.session.resumed.epoch_of(self.name) - self._first_epoch


def _inner(item: Any) -> Any:
    """The optimizer inside Accelerate's; anything else as it is."""
    return getattr(item, "optimizer", item) if isinstance(item, torch.optim.Optimizer) else item


def _follow_in_place(loader: Any, carried: AccelerateCarrier, name: str) -> StepLoader:
    """Follow a loader that the script iterates itself: its class becomes one whose `__iter__` is that of the StepLoader."""
    cls = type(loader)
    original = object.__new__(cls)
    original.__dict__ = loader.__dict__  # the same attributes: `set_epoch` of one is that of both
    followed = StepLoader(original, carried, name)
    # Accelerate's loaders have a property `__class__`, which cannot be assigned.
    vars(object)["__class__"].__set__(loader, type(cls.__name__, (cls,), {"__iter__": lambda _: iter(followed)}))
    return followed


def _tracked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        items = prepared if isinstance(prepared, tuple) else (prepared,)
        carried = _carrier_of(self, items)
        if carried is None:
            return prepared
        items = carried.add_later(items) if carried.is_begun else tuple(carried.add(item) for item in items)
        return items if isinstance(prepared, tuple) else items[0]

    return prepare


def _carrier_of(accelerator: Any, items: tuple[Any, ...]) -> AccelerateCarrier | None:
    """The carrier of this script. One begins with the first optimizer, if the script has no session yet."""
    known: AccelerateCarrier | None = getattr(accelerator, "_kgorch", None)
    if known is not None:
        return known if session_end.is_open() else None
    launch = worker.launch()
    has_optimizer = any(isinstance(item, torch.optim.Optimizer) for item in items)
    if launch is None or session_end.is_open() or not has_optimizer:
        return None
    accelerator._kgorch = carried = AccelerateCarrier(accelerator, Session(launch, None, is_guest=True))
    carried.follow_earlier(items)
    return carried
