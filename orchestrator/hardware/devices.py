"""The GPUs that a new attempt would see, and how much of their memory is in use. PyTorch is not used: the supervisor never
loads it. A driver that does not answer is waited for no longer than nvml.query says."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kgorch.core import cuda_visible
from kgorch.core.cuda_visible import Visible
from kgorch.hardware import nvml

RELEASE_TIMEOUT_S = 30.0
"""Seconds that the driver may take to release the memory of ended processes."""

SLACK_BYTES = 256 << 20
"""Tolerance in the comparison of memory in use: other processes allocate and free, too."""

Value = TypeVar("Value")

MIG_ENABLED = 1  # NVML_DEVICE_MIG_ENABLE


class Gpu(NamedTuple):
    """A GPU of this machine. `has_mig`: it is in MIG mode, and CUDA uses an instance of it, never the whole."""

    uuid: str
    name: str
    has_mig: bool


class GpuInventory(NamedTuple):
    """What the driver reports about itself and its GPUs.

    Attributes:
        gpus: by NVML's index.
        driver: its version.
        cuda: the newest CUDA that it supports, major and minor; None where it does not report one.
    """

    gpus: Mapping[int, Gpu]
    driver: str
    cuda: tuple[int, int] | None

    def visible(self, text: str | None) -> Visible:
        """Those of these GPUs that CUDA sees with this value of CUDA_VISIBLE_DEVICES."""
        return cuda_visible.parse(text, {index: gpu.uuid for index, gpu in self.gpus.items()})


class Accelerators(NamedTuple):
    """What decides whether this machine can train, and on which GPUs.

    Attributes:
        inventory: None without a driver.
        text: CUDA_VISIBLE_DEVICES; None where it is not set.
        torch_cuda: the CUDA that PyTorch is built for ("12.4"); empty for a build without; None where that is not known.
    """

    inventory: GpuInventory | None
    text: str | None = None
    torch_cuda: str | None = None

    @property
    def gpus(self) -> Mapping[int, Gpu]:
        """All of the machine, by NVML's index; none without a driver."""
        return self.inventory.gpus if self.inventory else {}

    @property
    def visible(self) -> Visible:
        """What CUDA sees: nothing without a driver."""
        return self.inventory.visible(self.text) if self.inventory else cuda_visible.parse(self.text, {})


def detect_accelerators(environ: Mapping[str, str] = os.environ) -> Accelerators:
    """Query the driver and the version of PyTorch.

    Raises: DriverUnresponsive; not where CUDA_VISIBLE_DEVICES hides all GPUs, since then the driver is not needed.
    """
    text, inventory = environ.get(cuda_visible.VARIABLE), None
    try:
        inventory = nvml.query(_inventory)
    except nvml.DriverUnresponsive:
        if not cuda_visible.parse(text, None).is_hidden:
            raise
    return Accelerators(inventory, text, torch_cuda())


def torch_cuda() -> str | None:
    """The CUDA that PyTorch is built for, as in Accelerators; read from its version.py, so PyTorch is not loaded."""
    # importing PyTorch takes seconds and hundreds of MB, and may initialize CUDA in the supervisor
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        if match := re.search(r"^cuda\b[^=\n]*= *(?:None|'([\d.]+)')", text, re.M):
            return match[1] or ""
    return None


def visible_gpu_count(environ: Mapping[str, str] = os.environ) -> int:
    """Number of GPUs that CUDA would see: those of CUDA_VISIBLE_DEVICES, else all of the driver's; 0 without a driver.

    Without an answer of the driver, well-formed entries of CUDA_VISIBLE_DEVICES count as GPUs.

    Raises: DriverUnresponsive, where CUDA_VISIBLE_DEVICES is not set.
    """
    if environ.get(cuda_visible.VARIABLE) is None:
        return nvml.query(_count) or 0
    return len(_visible(environ).gpus)


