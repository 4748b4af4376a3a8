"""Whether an exception says that memory ran out, and which memory.

By type along its MRO, then by text, case folded. Some libraries say something else when an allocation of theirs was refused
(cuDNN: "unable to find an engine"): such an error counts when CUDA's allocator has refused something since the last look, or the
device is full. A dead CUDA context may say "out of memory", too, but nothing can be tried again in it.
"""

from __future__ import annotations

import re
from types import TracebackType

import torch

_TYPES = ("OutOfMemoryError", "MemoryError")
_TEXTS = (
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "cuda driver error: out of memory",  # expandable segments: the context lives
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "device_allocation_failed",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "cufft_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "cannot allocate memory",
    "cuda failure 'out of memory'",
    "cuda failure 2 'out of memory'",
)
_DEAD = ("cuda error: out of memory", "acceleratorerror", "cuda failure")
_AMBIGUOUS = (
    "cudnn_status_not_supported",
    "cudnn_status_internal_error",
    "cudnn_status_not_initialized",
    "unable to find an engine",
    "cublas_status_not_initialized",
)
FULL = 0.9
"""Ambiguous errors count where so much of the device is taken: cuBLAS asks the driver, not PyTorch's allocator."""


class Refusals:
    """Allocations that PyTorch's CUDA allocator has refused in this process (`num_ooms`), and how many of them are known.

    A refusal that nobody saw was swallowed: cuDNN tries its plans in order and takes the next one that fits, without a word. And
    by the time an error is raised the allocator has given its cache back, so how full the device is then tells little.
    """

    def __init__(self) -> None:
        self._known = 0

    def count(self) -> int:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))

    def unknown(self) -> int:
        return self.count() - self._known

    def look(self) -> int:
        """How many there have been since the last look."""
        unknown = self.unknown()
        self._known += unknown
        return unknown


refusals = Refusals()

OPTIMIZER = re.compile(r"[/\\]optim(izers?)?[/\\]\w+\.py$")


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).casefold()
    if any(kind.__name__ in _TYPES for kind in type(error).__mro__):
        return True
    if any(sign in text for sign in (*_TEXTS, *_DEAD[:1])):
        return True
    return any(sign in text for sign in _AMBIGUOUS) and (refusals.unknown() > 0 or _is_full())


class LadderEnds(RuntimeError):
    """Memory ran out, and no rung that can be taken in this process is left: the next one begins another attempt.

    Attributes:
        is_collateral: it ran out on another rank.
    """

    is_collateral = False


def ran_out(error: BaseException) -> str:
    """Which memory, of an error that ends a rank, or of what it was raised from; empty when none did."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, LadderEnds):
            return "device"
        if is_out_of_memory(seen):
            return where(seen)
        seen = seen.__cause__
    return ""


def can_retry(error: BaseException) -> bool:
    """False for a dead context: a new process is needed."""
    text = f"{type(error).__name__}: {error}".casefold()
    return not any(sign in text for sign in _DEAD)


def where(error: BaseException) -> str:
    """Which memory: "device", "optimizer" (the device's, but no smaller batch would help), or "host".

    What the host's allocator says in a training on a GPU is the host's; in one on the CPU they are the same.
    """
    if _came_from_a_step(error.__traceback__):
        return "optimizer"
    text = str(error).casefold()
    on_host = isinstance(error, MemoryError) or any(
        sign in text for sign in ("defaultcpuallocator", "std::bad_alloc", "cannot allocate memory")
    )
    return "host" if on_host and torch.cuda.is_available() else "device"


def said(error: BaseException) -> str:
    """One line of it, that holds no reference to what the error holds."""
    line = next(iter(str(error).strip().splitlines()), "")
    line = re.sub(r"^\[enforce fail at [^\]]*\][^:]*\. ?", "", line)
    return f"{type(error).__name__}: {line}"[:300]


def _came_from_a_step(trace: TracebackType | None) -> bool:
    """Through an optimizer's `step`, PyTorch's or another library's; a person may keep the whole training in a folder `optim`."""
    while trace:
        code = trace.tb_frame.f_code
        if code.co_name == "step" and OPTIMIZER.search(code.co_filename):
            return True
        trace = trace.tb_next
    return False


def _is_full() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except (
        RuntimeError
    ):  # the context is dead, of whatever this error says: the record of it must be written all the same
        return False
    return bool(free < (1 - FULL) * total)
