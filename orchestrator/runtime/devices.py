"""Which accelerators a new attempt would see. PyTorch is not asked: the supervisor never loads it."""

from __future__ import annotations

import os
from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that CUDA would see: those of CUDA_VISIBLE_DEVICES, else all that the driver knows; 0 without a driver."""
    told = environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return len([item for item in told.split(",") if item.strip() and not item.strip().startswith("-")])
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, or one that does not answer as NVML promises: then there is none to use
        return 0


def ranks_for(wanted: int | str, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of a stage: as the plan says, or one a visible GPU (one in all without)."""
    return wanted if isinstance(wanted, int) else max(1, visible_gpus(environ))
