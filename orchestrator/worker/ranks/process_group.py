"""The process group, device and random seeds of a rank: under kgorch, under plain torchrun, and alone."""

from __future__ import annotations

import os
import platform
import random
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kgorch.errors import KgorchError

UNLIMITED = timedelta(days=7)
"""Time-out of collectives under kgorch unless the plan names one: longer than any session. A rank may validate alone for hours
while the others wait for it in an all-reduce, and PyTorch's 10 minutes (NCCL) or 30 (gloo) would end such a run. kgorch
detects hangs itself, from the durations that each part of the run has had (core/session/hang_detection.py), which one limit for all
collectives cannot."""

NO_GPU = ("", "cpu", "unknown")
"""What a launch calls its device where the driver shows no GPU, or does not answer."""


class CudaUnusable(RuntimeError):
    """There is a GPU, and PyTorch cannot initialise it. Another attempt may: a GPU can be busy, or come back."""


class RankInfo(NamedTuple):
    """This process among the ranks.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
        device: the torch.device of this rank.
        owns_group: the process group was created here, and is to be destroyed here.
        shares_gpu: ranks of this machine share a GPU, so they communicate by gloo: NCCL takes one rank a GPU.
    """

    rank: int
    world_size: int
    device: torch.device
    owns_group: bool
    shares_gpu: bool = False


def require_ranks(ranks: int) -> None:
    """Raises: KgorchError where another number of processes trains together than the ranks that kgorch has started."""
    count = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if count == ranks:
        return
    raise KgorchError(
        f"this process is one of {count} that train together, and the stage has ranks = {ranks}",
        "kgorch starts a process for each rank, and knows none that the script starts itself (notebook_launcher, mp.spawn)",
        next_step=f"call what trains without that launcher, and give the stage `ranks = {count}`",
    )


def join(*, supervised: bool = False, gpus: str = "", timeout_s: float | None = None) -> RankInfo:
    """Choose the device and join the process group, which may exist already; a process alone makes a group of one.

    Where there is a GPU that this PyTorch was built for and cannot use, training on the CPU would spend the session's hours on a
    hundredth of the steps, so an error is raised instead.

    Args:
        supervised: kgorch has started this process.
        gpus: model of the GPUs that the driver shows to this process; one of NO_GPU where there is none, or it is not known.
        timeout_s: the plan's `[health] collective_timeout`, seconds; None for UNLIMITED under kgorch, and for PyTorch's own in a
            script that runs alone.

    Raises:
        KgorchError: the driver is too old for this PyTorch.
        CudaUnusable: the GPU cannot be initialised for another reason.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif gpus not in NO_GPU and torch.version.cuda:
        _explain_cuda(gpus)
    shares_gpu = device.type == "cuda" and _ranks_here(world_size) > torch.cuda.device_count()
    if dist.is_initialized():
        return RankInfo(dist.get_rank(), dist.get_world_size(), device, False, shares_gpu)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shares_gpu else "gloo"
    timeout = timedelta(seconds=timeout_s) if timeout_s is not None else UNLIMITED if supervised else None
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return RankInfo(rank, world_size, device, True, shares_gpu)


def _ranks_here(world_size: int) -> int:
    """Ranks of this machine, as torchrun sets them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _explain_cuda(gpus: str) -> None:
    """Raise the error that `join` describes."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    what = f"PyTorch {torch.__version__} cannot use the GPU ({gpus}): {reason}"
    if "driver on your system is too old" in reason:
        raise KgorchError(
            what,
            f"this PyTorch is built for CUDA {torch.version.cuda}",
            next_step="update the driver, or install a PyTorch that is built for an older CUDA",
            error_code="KG408",
        )
    raise CudaUnusable(
        f"{what}; CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}."
        " See whether nvidia-smi and `python -c 'import torch; torch.cuda.init()'` work;"
        ' to train on the CPU, set CUDA_VISIBLE_DEVICES=""'
    )


def leave(member: RankInfo) -> None:
    """Destroy the process group, if `join` has created it."""
    if member.owns_group and dist.is_initialized():
        dist.destroy_process_group()


def seed_all(seed: int) -> None:
    """Seed the random generators of python, torch (CUDA's too) and, if it is loaded, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def versions(kgorch: str, device: torch.device) -> dict[str, str]:
    """What the bits of a training depend on besides its plan; every manifest holds it. `kgorch`: our own version."""
    cudnn: Any = torch.backends.cudnn
    versions_now = {
        "kgorch": kgorch,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
    }
    if device.type == "cuda":
        versions_now |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(cudnn.version()),
        }
    return versions_now
