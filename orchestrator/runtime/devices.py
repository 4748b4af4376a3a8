"""Which accelerators a new attempt would see, and what of their memory is taken. PyTorch is not asked: the supervisor
never loads it. A driver that does not answer is waited for no longer than gpus.HANG_S."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from orchestrator.errors import KgorchError
from orchestrator.runtime import gpus

GONE_S, SLACK_BYTES = 30.0, 256 << 20
"""How long the driver may take to give back what ended processes held; other processes' memory comes and goes, too."""


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that CUDA would see: those of CUDA_VISIBLE_DEVICES, else all that the driver knows; 0 without a driver.

    Raises: DriverSilent.
    """
    told = _told(environ)
    return len(told) if told is not None else gpus.asked(_count) or 0


def see_that_there_are(wanted: int | None) -> None:
    """Raises: KgorchError where fewer GPUs are visible than the plan needs; DriverSilent."""
    if wanted and (count := visible_gpus()) < wanted:
        raise KgorchError(
            f"the plan needs {wanted} GPU{'s' if wanted > 1 else ''} (session.gpus), and {count or 'none'} can be seen",
            next_step="switch the accelerator on, see what nvidia-smi says; or take session.gpus out of the plan",
        )


def ranks_for(wanted: int | str, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of a stage: as the plan says, or one a visible GPU (one in all without)."""
    return wanted if isinstance(wanted, int) else max(1, visible_gpus(environ))


def name(environ: Mapping[str, str] = os.environ) -> str:
    """The visible GPUs' model, as "Tesla T4" (several, if they differ); "cpu" without, "unknown" while the driver is silent."""

    def ask() -> set[str]:
        with gpus.opened() as nvml:
            return {_text(nvml.nvmlDeviceGetName(gpu)) for gpu in _handles(nvml, environ)}

    try:
        return ", ".join(sorted(gpus.asked(ask) or ()))[:128] or "cpu"
    except gpus.DriverSilent:
        return "unknown"


def memory_used(environ: Mapping[str, str] = os.environ) -> list[int] | None:
    """Bytes in use on each visible GPU, whoever uses them; None when that cannot be told."""
    found: list[int] | None = None

    def ask() -> list[int]:
        with gpus.opened() as nvml:
            return [int(nvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in _handles(nvml, environ)]

    with contextlib.suppress(gpus.DriverSilent):
        found = gpus.asked(ask)
    return found


def gpu_of_rank(ranks: int, environ: Mapping[str, str] = os.environ) -> list[int | None]:
    """The driver's number of each rank's GPU; None where CUDA_VISIBLE_DEVICES names it otherwise, or names none."""
    told = _told(environ)
    numbers = (
        list[int | None](range(ranks)) if told is None else [int(item) if item.isdigit() else None for item in told]
    )
    return (numbers + [None] * ranks)[:ranks]


class Memory:
    """What was taken on the GPUs before the session's first attempt: that much may be taken before the next one."""

    def __init__(self) -> None:
        self._before: list[int] | None = None

    def wait_until_gone(self, patience_s: float = GONE_S) -> str:
        """Until what ended processes held is free again; what is not, in words, when it takes too long."""
        until = time.monotonic() + patience_s
        while (used := memory_used()) is not None:
            if self._before is None or len(self._before) != len(used):
                self._before = used
            over = [now - before for now, before in zip(used, self._before, strict=True)]
            if max(over, default=0) <= SLACK_BYTES:
                break
            if time.monotonic() > until:
                held = ", ".join(f"GPU {gpu}: {more >> 20} MiB" for gpu, more in enumerate(over) if more > SLACK_BYTES)
                return f"more is in use than before the first attempt: {held}"
            time.sleep(0.2)
        return ""


def _count() -> int:
    with gpus.opened() as nvml:
        return int(nvml.nvmlDeviceGetCount())


def _told(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; None without it."""
    told = environ.get("CUDA_VISIBLE_DEVICES")
    items = [item.strip() for item in (told or "").split(",")]
    return None if told is None else [item for item in items if item and not item.startswith("-")]


def _handles(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    told = _told(environ)
    if told is None:
        told = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(item)) if item.isdigit() else nvml.nvmlDeviceGetHandleByUUID(item)
        for item in told
    ]


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
