"""The parts of kgorch that only CUDA exercises, each without a session around it. The other basics_ modules belong to this step."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpu import training
from gpu.step import Probes, Report, describe
from gpu.steps import basics_errors, basics_image, basics_random
from gpu.steps.common import IMPOSSIBLE, make_deterministic, sleep_cycles, synchronize
from kgorch.worker.memory import oom

probes = Probes()


@contextlib.contextmanager
def process_group(report: Report) -> Iterator[torch.device]:
    """A process group of one, made as a rank of kgorch makes it."""
    from kgorch.worker.ranks import process_group

    device = process_group.join()[2]
    report.check("the rank's device", device.type, report.device)
    try:
        yield device
    finally:
        began_s = time.monotonic()
        dist.destroy_process_group()
        report.at_most("the process group is destroyed", time.monotonic() - began_s, 10.0)


@probes(limit_s=60)
def first_kernel(report: Report) -> None:
    """PyTorch computes, and its out-of-memory error is recognised."""
    x = torch.arange(1000.0, device=report.device)
    report.check("a sum on the device", float(x.sum()), 499500.0)
    try:
        torch.empty(IMPOSSIBLE, device=report.device)
    except Exception as error:
        verdict = ", ".join(
            ["recognised"] * oom.is_out_of_memory(error) + ["can be tried again"] * oom.can_retry(error)
        )
        report.check("an impossible allocation is a lack of memory", verdict, "recognised, can be tried again")
        report.note("what it says", describe(error))
    else:
        report.check("an impossible allocation raises", "it was granted", "an error")
    if report.on_gpu("the capability of the device"):
        report.note("the capability of the device", torch.cuda.get_device_capability())


@probes(limit_s=60)
def sequence_number(report: Report) -> None:
    """The drain protocol counts collectives by the backend's sequence number. Without it the first step would raise."""
    from kgorch.worker.memory.ddp_drain import GradientReduction

    with process_group(report) as device:
        group = dist.distributed_c10d._get_default_group()
        backend = group._get_backend(device)
        report.note("backend", type(backend).__name__)
        if report.on_gpu("gradients go over NCCL"):
            report.check("gradients go over NCCL", type(backend).__name__, "ProcessGroupNCCL")
        with report.guard("an all-reduce raises the backend's sequence number by", 1):
            before = backend._get_sequence_number_for_group()
            dist.all_reduce(torch.ones(4, device=device))
            after = backend._get_sequence_number_for_group()
            report.check("an all-reduce raises the backend's sequence number by", after - before, 1)
        with report.guard("a plain DDP can be drained", "drain"):
            reduction = GradientReduction([DistributedDataParallel(nn.Linear(4, 4).to(device))])
            report.check("a plain DDP can be drained", reduction.mode(microbatched=False), "drain")
        with contextlib.suppress(Exception):  # a private name, for a note
            report.note("time-out of collectives", backend.options._timeout)


