"""What a rank can tell of itself: PyTorch's allocator, its memory and CPU, and how long it waits for data.

Read about once a second on the thread of its line to the supervisor; the allocator by the thread that trains, between two steps.
The allocator holds its lock while it waits for the device: another thread that asks it then waits, too, with Python's own lock
taken, for as long as the device hangs. What cannot be measured is absent, never 0.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")
SAMPLE_S = 1.0
"""Between two looks at the allocator."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankMetrics:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waited_s, self._since_s = 0.0, 0.0  # waiting for data: in all, and since when just now
        self._fetches = False
        self._read_s, self._waited_before_s = time.monotonic(), 0.0
        self._cpu_s, self._loaders_s = time.process_time(), dict[str, float]()
        self._allocator: dict[str, float] = {}
        self._next_sample_s = 0.0

    def sample(self, now_s: float) -> bool:
        """Look at the allocator, if it is time. On the thread that trains. True when it was."""
        if now_s < self._next_sample_s:
            return False
        self._next_sample_s = now_s + SAMPLE_S
        with contextlib.suppress(RuntimeError, KeyError):  # a dead context
            self._allocator = _allocator(self._device)
        return True

    def fetched(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; the time until each comes is counted."""
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
        """Figures of now, and shares of the time since they were read last."""
        now_s = time.monotonic()
        passed_s, self._read_s = max(now_s - self._read_s, 1e-3), now_s
        found = {"step_s": step_s} if step_s else {}
        if self._fetches:
            found["data_wait"] = self._data_wait(now_s, passed_s)
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        found["cpu"] = 100 * cpu_s / passed_s
        with contextlib.suppress(OSError, ValueError, IndexError):  # no /proc, or one of another kind
            found["rss"] = float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found["rss_peak"] = max(float(peak_resident_bytes()), found["rss"])
        with contextlib.suppress(OSError, ValueError, IndexError):
            before, self._loaders_s = self._loaders_s, _children_s()
            used_s = sum(spent_s - before[pid] for pid, spent_s in self._loaders_s.items() if pid in before)
            if self._loaders_s:
                found["loaders"] = 100 * used_s / passed_s
        return found | self._allocator

    def _data_wait(self, now_s: float, passed_s: float) -> float:
        since_s = self._since_s
        waited_s = self._waited_s + (now_s - since_s if since_s else 0.0)
        share = (waited_s - self._waited_before_s) / passed_s
        self._waited_before_s = waited_s
        return min(max(share, 0.0), 1.0)


def peak_resident_bytes() -> int:
    """The most bytes that this process had in memory since this was asked last; where the kernel does not forget, ever; 0 where it
    does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # puts nothing back but that mark; see proc(5)
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return 0


def _children_s() -> dict[str, float]:
    """CPU seconds of each process that the main thread has started: DataLoader's, nearly always."""
    found = {}
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):  # just gone
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            found[pid] = (int(user) + int(system)) / TICKS_PER_S
    return found


def _allocator(device: torch.device) -> dict[str, float]:
    """Bytes; empty before CUDA is used, so that reading begins nothing. The peak is that since it was read last."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    told = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "alloc": float(told["allocated_bytes.all.current"]),
        "reserved": float(told["reserved_bytes.all.current"]),
        "peak": float(told["allocated_bytes.all.peak"]),
        "total": float(torch.cuda.get_device_properties(device).total_memory),
        "alloc_retries": float(told["num_alloc_retries"]),
        "ooms": float(told["num_ooms"]),
    }
