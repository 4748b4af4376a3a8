"""What this machine offers a training, asked for just now. PyTorch is looked at, never loaded."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

from orchestrator.core.snapshots import LEAVES
from orchestrator.hardware import nvml
from orchestrator.system import host_memory

CAP_SYS_PTRACE = 19


def described(home: Path) -> dict[str, Any]:
    """The fields that `kgorch doctor --json` promises under `machine`; what cannot be told is None."""
    import psutil

    free_bytes, total_bytes = host_memory.free_and_total()
    try:
        driver, devices = nvml.asked(_driver) or (None, [])
    except nvml.DriverSilent as error:
        driver, devices = str(error), []
    return {
        "gpus": devices,
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)),
        "memory_free": free_bytes,
        "memory_total": total_bytes,
        "cgroup_bounds": total_bytes < psutil.virtual_memory().total,
        "snapshot_room": int((1 - LEAVES) * free_bytes / 2),
        "shm_free": _disk_free(Path("/dev/shm")),
        "disk_free": _disk_free(home),
        "folder": str(home),
        "torch": _version("torch"),
        "py_spy": shutil.which("py-spy") is not None,
        "may_trace": _may_trace(),
    }


def _driver() -> tuple[str, list[dict[str, Any]]]:
    """Its version and its devices. Raises whatever NVML does."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        devices = [
            {"name": _text(pynvml.nvmlDeviceGetName(handle)), "memory": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)}
            for handle in handles
        ]  # fmt: skip
        return _text(pynvml.nvmlSystemGetDriverVersion()), devices
    finally:
        pynvml.nvmlShutdown()


def _text(told: str | bytes) -> str:
    return told.decode(errors="replace") if isinstance(told, bytes) else told


def _disk_free(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _may_trace() -> bool | None:
    """Whether a process may look into another of the same user, which is no child of its own: what py-spy needs."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        if int(status["CapEff"], 16) >> CAP_SYS_PTRACE & 1:
            return True
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text()) == 0
    except FileNotFoundError:
        return True  # a kernel without Yama: the same user suffices
    except (OSError, KeyError, ValueError):
        return None
