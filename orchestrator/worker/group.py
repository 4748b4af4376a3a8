"""The process group, device and random seeds of a rank, the same under kgorch, under plain torchrun, and alone."""

from __future__ import annotations

import os
import platform
import random
import sys
from typing import Any

import torch
import torch.distributed as dist


def join() -> tuple[int, int, torch.device, bool]:
    """Rank, world size, device, and whether the process group was made here (and is to be ended here)."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), device, False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return rank, world_size, device, True


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
