"""Adapts a Trainer when the script imports it: kgorch imports no such library by itself, and changes none on disk."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

MODULES = {
    "lightning.pytorch.trainer.trainer": "kgorch.worker.integrations.lightning_trainer",
    "pytorch_lightning.trainer.trainer": "kgorch.worker.integrations.lightning_trainer",
    "lightning.fabric.fabric": "kgorch.worker.integrations.fabric",
    "lightning_fabric.fabric": "kgorch.worker.integrations.fabric",
    "transformers.trainer": "kgorch.worker.integrations.transformers_trainer",
    "accelerate.accelerator": "kgorch.worker.integrations.accelerate_loop",
}
"""Module that defines the Trainer → module of ours whose `adapt(module)` adapts it."""


def install() -> None:
    """Adapt the known Trainers when they are imported from now on, and those that are imported already."""
    sys.meta_path.insert(0, _Finder())
    for name in MODULES.keys() & sys.modules.keys():
        _adapt(sys.modules[name])


def _adapt(module: ModuleType) -> None:
    """An integration that fails on a version that it does not know must not end the script, which runs without it."""
    try:
        adapt: Callable[[ModuleType], None] = import_module(MODULES[module.__name__]).adapt
        adapt(module)
    except Exception as error:
        from kgorch.worker.integrations import carrier

        carrier.report_unknown(module.__name__, error)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the module, and adapts it after it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _AdaptingLoader(spec.loader)
                return spec
        return None


class _AdaptingLoader(importlib.abc.Loader):
    """The module's own loader, and what follows."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _adapt(module)