class Fails(torch.autograd.Function):
    """Passes on what it is given, and asks for too much memory in the backward while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if Fails.armed:
            torch.empty(IMPOSSIBLE, device=gradient.device)
        return gradient


class Drained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(512, 1024), nn.Linear(1024, 512), nn.BatchNorm1d(512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.last(Fails.apply(self.first(x))))


@probes(limit_s=90)
def drained_reduction(report: Report) -> None:
    """Memory runs out in a backward between two all-reduces of DDP. The rank joins the remaining ones and repeats the step."""
    from kgorch.worker.memory.ddp_drain import GradientReduction

    make_deterministic(report.device)
    with process_group(report) as device:
        for option in ("", "find_unused_parameters", "gradient_as_bucket_view"):
            with report.guard(f"equal gradients after it ({option or 'plain'})"):
                torch.manual_seed(0)
                flags = {option: True} if option else {}
                ddp = DistributedDataParallel(Drained().to(device), bucket_cap_mb=1, **flags)
                _drain_once(
                    report, ddp, GradientReduction([ddp]), torch.randn(64, 512, device=device), option or "plain"
                )


def _drain_once(report: Report, ddp: DistributedDataParallel, reduction, x: torch.Tensor, what: str) -> None:
    def step() -> None:
        for weight in ddp.parameters():
            weight.grad = None
        reduction.begin()
        ddp(x).pow(2).mean().backward()

    for _ in range(3):
        step()
        reduction.finish()
    expected = [weight.grad.clone() for weight in ddp.parameters() if weight.grad is not None]
    Fails.armed = True
    try:
        step()
        report.check(f"the backward raises ({what})", "nothing", "a lack of memory")
    except Exception as error:
        report.check(
            f"the backward raises ({what})", describe(error), "a lack of memory", ok=oom.is_out_of_memory(error)
        )
    finally:
        Fails.armed = False
    for weight in ddp.parameters():
        weight.grad = None
    synchronize(x.device)
    reduction.drain()
    reduction.reset()
    step()
    reduction.finish()
    synchronize(x.device)
    result = [weight.grad for weight in ddp.parameters() if weight.grad is not None]
    same = len(result) == len(expected) and all(map(torch.equal, expected, result))
    report.check(f"equal gradients after it ({what})", same)


for module in (basics_image, basics_errors, basics_random):
    probes.all += module.probes.all


# What a step costs the host


@probes(limit_s=90)
def waits(report: Report) -> None:
    """A step under kgorch waits for the device no more often than PyTorch's own, also while the device is busy."""
    args = {"steps": 60 if report.is_on_gpu else 12}
    attempt = training.train(
        report,
        "costs",
        args,
        program="costs.py",
        deterministic="off",
        ladder=["microbatch/2"],
        health={"nan": ["skip"]},
    )
    if not training.see_that_it_ended(report, attempt, "the training ends"):
        return
    facts = training.facts_of(attempt)
    report.note(
        "microseconds of a step on the host", json.dumps({k: round(facts[k] * 1e6) for k in ("plain_s", "kgorch_s")})
    )
    if report.on_gpu("waits of a step under kgorch", "seconds that a step stands still behind a busy device"):
        report.note("waits of a plain step", facts["plain_waits"])
        result, plain = facts["kgorch_waits"], facts["plain_waits"]
        report.check(
            "waits of a step under kgorch", f"{result} {facts['waits_at']}", f"at most {plain}", ok=result <= plain
        )
        report.at_most("seconds that a step stands still behind a busy device", facts["behind_busy_s"], 0.1)
        report.note("the same for a plain step", f"{facts['plain_behind_busy_s']:.3f} s")


@probes(limit_s=60)
def parts_of_a_step(report: Report) -> None:
    """Each of kgorch's parts of a step, with a kernel of 50 ms before it: none may wait for that."""
    from kgorch.worker.health.loss_guard import PendingLosses
    from kgorch.worker.memory.oom_retry import BufferCopies
    from kgorch.worker.rng_state import RngCache

    device = torch.device(report.device, 0) if report.is_on_gpu else torch.device("cpu")
    layers = [layer for _ in range(50) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))]
    buffers, chance = BufferCopies([nn.Sequential(*layers).to(device)]), RngCache(device)
    loss, arriving = torch.ones(1, device=device), deque[PendingLosses](maxlen=4)
    parts: dict[str, Callable[[], object]] = {
        "random states kept": chance.now,
        "150 buffers kept": buffers.keep,
        "a loss on its way to the host": lambda: arriving.append(PendingLosses(loss, 0, 0, scaled=False)),
    }
    cycles = sleep_cycles(0.05) if report.is_on_gpu else 0
    for name, work in parts.items():
        for _ in range(10):
            work()
        synchronize(device)
        if cycles:
            torch.cuda._sleep(cycles)
        began_s = time.perf_counter()
        work()
        behind_s = time.perf_counter() - began_s
        synchronize(device)
        began_s = time.perf_counter()
        for _ in range(50):
            work()
        report.note(f"{name}: microseconds on the host", f"{(time.perf_counter() - began_s) / 50 * 1e6:.0f}")
        if report.on_gpu(f"{name}, behind a kernel of 50 ms"):
            report.at_most(f"{name}, behind a kernel of 50 ms", behind_s, 0.02)
        arriving.clear()
