"""Memory that a rank uses during one step.

On CUDA the allocator counts it. On the CPU PyTorch's profiler records each allocation, and the kernel knows the peak of resident
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from kgorch.worker.telemetry.rank_metrics import peak_resident_bytes

MARK = "kgorch:forward"


class StepMemory(NamedTuple):
    """Memory of one step, in bytes.

    Attributes:
        peak: highest sum of live tensors; on the CPU, above what lived before the step.
        forward: what the first forward has left alive.
        rss: highest resident memory of the process; 0 where the kernel does not report it.
    """

    peak: int = 0
    forward: int = 0
    rss: int = 0


class MemoryProfiler(Protocol):
    """Measures the memory of a step."""

    def begin(self, *, deeply: bool) -> None:
        """Call it before a step. `deeply`: measure everything, which may slow the step down."""

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """A context for the forward of a microbatch; the first one of a step is measured."""

    def end(self) -> StepMemory:
        """Call it after the step. Waits for the device."""


def memory_profiler(device: torch.device) -> MemoryProfiler:
    """The profiler for that device."""
    return CudaMemoryProfiler(device) if device.type == "cuda" else CpuMemoryProfiler()


class CudaMemoryProfiler:
    """Reads the counters of CUDA's caching allocator."""

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
    """Records allocations with PyTorch's profiler, which slows a step down."""

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
    """Evaluate the allocations in the order of time. Tensors that lived before and were freed meanwhile count as negative."""
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    first = min(((event.start_ns(), event.end_ns()) for event in events if event.name() == MARK), default=(0, 0))
    live_bytes = peak = before = after = 0
    for at_ns, change in changes:
        live_bytes += change
        peak = max(peak, live_bytes)
        if at_ns <= first[0]:
            before = live_bytes
        if at_ns <= first[1]:
            after = live_bytes
    return StepMemory(peak, max(0, after - before))
