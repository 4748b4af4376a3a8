"""The session of a training that a Trainer owns.

One training of a script is carried: the first one that a known Trainer begins, unless the script has attached itself. Its session
ends with that training, so that code after it always runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kgorch import worker
from kgorch.core.codes import EventKind
from kgorch.errors import KgorchError
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker import session_end
from kgorch.worker.session import Session
from kgorch.worker.telemetry import event_sender

_carried: list[dict[str, str]] = []
"""Of each training that was carried in this process, at most one: what its session has told of `exactness`. The session itself
would keep the model."""

SECOND = "a second training in the same script is not saved by kgorch and begins anew in each session: make it a stage of its own"

TESTED = {"lightning": 2, "pytorch_lightning": 2, "transformers": 5, "accelerate": 1}
"""The newest major version of each library that the tests run."""


def note_version(session: Session, library: str) -> None:
    """Have `exactness` say it where the library is newer than what was tested."""
    version = str(getattr(sys.modules.get(library), "__version__", ""))
    major, newest = version.partition(".")[0], TESTED[library]
    if major.isdecimal() and int(major) > newest:
        what = f"{library} {version} is newer than what kgorch was tested with ({newest}.x): a resume may not be exact"
        session.note_exactness(trainer=what)


def unknown_version(library: str) -> str:
    """What is said of a Trainer that cannot be adapted."""
    return f"{library} is of a version that kgorch does not know: its training is not saved by kgorch"


def report_unknown(library: str, error: Exception) -> None:
    """Say that a Trainer is not carried, and why."""
    print(f"kgorch: {unknown_version(library)} ({type(error).__name__}: {error})", file=sys.stderr, flush=True)


def require_all_ranks(session: Session, library: str, count: int, mend: str) -> None:
    """Raises: KgorchError where the library trains in each rank alone: of such trainings a checkpoint would hold a part each."""
    if count == session.world_size:
        return
    raise KgorchError(
        f"{library} trains with {count} process(es), and the stage has {session.world_size} ranks",
        "each rank would train a model of its own with all of the data, and write the same files",
        next_step=f"{mend}, or give the stage `ranks = {count}`",
    )


@contextlib.contextmanager
def carried_training(library: str) -> Iterator[Session | None]:
    """The session for a training that begins; it ends with the block, also of an error.

    None where the script runs alone, has attached itself, or has had a training carried before.
    """
    launch = worker.launch()
    if launch is None or session_end.is_open() or _carried:
        if launch is not None and not session_end.is_open():
            is_another(launch)
        yield None
        return
    _carried.append({})
    session = Session(launch, None, is_guest=True)
    note_version(session, library)
    try:
        yield session
    except BaseException as error:
        session_end.end(error)
        raise
    else:
        session.end()
    finally:
        _carried[0] |= session.exactness


def trainable(model: nn.Module) -> nn.Module:
    """The model, or its trained weights alone where some are frozen."""
    from kgorch.worker.checkpoint.trainable_weights import TrainableWeights

    return TrainableWeights(model) if any(not weight.requires_grad for weight in model.parameters()) else model


def further_weights(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> nn.ParameterList | None:
    """What the optimizers train beside the modules, as the weights of a loss; None for nothing."""
    known = {id(weight) for module in modules for weight in module.parameters()}
    trained = (weight for item in optimizers for group in item.param_groups for weight in group["params"])
    further = {id(weight): weight for weight in trained if id(weight) not in known}
    return nn.ParameterList(further.values()) if further else None


def is_another(launch: LaunchSpec) -> bool:
    """Whether a training of this script was carried before what begins now, which is then told once."""
    if _carried and "training" not in _carried[0]:
        _carried[0]["training"] = SECOND
        print(f"kgorch: {SECOND}", file=sys.stderr, flush=True)
        if os.environ.get("RANK", "0") == "0":
            event_sender.send_late(launch, EventKind.EXACTNESS, _carried[0])
    return bool(_carried)


def figures(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a Trainer's logs that are metrics: numbers, and tensors of one element."""
    return {
        name: value
        for name, value in logged.items()
        if (isinstance(value, int | float) and type(value) is not bool and math.isfinite(value))
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def stays_in(value: Any, *folders: str | os.PathLike[str] | None) -> bool:
    """Whether each path in a saved state, by keys and values, lies in one of the folders, links resolved.

    A Trainer deletes and loads files by the paths in its callbacks' states, and a checkpoint may come from a stranger.
    """
    if isinstance(value, dict):
        return all(stays_in(item, *folders) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return all(stays_in(item, *folders) for item in value)
    if not isinstance(value, str) or not (os.sep in value or value.startswith(("..", "~"))):
        return True
    path, roots = os.path.realpath(value), [os.path.realpath(folder) for folder in folders if folder]
    if "://" in value:
        return False
    if any(path == root or path.startswith(root.rstrip(os.sep) + os.sep) for root in roots):
        return True
    first, *others = Path(value).parts
    # else a text with a slash whose beginning names nothing here, as a sentence of EarlyStopping about "val/acc"
    return not first.startswith((os.sep, "~")) and ".." not in (first, *others) and not os.path.lexists(first)
