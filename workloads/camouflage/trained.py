"""The weights that a stage has left: the averaged ones where it kept an average (--ema), else the network's own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kgorch.errors import CannotRestore
from kgorch.worker.checkpoint.stage_weights import Weights
from kgorch.workloads.common.trained import trained

if TYPE_CHECKING:
    from kgorch import Session


def weights_of(session: Session, stage: str, which: str | None = None, *, file: str | None = None) -> Weights:
    """By the names of the network. Rank 0 prints which they are.

    Args:
        which: "best" or "final" checkpoint; None as session.weights has it. file: a safetensors file instead of a stage.
    """
    if file:
        return trained(session, stage, file=file)
    with contextlib.suppress(CannotRestore):  # no such stage is said below
        found = session.weights(stage, "ema", which=which)
        for name in list(found):  # AveragedModel's: the network below `module`, and how many were averaged
            value = found.pop(name)
            if name.startswith("module."):
                found[name.removeprefix("module.")] = value
        if session.rank == 0:
            print(f"weights: {found.label}, averaged", flush=True)
        return found
    return trained(session, stage, which=which)
