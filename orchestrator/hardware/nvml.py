"""What NVML tells of the GPUs. A call of the driver may never return, so each is made on a thread that can be left behind.

Without a GPU or a driver there is nothing to tell, and nothing is said about it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from orchestrator.core import cuda_visible

HANG_S = 5.0
"""A call of the driver that takes longer is not waited for any more."""

AGAIN_S, AGAIN_AT_MOST_S, LEFT_AT_MOST = 10.0, 300.0, 4
"""NVML is tried again after ever longer pauses, until so many threads hang in it."""

STALE_S = 5.0
"""A figure that is older is none of now."""

SELDOM = 10
"""So many seconds pass between two questions for what hardly moves."""

Answer = TypeVar("Answer")
Tell = Callable[[str, dict[str, Any]], None]


class Question(NamedTuple):
    """`calls`: of NVML, the first that the driver knows counts. `answers`: keys of a sample, made from what it says."""

    calls: tuple[str, ...]
    arguments: tuple[int, ...]
    answers: Mapping[str, Callable[[Any], float]]
    every: int = 1


SM, MEMORY = 1, 2  # NVML_CLOCK_…
UNCORRECTED, SINCE_BOOT = 1, 0  # NVML_MEMORY_ERROR_TYPE_…, NVML_VOLATILE_ECC
QUESTIONS = (
    Question(
        ("nvmlDeviceGetMemoryInfo",), (), {"mem_used": lambda found: found.used, "mem_total": lambda found: found.total}
    ),
    Question(("nvmlDeviceGetUtilizationRates",), (), {"util": lambda found: found.gpu}),
    Question(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), (0,), {"temp_c": float}),
    Question(("nvmlDeviceGetPowerUsage",), (), {"power_w": lambda milliwatts: milliwatts / 1000}),
    Question(("nvmlDeviceGetEnforcedPowerLimit",), (), {"power_limit_w": lambda found: found / 1000}, SELDOM),
    Question(("nvmlDeviceGetClockInfo",), (SM,), {"sm_mhz": float}),
    Question(("nvmlDeviceGetClockInfo",), (MEMORY,), {"mem_mhz": float}),
    Question(
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), (), {"throttle": float}
    ),
    Question(("nvmlDeviceGetTotalEccErrors",), (UNCORRECTED, SINCE_BOOT), {"ecc": float}, SELDOM),
    Question(("nvmlDeviceGetComputeRunningProcesses_v3",), (), {"processes": len}, SELDOM),
)


class Gpus:
    """Asks about once a second, on a thread that is replaced when it hangs. Somebody calls `look_after` as often.

    Args:
        tell: takes events for the journal, from any thread: `telemetry_lost` (once, until it is back), `telemetry_back`,
            `gpu_lost`, `gpu_xid`.
    """

    def __init__(self, tell: Tell, *, hang_s: float = HANG_S, again_s: float = AGAIN_S) -> None:
        self._tell, self._hang_s, self._again_s = tell, hang_s, again_s
        self._known: set[tuple[Any, ...]] = set()  # what has been told
        self._hanging: list[_Asker] = []
        self._lost_s: float | None = None
        self._next_s, self._pause_s = 0.0, again_s
        self._asker: _Asker | None = None
        self._begin()

    def values(self) -> dict[str, float]:
        """The newest figures; empty when there are none of now."""
        at_s, values = self._asker.reading if self._asker else (0.0, {})
        return values if time.monotonic() - at_s < STALE_S else {}

    def look_after(self) -> None:
        """Leave a thread behind that hangs or has failed, and send another later."""
        now_s = time.monotonic()
        if self._asker is None:
            self._hanging = [asker for asker in self._hanging if asker.is_alive()]
            if now_s >= self._next_s and len(self._hanging) < LEFT_AT_MOST:
                self._begin()
            return
        call, since_s = self._asker.calling
        if call and now_s - since_s > self._hang_s:
            self._hanging.append(self._asker)
            self._lose(f"{call} has not returned for {now_s - since_s:.0f} s")
        elif self._asker.failed:
            self._lose(self._asker.failed)
        elif self._lost_s is not None and self._asker.reading[0]:
            self._tell("telemetry_back", {"of": "nvml", "after_s": round(now_s - self._lost_s, 1)})
            self._lost_s, self._pause_s = None, self._again_s

    def stop(self) -> None:
        if self._asker:
            self._asker.leave()

    def _begin(self) -> None:
        self._asker = _Asker(self._tell_once)
        self._asker.start()

    def _lose(self, why: str) -> None:
        self.stop()
        self._asker, now_s = None, time.monotonic()
        if self._lost_s is None:
            self._tell("telemetry_lost", {"of": "nvml", "why": why})
            self._lost_s = now_s
        self._next_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, AGAIN_AT_MOST_S)

    def _tell_once(self, kind: str, facts: dict[str, Any]) -> None:
        if (what := (kind, *facts.values())) not in self._known:
            self._known.add(what)
            self._tell(kind, facts)


class _Asker(threading.Thread):
    """Attributes:
    reading: when, and the figures. calling: which call it is in, and since when; an empty name between two.
    failed: why it has ended; empty while it lives, and where there is no driver.
    """

    def __init__(self, tell: Tell) -> None:
        super().__init__(name="nvml", daemon=True)
        self.reading: tuple[float, dict[str, float]] = (0.0, {})
        self.calling, self.failed = ("", 0.0), ""
        self._tell, self._left = tell, threading.Event()
        self._said: dict[tuple[int, int], dict[str, float]] = {}  # by device and question
        self._passes = 0

    def leave(self) -> None:
        self._left.set()

    def run(self) -> None:
        try:
            self._nvml = pynvml = binding()
        except OSError:
            return
        try:
            self._call("nvmlInit")
            self._handles = self._visible()
            self._events = self._xids()
            while not self._left.is_set():
                values = dict(self._figures())
                self.reading = time.monotonic(), values
                self._hear_xids()
                self._passes += 1
                self._left.wait(1.0)
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            return
        except Exception as error:  # whatever a driver makes of its binding
            self.failed = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: Any) -> Any:
        self.calling = name, time.monotonic()
        try:
            return getattr(self._nvml, name)(*arguments)
        finally:
            self.calling = "", 0.0

    def _visible(self) -> dict[int, Any]:
        """By NVML's number, those that CUDA would see."""
        handles = {
            index: self._call("nvmlDeviceGetHandleByIndex", index) for index in range(self._call("nvmlDeviceGetCount"))
        }
        names = {}
        for index, handle in handles.items():
            with contextlib.suppress(self._nvml.NVMLError):
                names[index] = self._call("nvmlDeviceGetUUID", handle)
        return {
            index: handles[index]
            for index in cuda_visible.indices(handles, names, os.environ.get(cuda_visible.VARIABLE))
        }

    def _figures(self) -> Iterator[tuple[str, float]]:
        for index, handle in self._handles.items():
            try:
                for number, question in enumerate(QUESTIONS):
                    if self._passes % question.every == 0:
                        self._said[index, number] = self._answers(handle, question)
                    for name, value in self._said.get((index, number), {}).items():
                        yield f"gpu{index}.{name}", value
            except self._nvml.NVMLError_GpuIsLost:
                self._tell("gpu_lost", {"gpu": index})

    def _answers(self, handle: Any, question: Question) -> dict[str, float]:
        """What the driver does not tell is absent."""
        for call in question.calls:
            try:
                said = self._call(call, handle, *question.arguments)
            except self._nvml.NVMLError_GpuIsLost:
                raise
            except (self._nvml.NVMLError, AttributeError):  # not by this driver, or not by this pynvml
                continue
            return {name: float(of(said)) for name, of in question.answers.items()}
        return {}

    def _xids(self) -> Any:
        """A set that the driver puts each GPU's XID errors into; None where it does not tell."""
        try:
            events = self._call("nvmlEventSetCreate")
            for handle in self._handles.values():
                self._call("nvmlDeviceRegisterEvents", handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        except self._nvml.NVMLError:
            return None
        return events

    def _hear_xids(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):  # a time-out: no more of them
            while self._events is not None:
                event = self._call("nvmlEventSetWait_v2", self._events, 0)
                self._tell(
                    "gpu_xid", {"gpu": self._call("nvmlDeviceGetIndex", event.device), "xid": int(event.eventData)}
                )


def uuids_of(nvml: Any) -> dict[int, str]:
    """Of all GPUs, by NVML's index; empty where the driver does not tell it. Within `asked`."""
    uuids = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        uuids[index] = ""
        with contextlib.suppress(nvml.NVMLError):
            uuids[index] = as_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    return uuids


def as_text(value: str | bytes) -> str:
    """What NVML says as text; bytes in older bindings."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def binding() -> Any:
    """pynvml, which takes 2 MB of memory: only where there is a driver for it. Raises: OSError."""
    ctypes.CDLL("libnvidia-ml.so.1")
    import pynvml

    return pynvml


NO_DRIVER = ("OSError", "NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded", "NVMLError_NoPermission")
"""What is raised where no GPU can be used through NVML; the first by a library that is not there."""


class DriverSilent(OSError):
    """There is a driver, and it hangs or fails."""


_hanging: threading.Thread | None = None


def asked(ask: Callable[[], Answer], *, timeout_s: float = HANG_S) -> Answer | None:
    """The driver's answer; None where there is no driver. While one call hangs no other follows it.

    Raises: DriverSilent.
    """
    global _hanging
    if _hanging and _hanging.is_alive():
        raise DriverSilent("the driver hangs in an earlier call")
    answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    thread = threading.Thread(target=run, name="nvml-once", daemon=True)
    thread.start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        _hanging = thread
        raise DriverSilent(f"the driver has not answered within {timeout_s:g} s") from None
    if not isinstance(answer, Exception):
        return answer
    if type(answer).__name__ in NO_DRIVER:
        return None
    raise DriverSilent(f"the driver fails: {answer}")


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """NVML, for one question within `asked`. Raises whatever it does."""
    pynvml = binding()
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
