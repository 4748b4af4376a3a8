"""What several steps need of PyTorch."""

from __future__ import annotations

import os

import torch

IMPOSSIBLE = 1 << 46
"""Elements that no machine can allocate."""

MIB = 1 << 20


def make_deterministic(device: str) -> None:
    """On a GPU only: a CPU does not need it, and PyTorch imports its compiler for it."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sleep_cycles(seconds: float) -> int:
    """What torch.cuda._sleep takes so long for, on this device at its clock of now."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10**7)
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return int(10**8 * seconds * 1e3 / begin.elapsed_time(end))
