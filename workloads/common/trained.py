"""The weights that a prediction is made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from safetensors.torch import load_file
from torch import Tensor

from kgorch.worker.checkpoint.stage_weights import Weights

if TYPE_CHECKING:
    from kgorch import Session


def trained(
    session: Session, stage: str, *, file: str | None = None, which: str | None = None,
    read: Callable[[str], Mapping[str, Tensor]] = load_file,
) -> Weights:  # fmt: skip
    """Those of the stage's best checkpoint where the plan keeps one, else its last ones; or of a `file` that `read` understands.

    Rank 0 prints which they are; `.facts` says the same in what is predicted. `which`: as session.weights has it.
    """
    found = Weights(read(file), file, "file") if file else session.weights(stage, which=which)
    if session.rank == 0:
        print(f"weights: {found.label}", flush=True)
    return found