def rank_count(ranks: int | str, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of a stage: the plan's number, or for "auto" one a visible GPU, at least one."""
    return ranks if isinstance(ranks, int) else max(1, visible_gpu_count(environ))


def model_name(environ: Mapping[str, str] = os.environ) -> str:
    """Model of the visible GPUs, as "Tesla T4" (several if they differ); "cpu" without, "unknown" if the driver hangs."""

    def ask() -> set[str]:
        with nvml.library() as lib:
            return set(_of_each(lib, environ, lambda gpu: nvml.to_text(lib.nvmlDeviceGetName(gpu))))

    try:
        return ", ".join(sorted(nvml.query(ask) or ()))[:128] or "cpu"
    except nvml.DriverUnresponsive:
        return "unknown"


def used_memory(environ: Mapping[str, str] = os.environ) -> list[int] | None:
    """Bytes in use on each visible GPU, by any process; None when they cannot be queried, or no GPU is visible."""
    used: list[int] | None = None

    def ask() -> list[int]:
        with nvml.library() as lib:
            return _of_each(lib, environ, lambda gpu: int(lib.nvmlDeviceGetMemoryInfo(gpu).used))

    with contextlib.suppress(nvml.DriverUnresponsive):
        used = nvml.query(ask)
    return used or None


def gpu_of_rank(ranks: int, environ: Mapping[str, str] = os.environ) -> list[int | None]:
    """NVML's index of each rank's GPU: the visible ones in turn, as ranks choose them (worker/ranks/process_group.py).

    None where it is not known, and for a MIG instance: NVML's metrics are those of the whole GPU.
    """
    text, inventory = environ.get(cuda_visible.VARIABLE), None
    if not cuda_visible.parse(text, None).is_hidden:
        with contextlib.suppress(nvml.DriverUnresponsive):
            inventory = nvml.query(_inventory)
    # no answer and no restriction: ranks take the GPUs in the order of their index
    if inventory is None and text is None:
        return list(range(ranks))
    visible = (inventory.visible(text) if inventory else cuda_visible.parse(text, None)).gpus
    with_mig = {index for index, gpu in inventory.gpus.items() if gpu.has_mig} if inventory else set[int]()
    indices = [None if gpu.is_mig or gpu.index in with_mig else gpu.index for gpu in visible]
    return [indices[rank % len(indices)] if indices else None for rank in range(ranks)]


class GpuMemoryBaseline:
    """GPU memory in use before the session's first attempt: that much may be in use before the next one.

    Args:
        environ: in which the session's GPUs are the visible ones (GpuLocks.environ).
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._before: list[int] | None = None

    def wait_until_released(self, timeout_s: float = RELEASE_TIMEOUT_S) -> str:
        """Wait until the memory of ended processes is free; after the time-out, a sentence about what is not, else ""."""
        until = time.monotonic() + timeout_s
        while (used := used_memory(self._environ)) is not None:
            # the first call, or another set of GPUs: nothing to compare with
            if self._before is None or len(self._before) != len(used):
                self._before = used
            over = [now - before for now, before in zip(used, self._before, strict=True)]
            if max(over, default=0) <= SLACK_BYTES:
                break
            if time.monotonic() > until:
                excess = ", ".join(
                    f"GPU {gpu}: {more >> 20} MiB" for gpu, more in enumerate(over) if more > SLACK_BYTES
                )
                return f"more is in use than before the first attempt: {excess}"
            time.sleep(0.2)
        return ""


def _count() -> int:
    with nvml.library() as lib:
        return int(lib.nvmlDeviceGetCount())


def _visible(environ: Mapping[str, str]) -> cuda_visible.Visible:
    """What CUDA sees, checked against the driver's GPUs where it answers."""
    text, uuids = environ.get(cuda_visible.VARIABLE), None
    visible = cuda_visible.parse(text, None)
    if visible.is_hidden:
        return visible

    def ask() -> dict[int, str]:
        with nvml.library() as lib:
            return nvml.gpu_uuids(lib)

    with contextlib.suppress(nvml.DriverUnresponsive):
        uuids = nvml.query(ask)
    return visible if uuids is None else cuda_visible.parse(text, uuids)


def _of_each(lib: Any, environ: Mapping[str, str], value_of: Callable[[Any], Value]) -> list[Value]:
    """`value_of` the handle of each visible GPU that answers. Raises: NVMLError where none does."""
    values, failure = list[Value](), None
    for gpu in cuda_visible.parse(environ.get(cuda_visible.VARIABLE), nvml.gpu_uuids(lib)).gpus:
        try:
            by_uuid, by_index = lib.nvmlDeviceGetHandleByUUID, lib.nvmlDeviceGetHandleByIndex
            values.append(value_of(by_uuid(gpu.entry) if gpu.is_mig else by_index(gpu.index)))
        except lib.NVMLError as error:
            failure = error
    if failure and not values:
        raise failure
    return values


def _inventory() -> GpuInventory:
    """To be called by nvml.query."""
    with nvml.library() as lib:
        devices = {}
        for index, uuid in nvml.gpu_uuids(lib).items():
            name, mode = nvml.UNANSWERED, 0
            with contextlib.suppress(lib.NVMLError):  # one that is lost
                handle = lib.nvmlDeviceGetHandleByIndex(index)
                name = nvml.to_text(lib.nvmlDeviceGetName(handle))
                mode = lib.nvmlDeviceGetMigMode(handle)[0]  # most GPUs have none
            devices[index] = Gpu(uuid, name, mode == MIG_ENABLED)
        cuda = None
        with contextlib.suppress(lib.NVMLError):
            version = lib.nvmlSystemGetCudaDriverVersion_v2()
            cuda = version // 1000, version % 1000 // 10
        return GpuInventory(devices, nvml.to_text(lib.nvmlSystemGetDriverVersion()), cuda)
