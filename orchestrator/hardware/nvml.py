"""NVML, the library of NVIDIA's driver: opening it, and queries with a time limit, since a call of the driver may never return."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

HANG_S = 5.0
"""Seconds after which a call of the driver is not waited for any more."""

FIRST_S = 30.0
"""The same before any call of this process has been answered: where nobody uses the GPUs and persistence mode is off, the driver
initializes one after another, which takes seconds each."""

Answer = TypeVar("Answer")

NO_DRIVER_LOADED = ("OSError", "NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
"""Names of the errors that mean there is no driver; the first is raised where the shared library does not exist."""

NO_DRIVER_ERRORS = (*NO_DRIVER_LOADED, "NVMLError_NoPermission")
"""Names of the errors that mean no GPU can be used through NVML."""

UNANSWERED = "a GPU that does not answer"
"""Name of a GPU that is lost or must not be used: NVML counts it, and its handle or its name cannot be had."""


class DriverUnresponsive(OSError):
    """There is a driver, and it hangs or fails."""


_hung_call: threading.Thread | None = None
"""The thread of the last call that did not return in time."""

_has_answered = False
"""A call of this process has returned in time."""


def query(call: Callable[[], Answer], *, timeout_s: float = HANG_S) -> Answer | None:
    """Run `call`, which uses `library`, on a thread; its result, or None where there is no driver.

    While one call hangs no other is started: each would cost a thread that cannot be ended.

    Raises: DriverUnresponsive.
    """
    global _hung_call, _has_answered
    if _hung_call and _hung_call.is_alive():
        raise DriverUnresponsive("the driver hangs in an earlier call")
    answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(call())
        except Exception as error:
            answers.put(error)

    # a daemon thread: a call that never returns must not keep this process from ending
    thread = threading.Thread(target=run, name="nvml-once", daemon=True)
    thread.start()
    try:
        timeout_s = timeout_s if _has_answered else max(timeout_s, FIRST_S)
        answer = answers.get(timeout=timeout_s)
        _has_answered = True
    except queue.Empty:
        _hung_call = thread
        raise DriverUnresponsive(f"the driver has not answered within {timeout_s:g} s") from None
    if not isinstance(answer, Exception):
        return answer
    if type(answer).__name__ in NO_DRIVER_ERRORS:
        return None
    raise DriverUnresponsive(f"the driver fails: {answer}")


def invoke(lib: Any, name: str, *arguments: Any) -> Any:
    """Call a function of NVML by its name."""
    return getattr(lib, name)(*arguments)


@contextlib.contextmanager
def library(call: Callable[..., Any] = invoke) -> Iterator[Any]:
    """pynvml, initialized, and shut down when the block ends. For `query` or a thread that may hang.

    Args:
        call: makes the calls that initialize and shut down, so that a caller can see where it hangs.
    Raises: OSError without a driver; whatever NVML raises.
    """
    ctypes.CDLL("libnvidia-ml.so.1")  # pynvml takes 2 MB of memory: it is loaded only where there is a driver for it
    with warnings.catch_warnings():
        # where a package named pynvml is installed, too, which asks for the one that kgorch requires
        warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
        import pynvml

    call(pynvml, "nvmlInit")
    try:
        yield pynvml
    except BaseException:
        with contextlib.suppress(Exception):
            call(pynvml, "nvmlShutdown")
        raise
    call(pynvml, "nvmlShutdown")


def gpu_uuids(lib: Any) -> dict[int, str]:
    """UUIDs of all GPUs by NVML's index; empty where the driver does not report one. Within `library`."""
    uuids = {}
    for index in range(lib.nvmlDeviceGetCount()):
        uuids[index] = ""
        with contextlib.suppress(lib.NVMLError):
            uuids[index] = to_text(lib.nvmlDeviceGetUUID(lib.nvmlDeviceGetHandleByIndex(index)))
    return uuids


def to_text(value: str | bytes) -> str:
    """A string of NVML; older bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
