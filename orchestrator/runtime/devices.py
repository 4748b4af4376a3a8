"""Which accelerators a new attempt would see, and what of their memory is taken. PyTorch is not asked: the supervisor
never loads it. A driver that does not answer is waited for no longer than gpus.HANG_S."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.core import cuda_visible
from orchestrator.core.cuda_visible import Visible
from orchestrator.runtime import gpus

GONE_S, SLACK_BYTES = 30.0, 256 << 20
"""How long the driver may take to give back what ended processes held; other processes' memory comes and goes, too."""

MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE


class Gpu(NamedTuple):
    """One of the machine's. `has_mig`: it is in MIG mode, and CUDA uses an instance of it, never the whole."""

    uuid: str
    name: str
    has_mig: bool


class Inventory(NamedTuple):
    """What the driver tells of itself and its GPUs.

    Attributes:
        gpus: by NVML's index.
        driver: its version.
        cuda: the newest CUDA that it takes, major and minor; None where it does not say.
    """

    gpus: Mapping[int, Gpu]
    driver: str
    cuda: tuple[int, int] | None

    def visible(self, text: str | None) -> Visible:
        """Of these, by what CUDA_VISIBLE_DEVICES holds."""
        return cuda_visible.parse(text, {index: gpu.uuid for index, gpu in self.gpus.items()})


class Accelerators(NamedTuple):
    """What decides whether, and on what, this machine can train.

    Attributes:
        inventory: None without a driver.
        text: CUDA_VISIBLE_DEVICES; None where it is not set.
        torch_cuda: the CUDA that PyTorch is built for ("12.4"); empty for a build without; None where that is not known.
    """

    inventory: Inventory | None
    text: str | None = None
    torch_cuda: str | None = None

    @property
    def gpus(self) -> Mapping[int, Gpu]:
        return self.inventory.gpus if self.inventory else {}

    @property
    def visible(self) -> Visible:
        """What CUDA sees: nothing without a driver."""
        return self.inventory.visible(self.text) if self.inventory else cuda_visible.parse(self.text, {})


def accelerators(environ: Mapping[str, str] = os.environ) -> Accelerators:
    """Raises: DriverSilent; not where CUDA_VISIBLE_DEVICES hides all GPUs, for then nobody needs the driver."""
    text, inventory = environ.get(cuda_visible.VARIABLE), None
    try:
        inventory = gpus.asked(_inventory)
    except gpus.DriverSilent:
        if not cuda_visible.parse(text, None).is_hidden:
            raise
    return Accelerators(inventory, text, torch_cuda())


def torch_cuda() -> str | None:
    """The CUDA that PyTorch is built for, out of its version.py: PyTorch is not loaded. As in Accelerators."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        if match := re.search(r"^cuda\b[^=\n]*= *(?:None|'([\d.]+)')", text, re.M):
            return match[1] or ""
    return None


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that CUDA would see: those of CUDA_VISIBLE_DEVICES, else all that the driver knows; 0 without a driver.

    What CUDA_VISIBLE_DEVICES names is believed where no driver answers.

    Raises: DriverSilent, where CUDA_VISIBLE_DEVICES is not set.
    """
    if environ.get(cuda_visible.VARIABLE) is None:
        return gpus.asked(_count) or 0
    return len(_visible(environ).gpus)


def ranks_for(wanted: int | str, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of a stage: as the plan says, or one a visible GPU (one in all without)."""
    return wanted if isinstance(wanted, int) else max(1, visible_gpus(environ))


def name(environ: Mapping[str, str] = os.environ) -> str:
    """The visible GPUs' model, as "Tesla T4" (several, if they differ); "cpu" without, "unknown" while the driver is silent."""

    def ask() -> set[str]:
        with gpus.opened() as nvml:
            return {gpus.as_text(nvml.nvmlDeviceGetName(gpu)) for gpu in _handles(nvml, environ)}

    try:
        return ", ".join(sorted(gpus.asked(ask) or ()))[:128] or "cpu"
    except gpus.DriverSilent:
        return "unknown"


def memory_used(environ: Mapping[str, str] = os.environ) -> list[int] | None:
    """Bytes in use on each visible GPU, whoever uses them; None when that cannot be told, or none is visible."""
    found: list[int] | None = None

    def ask() -> list[int]:
        with gpus.opened() as nvml:
            return [int(nvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in _handles(nvml, environ)]

    with contextlib.suppress(gpus.DriverSilent):
        found = gpus.asked(ask)
    return found or None


def gpu_of_rank(ranks: int, environ: Mapping[str, str] = os.environ) -> list[int | None]:
    """NVML's index of each rank's GPU: the visible ones in turn, as ranks take them (worker/ranks/process_group.py).

    None where that is not known, and for a MIG instance: NVML's figures are the whole GPU's.
    """
    text, inventory = environ.get(cuda_visible.VARIABLE), None
    if not cuda_visible.parse(text, None).is_hidden:
        with contextlib.suppress(gpus.DriverSilent):
            inventory = gpus.asked(_inventory)
    if inventory is None and text is None:
        return list(range(ranks))
    visible = (inventory.visible(text) if inventory else cuda_visible.parse(text, None)).gpus
    with_mig = {index for index, gpu in inventory.gpus.items() if gpu.has_mig} if inventory else set[int]()
    indices = [None if gpu.is_mig or gpu.index in with_mig else gpu.index for gpu in visible]
    return [indices[rank % len(indices)] if indices else None for rank in range(ranks)]


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


def _visible(environ: Mapping[str, str]) -> cuda_visible.Visible:
    """What CUDA sees, as far as a driver can be asked which GPUs there are."""
    text, uuids = environ.get(cuda_visible.VARIABLE), None
    visible = cuda_visible.parse(text, None)
    if visible.is_hidden:
        return visible

    def ask() -> dict[int, str]:
        with gpus.opened() as nvml:
            return gpus.uuids_of(nvml)

    with contextlib.suppress(gpus.DriverSilent):
        uuids = gpus.asked(ask)
    return visible if uuids is None else cuda_visible.parse(text, uuids)


def _handles(nvml: Any, environ: Mapping[str, str]) -> list[Any]:
    text = environ.get(cuda_visible.VARIABLE)
    if text is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [
        nvml.nvmlDeviceGetHandleByUUID(gpu.entry) if gpu.is_mig else nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        for gpu in cuda_visible.parse(text, gpus.uuids_of(nvml)).gpus
    ]


def _inventory() -> Inventory:
    """Within gpus.asked."""
    with gpus.opened() as nvml:
        devices = {}
        for index, uuid in gpus.uuids_of(nvml).items():
            name, mode = "a GPU that does not answer", 0
            with contextlib.suppress(nvml.NVMLError):  # one that is lost
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name = gpus.as_text(nvml.nvmlDeviceGetName(handle))
                mode = nvml.nvmlDeviceGetMigMode(handle)[0]  # most GPUs have none
            devices[index] = Gpu(uuid, name, mode == MIG_ENABLED)
        cuda = None
        with contextlib.suppress(nvml.NVMLError):
            version = nvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = version // 1000, version % 1000 // 10
        return Inventory(devices, gpus.as_text(nvml.nvmlSystemGetDriverVersion()), cuda)
