"""What a rank holds in memory during one step: by CUDA's allocator, which counts; on the CPU by PyTorch's profiler, which writes
down each allocation, and by the kernel, which knows the most that was resident.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from orchestrator.worker.telemetry.rank_metrics import peak_resident_bytes

MARK = "kgorch:forward"


class StepMemory(NamedTuple):
    """Bytes. `peak`: the most that lived; on the CPU above what lived before. `forward`: what the first forward left living.

    `rss`: the most of the process that was resident; 0 where the kernel does not tell.
    """

    peak: int = 0
    forward: int = 0
    rss: int = 0


class MemoryProfiler(Protocol):
    def begin(self, *, deeply: bool) -> None:
        """Before a step; `deeply` may slow it down."""

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around that of a microbatch; the first one of a step is weighed."""

    def end(self) -> StepMemory:
        """After the step, which has come to its end on the device."""


def memory_profiler(device: torch.device) -> MemoryProfiler:
    return CudaMemoryProfiler(device) if device.type == "cuda" else CpuMemoryProfiler()


class CudaMemoryProfiler:
    def __init__(self, device: torch.device) -> None:
        self._device, self._forward = device, 0

    def begin(self, *, deeply: bool) -> None:
        self._forward = 0
        peak_resident_bytes()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        before = torch.cuda.memory_allocated(self._device)
        yield
        if not self._forward:
            self._forward = torch.cuda.memory_allocated(self._device) - before

    def end(self) -> StepMemory:
        torch.cuda.synchronize(self._device)
        return StepMemory(torch.cuda.max_memory_allocated(self._device), self._forward, peak_resident_bytes())


class CpuMemoryProfiler:
    def __init__(self) -> None:
        self._profile: Any = None

    def begin(self, *, deeply: bool) -> None:
        peak_resident_bytes()
        if deeply:
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profile.__enter__()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return torch.profiler.record_function(MARK) if self._profile else contextlib.nullcontext()

    def end(self) -> StepMemory:
        resident = peak_resident_bytes()
        if self._profile is None:
            return StepMemory(rss=resident)
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        return _read(profile)._replace(rss=resident)


def _read(profile: Any) -> StepMemory:
    """From the allocations in the order of their time. What lived before and was freed meanwhile counts as less."""
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    first = min(((event.start_ns(), event.end_ns()) for event in events if event.name() == MARK), default=(0, 0))
    living = peak = before = after = 0
    for at_ns, change in changes:
        living += change
        peak = max(peak, living)
        if at_ns <= first[0]:
            before = living
        if at_ns <= first[1]:
            after = living
    return StepMemory(peak, max(0, after - before))
