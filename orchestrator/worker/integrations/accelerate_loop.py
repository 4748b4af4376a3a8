"""Loops that the script writes itself around Hugging Face's Accelerator: what is changed in Accelerate for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kgorch import worker
from kgorch.worker import session_end
from kgorch.worker.integrations.accelerate_carrier import AccelerateCarrier
from kgorch.worker.session import Session


def adapt(module: ModuleType) -> None:
    """Adapt `accelerate.accelerator`."""
    cls: Any = module.Accelerator
    cls.prepare = _tracked(cls.prepare)


def _tracked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        items = prepared if isinstance(prepared, tuple) else (prepared,)
        carried = _carrier_of(self, items)
        if carried is None:
            return prepared
        is_later = carried.is_begun or carried.outer is not None
        items = carried.add_later(items) if is_later else tuple(carried.add(item) for item in items)
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
