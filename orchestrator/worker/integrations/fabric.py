"""Lightning's Fabric, whose loops are the script's own: they are not carried, and the user is told at the first step."""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from kgorch import worker
from kgorch.core.codes import EventKind
from kgorch.worker import session_end
from kgorch.worker.telemetry import event_sender

NOT_CARRIED = (
    "a loop of Lightning's Fabric is not carried: nothing of it is saved. Add `kgorch.attach()` and the loop's boundary to it"
    " (docs/your-training.md, level 2), or describe its own checkpoints in [stage.foreign] (level 3)"
)


def adapt(module: ModuleType) -> None:
    """Adapt `lightning.fabric.fabric`, or the module of the same name in `lightning_fabric`."""
    cls: Any = module.Fabric
    original, told = cls.backward, list[bool]()

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        if not told:
            told.append(True)
            _tell()
        original(self, *args, **kwargs)

    cls.backward = backward


def _tell() -> None:
    launch = worker.launch()
    if launch is None or session_end.is_open() or os.environ.get("RANK", "0") != "0":
        return
    print(f"kgorch: {NOT_CARRIED}", file=sys.stderr, flush=True)
    event_sender.send_late(launch, EventKind.EXACTNESS, {"loop": NOT_CARRIED})
