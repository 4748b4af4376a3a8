"""Metrics of the visible GPUs about once a second. A call of the driver may never return, so a thread makes the calls, and a
thread that hangs is left behind and replaced.

Without a GPU or a driver there are no metrics, and no event says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kgorch.core import cuda_visible
from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind
from kgorch.hardware import nvml

FIRST_RETRY_S, LONGEST_RETRY_S = 10.0, 300.0
"""Pauses before NVML is tried again after a failure; they double."""

MAX_HANGING = 4
"""Threads that may hang in the driver; with that many, no other is started."""

STALE_S = 5.0
"""Age in seconds at which a metric no longer describes the present."""

SELDOM = 10
"""Passes, one a second, between two queries for what changes rarely."""

Emit = Callable[[str, dict[str, Any]], None]


class Metric(NamedTuple):
    """A query of each GPU.

    Attributes:
        calls: names in NVML; the first one that the driver supports counts.
        arguments: after the device's handle.
        values: keys of a sample, and how each is made from what the driver returns.
        every: passes between two queries.
    """

    calls: tuple[str, ...]
    arguments: tuple[int, ...]
    values: Mapping[str, Callable[[Any], float]]
    every: int = 1


SM, MEMORY = 1, 2  # NVML_CLOCK_…
UNCORRECTED, SINCE_BOOT = 1, 0  # NVML_MEMORY_ERROR_TYPE_…, NVML_VOLATILE_ECC
METRICS = (
    Metric(
        ("nvmlDeviceGetMemoryInfo",), (), {"mem_used": lambda info: info.used, "mem_total": lambda info: info.total}
    ),
    Metric(("nvmlDeviceGetUtilizationRates",), (), {"util": lambda rates: rates.gpu}),
    Metric(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), (0,), {"temp_c": float}),
    Metric(("nvmlDeviceGetPowerUsage",), (), {"power_w": lambda milliwatts: milliwatts / 1000}),
    Metric(("nvmlDeviceGetEnforcedPowerLimit",), (), {"power_limit_w": lambda milliwatts: milliwatts / 1000}, SELDOM),
    Metric(("nvmlDeviceGetClockInfo",), (SM,), {"sm_mhz": float}),
    Metric(("nvmlDeviceGetClockInfo",), (MEMORY,), {"mem_mhz": float}),
    Metric(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), (), {"throttle": float}
    ),
    Metric(("nvmlDeviceGetTotalEccErrors",), (UNCORRECTED, SINCE_BOOT), {"ecc": float}, SELDOM),
    Metric(("nvmlDeviceGetComputeRunningProcesses_v3",), (), {"processes": len}, SELDOM),
)


class GpuMonitor:
    """Metrics of the visible GPUs. The owner calls `check` about once a second.

    Args:
        emit: takes events for the journal, from any thread: `telemetry_lost` (once, until it is back), `telemetry_back`,
            `gpu_lost`, `gpu_xid`.
        environ: in which the GPUs to measure are the visible ones.
        hang_s: seconds after which a call counts as hanging.
        again_s: pause after the first failure, seconds.
    """

    def __init__(
        self,
        emit: Emit,
        environ: Mapping[str, str] = os.environ,
        *,
        hang_s: float = nvml.HANG_S,
        again_s: float = FIRST_RETRY_S,
    ) -> None:
        self._environ = environ
        self._emit, self._hang_s, self._retries = emit, hang_s, Backoff(again_s, LONGEST_RETRY_S)
        self._emitted: set[tuple[Any, ...]] = set()
        self._hung_threads: list[_QueryThread] = []
        self._lost_s: float | None = None
        self._next_s, self._failures = 0.0, 0
        self._thread: _QueryThread | None = None
        self._start()

    def values(self) -> dict[str, float]:
        """The newest metrics; empty when there are none of the last STALE_S seconds."""
        at_s, values = self._thread.reading if self._thread else (0.0, {})
        return values if time.monotonic() - at_s < STALE_S else {}

    def check(self) -> None:
        """Abandon a thread that hangs or has failed, and start another one later."""
        now_s = time.monotonic()
        self._hung_threads = [thread for thread in self._hung_threads if thread.is_alive()]
        if self._thread is None:
            if now_s >= self._next_s and len(self._hung_threads) < MAX_HANGING:
                self._start()
            return
        call, since_s = self._thread.current_call
        if call and now_s - since_s > self._hang_s:
            self._hung_threads.append(self._thread)
            self._abandon(f"{call} has not returned for {now_s - since_s:.0f} s")
        elif self._thread.failure:
            self._abandon(self._thread.failure)
        elif self._lost_s is not None and self._thread.reading[0]:
            self._emit(EventKind.TELEMETRY_BACK, {"of": "nvml", "after_s": round(now_s - self._lost_s, 1)})
            self._lost_s, self._failures = None, 0

    def stop(self) -> None:
        if self._thread:
            self._thread.stop()

    def _start(self) -> None:
        self._thread = _QueryThread(self._emit_once, self._environ)
        self._thread.start()

    def _abandon(self, why: str) -> None:
        self.stop()
        self._thread, now_s = None, time.monotonic()
        if self._lost_s is None:
            self._emit(EventKind.TELEMETRY_LOST, {"of": "nvml", "why": why})
            self._lost_s = now_s
        self._failures += 1
        self._next_s = now_s + self._retries.after(self._failures)

    def _emit_once(self, kind: str, facts: dict[str, Any]) -> None:
        # a lost GPU is seen again at each pass, and by each new thread
        if (event := (kind, *facts.values())) not in self._emitted:
            self._emitted.add(event)
            self._emit(kind, facts)


class _QueryThread(threading.Thread):
    """Queries the driver until it is stopped or fails.

    Attributes:
        reading: time.monotonic() of the newest metrics, and the metrics.
        current_call: the call that it is in, and since when; an empty name between two calls.
        failure: why it has ended; empty while it lives, and where there is no driver.
    """

    def __init__(self, emit: Emit, environ: Mapping[str, str]) -> None:
        super().__init__(name="nvml", daemon=True)
        self.reading: tuple[float, dict[str, float]] = (0.0, {})
        self.current_call, self.failure = ("", 0.0), ""
        self._emit, self._visible = emit, environ.get(cuda_visible.VARIABLE)
        self._stopping = threading.Event()
        self._handles: dict[int, Any] = {}  # by NVML's index
        self._newest: dict[tuple[int, int], dict[str, float]] = {}  # by device and metric
        self._passes = 0

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            with nvml.library(self._invoke) as self._lib:
                self._query_until_stopped()
        except Exception as error:  # whatever a driver makes of its binding
            has_worked = bool(self.reading[0]) and isinstance(error, OSError)
            if has_worked or type(error).__name__ not in nvml.NO_DRIVER_LOADED:
                self.failure = f"{type(error).__name__}: {error}"

    def _query_until_stopped(self) -> None:
        self._indices, self._events = self._visible_indices(), self._event_set()
        while not self._stopping.is_set():
            values = dict(self._query_all())
            self.reading = time.monotonic(), values
            self._emit_xids()
            self._passes += 1
            self._stopping.wait(1.0)

    def _invoke(self, lib: Any, name: str, *arguments: Any) -> Any:
        self.current_call = name, time.monotonic()
        try:
            return getattr(lib, name)(*arguments)
        finally:
            self.current_call = "", 0.0

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._invoke(self._lib, name, *arguments)

    def _visible_indices(self) -> list[int]:
        """NVML's indices of the GPUs that CUDA would see."""
        # NVML itself ignores CUDA_VISIBLE_DEVICES
        indices, uuids = range(self._call("nvmlDeviceGetCount")), {}
        for index in indices:
            with contextlib.suppress(self._lib.NVMLError):
                uuids[index] = self._call("nvmlDeviceGetUUID", self._call("nvmlDeviceGetHandleByIndex", index))
        return cuda_visible.indices(indices, uuids, self._visible)

    def _query_all(self) -> Iterator[tuple[str, float]]:
        """Raises: NVMLError, where every GPU is refused."""
        refused = None
        for index in self._indices:
            try:
                handle = self._handle(index)
                for number, metric in enumerate(METRICS):
                    if self._passes % metric.every == 0 or (index, number) not in self._newest:
                        self._newest[index, number] = self._query(handle, metric)
                    for name, value in self._newest[index, number].items():
                        yield f"gpu{index}.{name}", value
            except self._lib.NVMLError_GpuIsLost:
                self._emit(EventKind.GPU_LOST, {"gpu": index})
            except self._lib.NVMLError as error:  # no handle, for lack of permission for example
                refused = error
        if refused and not self._handles:
            raise refused

    def _handle(self, index: int) -> Any:
        """Raises: NVMLError while the GPU is lost or must not be used; the next pass tries again."""
        if index not in self._handles:
            handle = self._call("nvmlDeviceGetHandleByIndex", index)
            with contextlib.suppress(self._lib.NVMLError):  # this GPU reports no XID errors
                if self._events is not None:
                    self._call(
                        "nvmlDeviceRegisterEvents", handle, self._lib.nvmlEventTypeXidCriticalError, self._events
                    )
            self._handles[index] = handle
        return self._handles[index]

    def _query(self, handle: Any, metric: Metric) -> dict[str, float]:
        """What the driver does not report is absent."""
        for call in metric.calls:
            try:
                answer = self._call(call, handle, *metric.arguments)
            except self._lib.NVMLError_GpuIsLost:  # all other queries of this GPU would fail, too
                raise
            except (self._lib.NVMLError, AttributeError):  # not in this driver, or not in this pynvml
                continue
            return {name: float(value_of(answer)) for name, value_of in metric.values.items()}
        return {}

    def _event_set(self) -> Any:
        """The event set that the driver adds each GPU's XID errors to; None where it has none."""
        with contextlib.suppress(self._lib.NVMLError):
            return self._call("nvmlEventSetCreate")
        return None

    def _emit_xids(self) -> None:
        with contextlib.suppress(self._lib.NVMLError):  # a time-out: there are no more
            while self._events is not None:
                event = self._call("nvmlEventSetWait_v2", self._events, 0)
                self._emit(
                    EventKind.GPU_XID,
                    {"gpu": self._call("nvmlDeviceGetIndex", event.device), "xid": int(event.eventData)},
                )
