"""CPU, memory, swap and disks of this machine."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from kgorch.system import host_memory


class HostMetrics:
    """CPU, memory, swap and disks of this machine from psutil; rates are over the time since the last call of `values`."""

    def __init__(self) -> None:
        import psutil

        self._psutil, self._read_s = psutil, time.monotonic()
        self._before: Any = None
        self.values()  # psutil's rates start at the first call, whose result means nothing

    def values(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for measure in (self._cpu, self._memory, self._swap, self._disks):
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # not available in this container
                metrics |= measure()
        return metrics

    def _cpu(self) -> dict[str, float]:
        return {"host.cpu": self._psutil.cpu_percent(), "host.cores": float(len(os.sched_getaffinity(0)))}

    def _memory(self) -> dict[str, float]:
        free, total = host_memory.free_and_total()
        return {"host.mem_used": float(total - free), "host.mem_total": float(total)}

    def _swap(self) -> dict[str, float]:
        return {"host.swap_used": float(self._psutil.swap_memory().used)}

    def _disks(self) -> dict[str, float]:
        now, now_s = self._psutil.disk_io_counters(), time.monotonic()
        before, passed_s = self._before, now_s - self._read_s
        self._before, self._read_s = now, now_s
        if now is None or before is None or passed_s <= 0:
            return {}
        return {
            "host.disk_read_bps": (now.read_bytes - before.read_bytes) / passed_s,
            "host.disk_write_bps": (now.write_bytes - before.write_bytes) / passed_s,
        }
