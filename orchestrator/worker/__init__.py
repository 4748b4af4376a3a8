"""What a training script needs, few enough names to remember.

    from orchestrator.worker import attach

    with attach() as session:
        model = DistributedDataParallel(Net().to(session.device))
        optimizer = torch.optim.AdamW(model.parameters())
        session.track(model=model, optimizer=optimizer)
        loader = session.loader(dataset, global_batch=64)
        for batch in session.steps(loader, epochs=40):
            loss = session.backward(batch, lambda part: loss_of(model, part))
            optimizer.step(); optimizer.zero_grad()
            session.report(loss=loss)

Importing this is cheap; PyTorch is loaded by `attach`. Without kgorch around it, the same script runs alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.protocol.launch_spec import LAUNCH_VARIABLE, LaunchSpec

if TYPE_CHECKING:
    from orchestrator.worker.session import Session

__all__ = ["attach", "output_folder"]


def launch() -> LaunchSpec | None:
    """What kgorch told this process, or None when it runs alone."""
    path = os.environ.get(LAUNCH_VARIABLE)
    return LaunchSpec.read(path) if path else None


def attach(*, seed: int | None = None, deterministic: str | None = None) -> Session:
    """This process's part in the run: use it as a context manager around the whole training.

    Joins the ranks (or makes a group of one), chooses the device, and seeds every random generator with
    `seed + rank` (the plan's seed when None).

    Args:
        deterministic: "off", "warn" or "strict" (determinism.py); the plan's level when None, which is "off" when alone.
    """
    from orchestrator.worker.session import Session

    return Session(launch(), seed, deterministic)


def output_folder() -> Path:
    """The folder for what the run makes: it outlives the session and all stages share it. `outputs` when run alone."""
    told = launch()
    folder = Path(told.output if told else "outputs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
