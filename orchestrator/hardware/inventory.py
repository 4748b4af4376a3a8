"""Inventory of this machine for `kgorch doctor` and the checks. PyTorch's version is read, and PyTorch is never loaded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

from kgorch.core.memory.snapshot_budget import FREE_SHARE
from kgorch.hardware import nvml
from kgorch.system import host_memory

CAP_SYS_PTRACE = 19


def describe_host(home: Path) -> dict[str, Any]:
    """The fields that `kgorch doctor --json` promises under `machine`; what cannot be determined is None."""
    import psutil

    free_bytes, total_bytes = host_memory.free_and_total()
    try:
        driver, devices = nvml.query(_driver) or (None, [])
    except nvml.DriverUnresponsive as error:
        driver, devices = str(error), []
    return {
        "gpus": devices,
        "driver": driver,
        "cores": len(os.sched_getaffinity(0)),
        "memory_free": free_bytes,
        "memory_total": total_bytes,
        "cgroup_bounds": total_bytes < psutil.virtual_memory().total,
        "snapshot_room": int((1 - FREE_SHARE) * free_bytes / 2),
        "shm_free": _disk_free(Path("/dev/shm")),
        "disk_free": _disk_free(home),
        "folder": str(home),
        "torch": version_of("torch"),
        "py_spy": shutil.which("py-spy") is not None,
        "may_trace": _may_trace(),
    }


def _driver() -> tuple[str, list[dict[str, Any]]]:
    """Its version and its devices. Raises whatever NVML does."""
    with nvml.library() as lib:
        devices: list[dict[str, Any]] = []
        for index in range(lib.nvmlDeviceGetCount()):
            name, memory = nvml.UNANSWERED, None
            with contextlib.suppress(lib.NVMLError):
                handle = lib.nvmlDeviceGetHandleByIndex(index)
                name = nvml.to_text(lib.nvmlDeviceGetName(handle))
                memory = int(lib.nvmlDeviceGetMemoryInfo(handle).total)
            devices.append({"name": name, "memory": memory})
        return nvml.to_text(lib.nvmlSystemGetDriverVersion()), devices


def _disk_free(folder: Path) -> int | None:
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def version_of(package: str) -> str | None:
    """The version of an installed package, which is not imported; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _may_trace() -> bool | None:
    """Whether a process may trace another one of the same user that is not its child; py-spy needs that."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(errors="replace").splitlines())
        if int(status["CapEff"], 16) >> CAP_SYS_PTRACE & 1:
            return True
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text()) == 0
    except FileNotFoundError:
        return True  # a kernel without Yama: the same user is enough
    except (OSError, KeyError, ValueError):
        return None
