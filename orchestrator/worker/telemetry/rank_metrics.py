"""Resource usage of a rank: PyTorch's allocator, resident memory, CPU time, and how long it waits for data.

The link's thread reads it about once a second. The allocator is read by the thread that trains, between two steps: it holds
its lock while it waits for the device, so another thread would wait with it, holding the GIL, for as long as the device hangs.
What cannot be measured is absent, never 0.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from kgorch.system.process_identity import stat_fields

Item = TypeVar("Item")
SAMPLE_S = 1.0
"""Seconds between two reads of the allocator."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ResourceMeter:
    """The resource usage of this process and its loading processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waited_s, self._since_s = 0.0, 0.0  # waiting for data: in total, and since when at the moment
        self._fetches = False  # a script without session.steps has no data wait
        self._read_s, self._waited_before_s = time.monotonic(), 0.0
        self._cpu_s, self._loaders_s = time.process_time(), dict[str, float]()
        self._allocator: dict[str, float] = {}
        self._next_sample_s = 0.0

    def sample(self, now_s: float) -> bool:
        """Read the allocator if it is time. Returns whether it was. Called by the thread that trains."""
        if now_s < self._next_sample_s:
            return False
        self._next_sample_s = now_s + SAMPLE_S
        with contextlib.suppress(RuntimeError, KeyError):  # the CUDA context is dead
            self._allocator = _allocator(self._device)
        return True

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; the time until each arrives counts as data wait."""
        iterator, self._fetches = iter(batches), True
        while True:
            self._since_s = began_s = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._since_s = 0.0
                self._waited_s += time.monotonic() - began_s
            yield batch

    def read(self, step_s: float) -> dict[str, float]:
        """Current values, and shares of the time since the last call.

        Returns:
            step_s: seconds. data_wait: share of the time, 0 to 1. cpu, loaders: percent of one core. Others: bytes or counts.
        """
        now_s = time.monotonic()
        passed_s, self._read_s = max(now_s - self._read_s, 1e-3), now_s
        usage = {"step_s": step_s} if step_s else {}
        if self._fetches:
            usage["data_wait"] = self._data_wait(now_s, passed_s)
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        usage["cpu"] = 100 * cpu_s / passed_s
        with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or another format
            usage["rss"] = float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            usage["rss_peak"] = max(float(peak_resident_bytes()), usage["rss"])
        with contextlib.suppress(OSError, ValueError, IndexError):
            before, self._loaders_s = self._loaders_s, _children_s()
            used_s = sum(spent_s - before[pid] for pid, spent_s in self._loaders_s.items() if pid in before)
            if self._loaders_s:
                usage["loaders"] = 100 * used_s / passed_s
        return usage | self._allocator

    def _data_wait(self, now_s: float, passed_s: float) -> float:
        since_s = self._since_s
        waited_s = self._waited_s + (now_s - since_s if since_s else 0.0)
        share = (waited_s - self._waited_before_s) / passed_s
        self._waited_before_s = waited_s
        return min(max(share, 0.0), 1.0)


def peak_resident_bytes() -> int:
    """The highest resident memory of this process since the last call, in bytes.

    Since the start of the process where the kernel cannot reset the mark; 0 where the kernel does not report it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_bytes()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets that mark alone; see proc(5)
        return int(status.partition(b"VmHWM:")[2].split()[0]) * 1024
    return 0


def _children_s() -> dict[str, float]:
    """CPU seconds of each child process of the main thread, by pid: nearly always a DataLoader's."""
    usage = {}
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has just ended
            user, system = stat_fields(pid)[11:13]
            usage[pid] = (int(user) + int(system)) / TICKS_PER_S
    return usage


def _allocator(device: torch.device) -> dict[str, float]:
    """The allocator's bytes and counts; empty before CUDA is used, so that reading does not initialise it.

    The peak is the one since the last call.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "alloc": float(stats["allocated_bytes.all.current"]),
        "reserved": float(stats["reserved_bytes.all.current"]),
        "peak": float(stats["allocated_bytes.all.peak"]),
        "total": float(torch.cuda.get_device_properties(device).total_memory),
        "alloc_retries": float(stats["num_alloc_retries"]),
        "ooms": float(stats["num_ooms"]),
    }
