"""The process group, device and random seeds of a rank, the same under kgorch, under plain torchrun, and alone."""

from __future__ import annotations

import os
import platform
import random
import sys
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from orchestrator.errors import KgorchError

UNLIMITED = timedelta(days=7)
"""The time-out of collectives under kgorch unless the plan names one, longer than any session: a rank may validate alone for hours
while the others wait for it in an all-reduce. PyTorch's 10 minutes (NCCL) or 30 (gloo) would end such a run; kgorch looks for hangs
itself, by what each part of the run has taken (core/hang_detection.py), which one figure for all collectives cannot."""


class CudaUnusable(RuntimeError):
    """There is a GPU, and PyTorch cannot begin to use it. Another attempt may: a GPU can be busy or come back."""


class Member(NamedTuple):
    """This process among the ranks.

    Attributes:
        owns_group: the process group was made here, and is to be ended here.
        shares_gpu: ranks of this machine share a GPU, and so communicate by gloo: NCCL takes one rank a GPU.
    """

    rank: int
    world_size: int
    device: torch.device
    owns_group: bool
    shares_gpu: bool = False


def join(*, supervised: bool = False, gpus: str = "", timeout_s: float | None = None) -> Member:
    """Choose the device and join the process group, which may exist already; a process alone makes a group of one.

    Args:
        gpus: the model of the GPUs that the driver shows to this process; empty where there is none, or it is not known.
        timeout_s: the plan's `[health] collective_timeout`; None for UNLIMITED under kgorch, and for PyTorch's own when alone.
    Raises: KgorchError, CudaUnusable: there is a GPU, this PyTorch was built for CUDA, and it cannot use it. Training on the
        CPU instead would spend the session's hours on a hundredth of the steps.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif gpus and torch.version.cuda:
        _explain_cuda(gpus)
    shares_gpu = device.type == "cuda" and _ranks_here(world_size) > torch.cuda.device_count()
    if dist.is_initialized():
        return Member(dist.get_rank(), dist.get_world_size(), device, False, shares_gpu)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shares_gpu else "gloo"
    timeout = timedelta(seconds=timeout_s) if timeout_s is not None else UNLIMITED if supervised else None
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    return Member(rank, world_size, device, True, shares_gpu)


def _ranks_here(world_size: int) -> int:
    """Ranks of this machine; torchrun tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _explain_cuda(gpus: str) -> None:
    """Raises: what `join` does."""
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
        )
    raise CudaUnusable(
        f"{what}; CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}."
        " See whether nvidia-smi and `python -c 'import torch; torch.cuda.init()'` work;"
        ' to train on the CPU, set CUDA_VISIBLE_DEVICES=""'
    )


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's generators too
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed & 0xFFFFFFFF)


def versions(kgorch: str, device: torch.device) -> dict[str, str]:
    """What the bits of a training hang on besides its plan; kept in every manifest."""
    cudnn: Any = torch.backends.cudnn
    found = {"kgorch": kgorch, "torch": torch.__version__, "python": platform.python_version(), "device": device.type}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(cudnn.version()),
        }
    return found
