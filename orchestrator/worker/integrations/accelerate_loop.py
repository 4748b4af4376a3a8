"""Loops that the script writes itself around Hugging Face's Accelerator: what is changed in Accelerate for them."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kgorch import worker
from kgorch.worker import session_end
from kgorch.worker.integrations import carrier
from kgorch.worker.integrations.accelerate_carrier import AccelerateCarrier
from kgorch.worker.integrations.accelerate_loader import StepLoader
from kgorch.worker.session import Session

PREPARES = ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer", "prepare_scheduler")
"""Methods of an Accelerator that give what is carried. The first one calls the others."""

WRITES = ("save", "save_state", "save_model", "log")
"""Methods of an Accelerator whose results stay: nothing is written again, with other weights, in epochs that are done."""

SKIPPING = ("accelerate", "accelerate.accelerator", "accelerate.data_loader")
"""Modules with a `skip_first_batches`."""

ASIDE = ".kgorch-aside"
"""Folder beside `checkpoints` of a project, for what an attempt has written that was lost."""


def adapt(module: ModuleType) -> None:
    """Adapt `accelerate.accelerator`."""
    cls: Any = module.Accelerator
    for name in PREPARES:
        setattr(cls, name, _tracked(getattr(cls, name)))
    cls.save_state = _numbered(cls.save_state)
    cls.log = _reported(cls.log)
    for name in WRITES:
        setattr(cls, name, _silent(getattr(cls, name)))
    cls.load_state = _silent(cls.load_state, where="has_started")  # before it, it tells where the script begins
    cls.free_memory = _noted(cls.free_memory)
    skipping = _skipping(module.skip_first_batches)
    for name in SKIPPING:  # each of them holds the function by itself
        if hasattr(sys.modules.get(name), "skip_first_batches"):
            vars(sys.modules[name])["skip_first_batches"] = skipping


def _tracked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_kgorch_prepares", False):
            return original(self, *args, **kwargs)
        carried: AccelerateCarrier | None = getattr(self, "_kgorch", None)
        if carried is not None and carried.is_freed and any(isinstance(item, torch.optim.Optimizer) for item in args):
            carried.start_over()
        self._kgorch_prepares = True
        try:
            prepared = original(self, *args, **kwargs)
        finally:
            self._kgorch_prepares = False
        items = prepared if isinstance(prepared, tuple) else (prepared,)
        carried = _carrier_of(self, items)
        if carried is None:
            return prepared
        items = carried.add_prepared(items)
        return items if isinstance(prepared, tuple) else items[0]

    return prepare


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def free_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (carried := getattr(self, "_kgorch", None)) is not None:
            carried.is_freed = True
        return original(self, *args, **kwargs)

    return free_memory


def _skipping(original: Callable[..., Any]) -> Callable[..., Any]:
    """`skip_first_batches`, which knows Accelerate's own loaders alone: what it makes of one that is followed is followed, too."""

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        loader = getattr(type(dataloader), "followed", dataloader)
        if not isinstance(loader, StepLoader):
            return original(dataloader, num_batches)
        skipped = original(loader.inner, num_batches)
        return loader.carrier.add_prepared((skipped,))[0] if session_end.is_open() else skipped

    return skip_first_batches


def _silent(original: Callable[..., Any], where: str = "is_replaying") -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        carried: AccelerateCarrier | None = getattr(self, "_kgorch", None)
        is_silent = carried is not None and carried.is_replaying and getattr(carried, where)
        return None if is_silent else original(self, *args, **kwargs)

    return method


def _numbered(original: Callable[..., Any]) -> Callable[..., Any]:
    """`save_state`, which may number its folders: the numbers go on, and a step that is done again saves it again."""

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        carried: AccelerateCarrier | None = getattr(self, "_kgorch", None)
        if carried is None or not carried.is_begun or not session_end.is_open():
            return original(self, *args, **kwargs)
        if self.project_configuration.automatic_checkpoint_naming and carried.session.resumed:
            _put_aside(self, f"checkpoint_{self.save_iteration}")
        saved = original(self, *args, **kwargs)
        carried.session.remember(saves=self.save_iteration)
        return saved

    return save_state


def _reported(original: Callable[..., Any]) -> Callable[..., Any]:
    """`log`, whose figures are the session's metrics, too. Those of rank 0 count, whichever ranks call it."""

    @functools.wraps(original)
    def log(self: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        logged = original(self, values, *args, **kwargs)
        carried: AccelerateCarrier | None = getattr(self, "_kgorch", None)
        if carried is not None and session_end.is_open() and isinstance(values, Mapping):
            named = {name: value for name, value in values.items() if isinstance(name, str)}
            carried.session.report(**carrier.figures(named))
        return logged

    return log


def _put_aside(accelerator: Any, name: str) -> None:
    """Move a folder of a project out of the way, and delete what was put there before."""
    folder, aside = (Path(accelerator.project_dir, parent, name) for parent in ("checkpoints", ASIDE))
    if accelerator.is_main_process and folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        folder.rename(aside)
    accelerator.wait_for_everyone()


def _carrier_of(accelerator: Any, items: tuple[Any, ...]) -> AccelerateCarrier | None:
    """The carrier of this script. One begins with the first optimizer, if the script has no session yet."""
    known: AccelerateCarrier | None = getattr(accelerator, "_kgorch", None)
    if known is not None:
        return known if session_end.is_open() else None
    launch = worker.launch()
    has_optimizer = any(isinstance(item, torch.optim.Optimizer) for item in items)
    if launch is None or session_end.is_open() or not has_optimizer or carrier.is_another(launch):
        return None
    accelerator._kgorch = carried = AccelerateCarrier(accelerator, Session(launch, None, is_guest=True))
    carried.follow_earlier(items)
    return carried
