"""The SDK inside a training process: the few names that a training script needs.

    from kgorch import attach

    with attach() as session:
        model = DistributedDataParallel(Net().to(session.device))
        optimizer = torch.optim.AdamW(model.parameters())
        session.track(model=model, optimizer=optimizer)
        loader = session.loader(dataset, global_batch=64)
        for batch in session.steps(loader, epochs=40):
            loss = session.backward(batch, lambda part: loss_of(model, part))
            optimizer.step(); optimizer.zero_grad()
            session.report(loss=loss)

Importing it is cheap: `attach` loads PyTorch. Without kgorch around it, the same script runs alone. May import: the protocol
with the supervisor, manifest and shard files, and of kgorch.core the memory ladder, the health policy, metric records
and retention.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kgorch.errors import KgorchError
from kgorch.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec

if TYPE_CHECKING:
    from kgorch.worker.session import Session

__all__ = ["attach", "output_folder"]


def launch() -> LaunchSpec | None:
    """The launch file of this attempt; None when the script runs alone."""
    path = os.environ.get(LAUNCH_VARIABLE)
    return LaunchSpec.read(path) if path else None


def attach(*, seed: int | None = None, deterministic: str | None = None) -> Session:
    """Join this process to the run: use the result as a context manager around the whole training.

    Joins the process group (or makes a group of one), chooses the device, and seeds every random generator with `seed + rank`.

    Args:
        seed: the plan's seed when None.
        deterministic: "off", "warn" or "strict" (determinism.py); the plan's level when None, which is "off" for a script that
            runs alone.

    Raises:
        KgorchError: no such level; the script has started this process itself; this PyTorch cannot use the GPU that the driver
            shows; or the stage is a foreign one, whose launch is the agent's (worker/foreign/agent.py).
        CudaUnusable: CUDA cannot be initialised, which another attempt may be able to do.
    """
    spec = launch()
    if spec is not None and spec.foreign is not None:
        raise KgorchError(
            f"the program of stage {spec.stage!r} calls kgorch.attach(), and the stage has [stage.foreign], which is for programs"
            " that save by themselves",
            next_step="take [stage.foreign] out of the plan: kgorch then saves what session.track() names",
            error_code="KG407",
        )
    from kgorch.worker.session import Session

    return Session(spec, seed, deterministic)


def output_folder() -> Path:
    """The folder for results: it outlives the session, and all stages share it. `outputs` when the script runs alone."""
    spec = launch()
    folder = Path(spec.output if spec else "outputs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
