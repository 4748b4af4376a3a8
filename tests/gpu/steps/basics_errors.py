"""What CUDA's libraries raise when memory runs out, and what is left to say in a dead context."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from gpu.step import Probes, Report, describe
from gpu.steps.common import MIB, synchronize
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.worker.memory import oom

probes = Probes()


def _alloc(device: str, big: bool) -> None:
    torch.empty(1 << 30 if big else 1000, device=device)


def _conv(device: str, big: bool, *, dtype: torch.dtype = torch.float32) -> None:
    side = 96 if big else 8
    with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        out = nn.Conv3d(32, 32, 3, padding=1).to(device)(torch.randn(2, 32, side, side, side, device=device))
    out.float().sum().backward()


def _matmul(device: str, big: bool) -> None:
    size = 8192 if big else 16
    (torch.randn(size, size, device=device) @ torch.randn(size, size, device=device)).sum().item()


def _fft(device: str, big: bool) -> None:
    side = 96 if big else 8
    torch.fft.fftn(torch.randn(2, 32, side, side, side, device=device)).abs().sum().item()


def _solver(device: str, big: bool) -> None:
    torch.linalg.svd(torch.randn(*(2 * (3000 if big else 8,)), device=device))


def _lstm(device: str, big: bool) -> None:
    size = 64 if big else 4
    net = nn.LSTM(8 * size, 32 * size, 3).to(device)
    net(torch.randn(8 * size, size, 8 * size, device=device))[0].sum().backward()


def _attention(device: str, big: bool) -> None:
    x = torch.randn(4, 8, 4096 if big else 16, 64, device=device, requires_grad=True)
    F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.zeros(x.shape[-2], x.shape[-2], device=device)
    ).sum().backward()


LIBRARIES: dict[str, Callable[[str, bool], None]] = {
    "alloc": _alloc,
    "conv": _conv,
    "conv.half": functools.partial(_conv, dtype=torch.float16),
    "matmul": _matmul,
    "fft": _fft,
    "solver": _solver,
    "lstm": _lstm,
    "attention": _attention,
}
LEFT_MIB = {
    "alloc": (40,),
    "conv": (480, 720),
    "conv.half": (480, 720),
    "matmul": (300, 780),
    "fft": (300, 800),
    "solver": (60, 150),
    "lstm": (400, 700),
    "attention": (60, 300),
}
"""What the allocator is left: less than the operation's own tensors take, then enough for them and little for a workspace."""


def out_of_memory(library: str, spare_mib: int, report: Report) -> None:
    """With so little memory left, a library either succeeds or raises an error that is recognised."""
    if report.is_on_gpu:
        _warm_up(report.device)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare_mib * MIB) / total)
    _expect_recognition(report, f"{library} with {spare_mib} MiB left", LIBRARIES[library])


def _warm_up(device: str) -> None:
    """Create the context and the handles first: their memory does not count."""
    (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item()
    torch.cuda.synchronize()


def _expect_recognition(report: Report, check: str, work: Callable[[str, bool], None]) -> None:
    try:
        work(report.device, report.is_on_gpu)
        synchronize(torch.device(report.device))
    except Exception as error:
        recognised, retry = oom.is_out_of_memory(error), oom.can_retry(error)
        refused = torch.cuda.memory_stats().get("num_ooms") if report.is_on_gpu else 0
        result = f"{'recognised' if recognised else 'NOT RECOGNISED'}, {'can' if retry else 'cannot'} be tried again: "
        report.check(
            check,
            f"{result}{describe(error)}; num_ooms {refused}",
            "no error, or one that is recognised",
            ok=recognised,
        )
    else:
        report.check(check, "no error", "no error, or one that is recognised", ok=True)


for _how, _levels in LEFT_MIB.items():
    for _spare in _levels:
        probes(limit_s=45, name=f"out_of_memory_{_how}_{_spare}")(functools.partial(out_of_memory, _how, _spare))


def full_device(library: str, report: Report) -> None:
    """The device itself is full when a library makes its handle: its memory does not come from PyTorch's allocator."""
    held = []
    if report.is_on_gpu:
        torch.ones(1, device=report.device).add_(1)
        size = 1 << 30
        while size >= 2 * MIB:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device=report.device))
            except torch.cuda.OutOfMemoryError:
                size //= 2
        report.note("left on the device", f"{torch.cuda.mem_get_info()[0] // MIB} MiB")
    _expect_recognition(
        report, f"first use of {library} on a full device", lambda device, _: LIBRARIES[library](device, False)
    )
    report.note("held", f"{len(held)} parts")


for _how in ("matmul", "conv", "solver", "lstm"):
    probes(limit_s=45, name=f"full_device_{_how}")(functools.partial(full_device, _how))


@probes(limit_s=60)
def dead_context(report: Report) -> None:
    """After a device-side assert every CUDA call raises: the record of why must be written all the same."""
    from kgorch.worker.entry import ExitRecord

    launch = LaunchSpec("r", "id", "s", "1.1", str(report.folder), "e:f", ".", 1, "nobody.sock", "c", "o", "h")
    try:
        table, index = torch.ones(2, 2, device=report.device), torch.tensor([99], device=report.device)
        F.embedding(index, table).sum().item()
        report.check("an index out of range raises", "nothing", "an error")
        return
    except Exception as error:
        report.note("an index out of range", describe(error))
        report.check("it is no lack of memory", oom.is_out_of_memory(error), False)
        with report.guard("its record is written"):
            ExitRecord(launch, 0).write("failed", error)
            report.check("its record is written", (report.folder / "rank0.status.json").exists())
    followers = (
        "CUBLAS_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "unable to find an engine",
    )
    for text in followers:
        with report.guard(f"a following {text!r} in the dead context", "no exception"):
            oom.ran_out(RuntimeError(text))
            report.check(f"a following {text!r} in the dead context", "no exception", "no exception")
