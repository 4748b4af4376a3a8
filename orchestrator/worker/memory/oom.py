"""Classification of an exception as an out-of-memory error, and of the memory that ran out.

The type decides first, along its MRO, then the text, case folded. Some libraries report something else when an allocation of theirs
fails (cuDNN: "unable to find an engine"). Such an error counts when CUDA's allocator has refused an allocation since the last
look, or when the device is full. A dead CUDA context may report "out of memory", too, but nothing can be retried in it.
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
    "cusolver_status_internal_error",  # of its first use, where 12 MiB were left (H100, PyTorch 2.11)
    "cusolver_status_not_initialized",
    "cusparse_status_not_initialized",
    "cufft_internal_error",
)
FULL = 0.9
"""Share of the device in use above which ambiguous errors count: cuBLAS asks the driver, not PyTorch's allocator."""


class Refusals:
    """Allocations that PyTorch's CUDA allocator has refused in this process (`num_ooms`), and how many of them were looked at.

    Some refusals raise no error: cuDNN tries its plans in order and takes the next one that fits. And by the time an error is
    raised the allocator has returned its cache, so how full the device is then proves little.
    """

    def __init__(self) -> None:
        self._looked_at = 0

    def count(self) -> int:
        """All refusals so far; 0 before CUDA is initialised."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))

    def unknown(self) -> int:
        """Refusals since the last look."""
        return self.count() - self._looked_at

    def look(self) -> int:
        """Refusals since the last look, which now count as known."""
        unknown = self.unknown()
        self._looked_at += unknown
        return unknown


refusals = Refusals()

OPTIMIZER = re.compile(r"[/\\]optim(izers?)?[/\\]\w+\.py$")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, of a device or of the host."""
    text = str(error).casefold()
    if any(kind.__name__ in _TYPES for kind in type(error).__mro__):
        return True
    if any(sign in text for sign in (*_TEXTS, *_DEAD[:1])):
        return True
    return any(sign in text for sign in _AMBIGUOUS) and (refusals.unknown() > 0 or _is_full())


class LadderEnds(RuntimeError):
    """Memory ran out, and no rung is left that this process can take: the next one starts a new attempt.

    Attributes:
        is_collateral: memory ran out on another rank.
    """

    is_collateral = False


def ran_out(error: BaseException) -> str:
    """The memory that ran out (see `where`), by an error that ends a rank or by one of its causes; empty when none did."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LadderEnds):
            return "device"
        if is_out_of_memory(cause):
            return where(cause)
        cause = cause.__cause__
    return ""


def can_retry(error: BaseException) -> bool:
    """False for a dead CUDA context, which needs a new process."""
    text = f"{type(error).__name__}: {error}".casefold()
    return not any(sign in text for sign in _DEAD)


def where(error: BaseException) -> str:
    """The memory that ran out: "device", "optimizer" (the device's, but a smaller batch would not help), or "host".

    An error of the host's allocator means "host" in a training on a GPU; on the CPU host and device are the same.
    """
    if _came_from_a_step(error.__traceback__):
        return "optimizer"
    text = str(error).casefold()
    on_host = isinstance(error, MemoryError) or any(
        sign in text for sign in ("defaultcpuallocator", "std::bad_alloc", "cannot allocate memory")
    )
    return "host" if on_host and torch.cuda.is_available() else "device"


def first_line(error: BaseException) -> str:
    """Type and first line of the error: text that keeps nothing alive of what the error refers to."""
    line = next(iter(str(error).strip().splitlines()), "")
    line = re.sub(r"^\[enforce fail at [^\]]*\][^:]*\. ?", "", line)
    return f"{type(error).__name__}: {line}"[:300]


def _came_from_a_step(trace: TracebackType | None) -> bool:
    """Whether the traceback goes through an optimizer's `step`. The folder alone proves nothing: a script may lie in `optim`."""
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
    except RuntimeError:  # the context is dead; the caller still has to write its record
        return False
    return bool(free < (1 - FULL) * total)
