"""Host memory that the device copies into by itself: registration, layouts, torn copies, speed."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from gpu.step import Probes, Report
from gpu.steps.common import MIB, synchronize
from kgorch.protocol.snapshot_messages import STAMP_BYTES

probes = Probes()


def memfd(size: int) -> int:
    descriptor = os.memfd_create("kgorch-gpu")
    os.ftruncate(descriptor, size)
    return descriptor


@probes(limit_s=90)
def pinned_image(report: Report) -> None:
    """A snapshot is equal to the state for every memory layout, and the copy takes no GPU memory."""
    from kgorch.worker.checkpoint.snapshot_buffer import SnapshotBuffer

    device, size = report.device, (512 if report.is_on_gpu else 8) * MIB
    began_s = time.monotonic()
    image = SnapshotBuffer(memfd(size + STAMP_BYTES), size, pinned=report.is_on_gpu)
    report.note("seconds to map and register", f"{time.monotonic() - began_s:.2f} s for {size // MIB} MiB")
    if report.on_gpu("the image is registered with CUDA"):
        report.check("the image is registered with CUDA", _is_pinned(image))
    wide = 512 if report.is_on_gpu else 8
    tensors = {
        "a.channels_last": torch.randn(wide, 128, 16, 16, device=device).to(memory_format=torch.channels_last),
        "a.bf16": torch.randn(1001, device=device, dtype=torch.bfloat16),
        "a.fp16": torch.randn(77, device=device, dtype=torch.float16),
        "a.expanded": torch.randn(1, 7, device=device).expand(5, 7),
        "a.transposed": torch.randn(33, 5, device=device).t(),
        "a.bool": torch.rand(13, device=device) > 0.5,
        "a.cpu_scalar": torch.tensor(3.0),
        "a.plain": torch.randn(4 * MIB if report.is_on_gpu else 1000, device=device),
    }
    synchronize(torch.device(device))
    reserved = torch.cuda.memory_reserved() if report.is_on_gpu else 0
    for number in (1, 2):
        image.fill(tensors, {"x.json": b"{}"}, number)
    for name, view in image._views.items():
        report.check(f"equal: {name.removeprefix('a.')}", torch.equal(view, tensors[name].cpu().contiguous()))
    if report.on_gpu("GPU memory that a snapshot takes, with 64 MiB in channels_last"):
        grown = (torch.cuda.memory_reserved() - reserved) / MIB
        report.at_most("GPU memory that a snapshot takes, with 64 MiB in channels_last", grown, 4.0, "MiB")


def _is_pinned(image) -> bool:
    return bool(getattr(image, "is_pinned", getattr(image, "_stream", None) is not None))


@probes(limit_s=60)
def torn_snapshot(report: Report) -> None:
    """The training may write to its tensors as soon as `fill` returns: the image must hold what was there before."""
    from kgorch.worker.checkpoint.snapshot_buffer import SnapshotBuffer

    size = (400 if report.is_on_gpu else 4) * MIB
    image = SnapshotBuffer(memfd(size + STAMP_BYTES), size, pinned=report.is_on_gpu)
    state = torch.zeros((size - MIB) // 4, device=report.device)
    torn = []
    for number in range(50):
        image.fill({"a": state}, {}, number + 1)
        state.add_(1.0)
        held = image._views["a"]
        if float(held[0]) != number or float(held[-1]) != number:
            torn.append(number)
    report.check("snapshots of 50 that are torn by a write right behind them", torn, [])


@probes(limit_s=60)
def failed_registration(report: Report) -> None:
    """CUDA keeps the error of a failed registration and raises it at the next kernel, whatever that computes."""
    from kgorch.worker.checkpoint import snapshot_buffer as images

    size, maps = 4 * MIB, list[mmap.mmap]()
    real = mmap.mmap

    def same(*args: object, **options: object) -> mmap.mmap:
        """The same memory for each image, so that the second one registers what is registered already."""
        if not maps:
            maps.append(real(*args, **options))
        return maps[0]

    with mock.patch.object(images.mmap, "mmap", same):
        first = images.SnapshotBuffer(memfd(size + STAMP_BYTES), size, pinned=report.is_on_gpu)
        second = images.SnapshotBuffer(memfd(size + STAMP_BYTES), size, pinned=report.is_on_gpu)
    if report.on_gpu("the second registration fails"):
        report.check("the second registration fails", not _is_pinned(second))
    with report.guard("the next kernel after a failed registration", 2.0):
        result = float(torch.ones(4, device=report.device).add_(1)[0])
        report.check("the next kernel after a failed registration", result, 2.0)
    with report.guard("an image that is not registered takes a snapshot"):
        state = torch.randn(1000, device=report.device)
        second.fill({"a": state}, {}, 1)
        report.check("an image that is not registered takes a snapshot", torch.equal(second._views["a"], state.cpu()))
    report.note("images", f"first pinned: {_is_pinned(first)}, second: {_is_pinned(second)}")
    if report.on_gpu("whether a file on disk can be registered"):
        _register_a_file(report)


def _register_a_file(report: Report) -> None:
    path = report.folder / "image"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, 64 * MIB)
    area = mmap.mmap(descriptor, 64 * MIB)
    view = torch.frombuffer(area, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0))
    report.note("whether a file on disk can be registered", "yes" if code == 0 else f"no, CUDA error {code}")


@probes(limit_s=90)
def blocking_part(report: Report) -> None:
    """The blocking part of a save against a plain copy of as many bytes to pinned memory in the same process."""
    from kgorch.worker.checkpoint.snapshot_buffer import SnapshotBuffer

    size = (1024 if report.is_on_gpu else 16) * MIB
    state = torch.randn((size - MIB) // 4, device=report.device)
    image = SnapshotBuffer(memfd(size + STAMP_BYTES), size, pinned=report.is_on_gpu)
    pinned = torch.empty(state.shape, pin_memory=report.is_on_gpu)
    plain_s, ours_s = [], []
    for number in range(7):
        plain_s.append(_timed(lambda: pinned.copy_(state, non_blocking=True), report.device))
        ours_s.append(_timed(lambda number=number: image.fill({"a": state}, {}, number + 1), report.device))
    plain, ours = (state.nbytes / statistics.median(times[2:]) / 1e9 for times in (plain_s, ours_s))
    report.note("a plain copy to pinned memory", f"{plain:.1f} GB/s")
    if report.on_gpu("speed of a snapshot, of that of the plain copy"):
        report.at_least("speed of a snapshot, of that of the plain copy", ours / plain, 0.8)
    else:
        report.note("a snapshot", f"{ours:.1f} GB/s")


def _timed(work: Callable[[], object], device: str) -> float:
    synchronize(torch.device(device))
    began_s = time.perf_counter()
    work()
    synchronize(torch.device(device))
    return time.perf_counter() - began_s
