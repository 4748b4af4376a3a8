"""kgorch: one training run that lives through many short GPU sessions.

    from kgorch import attach

This folder is the package `kgorch`: the link `kgorch` at the root of a checkout leads here, and the links `db` and `workloads` lead
from here to the folders `kgorch.db` and `kgorch.workloads`. A wheel contains them as folders.

The names in `__all__` are what a training script needs, and the verbs for a program or a notebook (api.py). Each is imported when
it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

# a second copy of a module has classes of its own: an `except KgorchError` of one copy does not catch the other's
if __name__ != "kgorch":
    raise ImportError(f"{__name__!r} is the folder of the package 'kgorch': from kgorch import attach", name=__name__)

if TYPE_CHECKING:
    from kgorch.api import RunStatus, history, metrics, resume, runs, save, start, status, stop
    from kgorch.errors import KgorchError
    from kgorch.worker import attach, output_folder
    from kgorch.worker.checkpoint.trainable_weights import trainable
    from kgorch.worker.data.keyed_loader import Loader
    from kgorch.worker.session import Session
else:
    # Lazily: the command line, the shim and the ranks import kgorch, too, and would load the worker, and PyTorch for Session. Not
    # shown to mypy, which would take every name for an existing one.
    _MODULES = {
        "KgorchError": "kgorch.errors",
        "Loader": "kgorch.worker.data.keyed_loader",
        "Session": "kgorch.worker.session",
        "attach": "kgorch.worker",
        "output_folder": "kgorch.worker",
        **dict.fromkeys(
            ("RunStatus", "history", "metrics", "resume", "runs", "save", "start", "status", "stop"), "kgorch.api"
        ),
        "trainable": "kgorch.worker.checkpoint.trainable_weights",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


__all__ = [
    "KgorchError",
    "Loader",
    "RunStatus",
    "Session",
    "attach",
    "history",
    "metrics",
    "output_folder",
    "resume",
    "runs",
    "save",
    "start",
    "status",
    "stop",
    "trainable",
]
