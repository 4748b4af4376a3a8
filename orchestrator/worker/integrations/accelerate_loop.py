"""Loops that the script writes itself around Hugging Face's Accelerator.

What `accelerator.prepare` has returned is tracked, and its loaders are followed. A step begins where the training loader is asked
for a batch after an optimizer has stepped. The script begins with its first epoch also where the run continues: then the
training loader is empty for the epochs that are done, the other loaders give one batch, and the state is restored before the
first batch that is left. Where the training is over, the state is restored before the first batch of any loader, and the training
loader stays empty. So what the script computes in those epochs does not count, and neither does what it keeps in plain
variables.
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
from kgorch.worker.integrations import carrier
from kgorch.worker.session import Session
from kgorch.worker.wrappers import unwrapped

NOTE = "Accelerate: plain variables of the script begin anew in each session"

NO_LADDER = "no memory ladder: the script does forward and backward itself"


def adapt(module: ModuleType) -> None:
    """Adapt `accelerate.accelerator`."""
    cls: Any = module.Accelerator
    cls.prepare = _tracked(cls.prepare)


class AccelerateCarrier:
    """What carries one script.

    Attributes:
        driver: name of the training loader; None until an optimizer has stepped.
    """

    def __init__(self, accelerator: Any, session: Session) -> None:
        self._accelerator, self.session = accelerator, session
        self.things: dict[str, Any] = {}
        self.driver: str | None = session.resumed.get("driver")
        self.is_begun = self._has_boundary = False
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
            loader = StepLoader(item, self, name)
            self.loaders.append(loader)
            self.session.add_followed(loader, name)
            return loader
        kinds = {nn.Module: "model", torch.optim.Optimizer: "optimizer"}
        word = next((word for cls, word in kinds.items() if isinstance(item, cls)), "other")
        if hasattr(item, "state_dict"):
            number = sum(name.startswith(word) for name in self.things)
            self.things[f"{word}{number}"] = _inner(item)
        return item

    def begin(self) -> None:
        """Restore the state, before the first batch of this session."""
        self.is_begun = True
        accelerator, known = self._accelerator, [unwrapped(item) for item in self.things.values()]
        for item in (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers):
            if not any(unwrapped(_inner(item)) is one for one in known):
                self.add(item)  # prepared before the first optimizer
        things = {
            name: carrier.trainable(item) if name.startswith("model") else item for name, item in self.things.items()
        }
        custom = {f"custom{number}": item for number, item in enumerate(self._accelerator._custom_objects)}
        scaler = getattr(self._accelerator, "scaler", None)
        self.session.track(**things, **custom, **({"scaler": scaler} if scaler is not None else {}))

    def before_batch(self, name: str) -> None:
        """A loader is asked for a batch."""
        if self.session.resumed.is_finished:  # an evaluation after the training
            return
        if self._has_boundary and not self.session.is_step_done:
            return
        if self._has_boundary and self.driver is None:
            # Not the one that is asked: that may be an evaluation within the epoch. Of two that are read together, it is the first.
            giving = (loader.name for loader in self.iterated if loader.has_given)
            self.driver = next(giving, name)
            self.session.remember(driver=self.driver)
        if name != self.driver and any(loader.name == self.driver for loader in self.iterated):
            return  # within a step of the training loader: a resume goes on with its next batch
        self._has_boundary = True
        self.session.boundary(open_batches=0)


class StepLoader(FollowedLoader):
    """A loader that `prepare` has returned.

    Attributes:
        name: in the checkpoint.
    """

    def __init__(self, loader: Iterable[Any], carried: AccelerateCarrier, name: str) -> None:
        super().__init__(loader, carried.session.world_size, carried.session.device)
        self._carrier, self.name = carried, name
        self._iterations = 0

    def before_batch(self) -> None:
        self._carrier.before_batch(self.name)

    @property
    def has_given(self) -> bool:
        """The running iteration has given a batch."""
        return self._given > 0

    def __iter__(self) -> Iterator[Any]:
        carried = self._carrier
        if carried.session.resumed.is_finished:
            if not carried.is_begun:
                carried.begin()
            return iter(()) if self.name == carried.driver else iter(self._loader)
        if not carried.is_begun and carried.driver is not None:
            if self.name != carried.driver:
                return itertools.islice(iter(self._loader), 1)
            self._iterations += 1
            if self._iterations <= self.saved_epoch(carried.session):
                return iter(())
        if not carried.is_begun:
            carried.begin()
        return self._registered(super().__iter__())

    def _registered(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; the carrier knows how long they are iterated."""
        self._carrier.iterated.append(self)
        try:
            yield from batches
        finally:
            self._carrier.iterated.remove(self)

    def saved_epoch(self, session: Session) -> int:
        """Epochs of this loader that earlier sessions have done."""
        return session.resumed.epoch_of(self.name)


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
        items = tuple(carried.add(item) for item in items)
        return items if isinstance(prepared, tuple) else items[0]

    return prepare


def _carrier_of(accelerator: Any, items: tuple[Any, ...]) -> AccelerateCarrier | None:
    """The carrier of this script. One begins with the first optimizer, if the script has no session yet."""
    known: AccelerateCarrier | None = getattr(accelerator, "_kgorch", None)
    if known is not None:
        return known if not known.is_begun else None
    launch = worker.launch()
    has_optimizer = any(isinstance(item, torch.optim.Optimizer) for item in items)
    if launch is None or session_end.is_open() or not has_optimizer:
        return None
    accelerator._kgorch = carried = AccelerateCarrier(accelerator, Session(launch, None, is_guest=True))
    carried.follow_earlier(items)
    return carried
