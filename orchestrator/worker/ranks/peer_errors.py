"""Classification of an exception as collateral: the consequence of another rank's end, such as a collective that a peer has left.

The type decides first, here where the exception is at hand. A script's own `ConnectionRefusedError`, of a tracker that is down, has
the same text as a broken collective, and is the cause nevertheless.
"""

from __future__ import annotations

import torch.distributed as dist

from kgorch.worker.ranks.consensus_board import PeersLost

_BACKENDS = ("gloo", "nccl", "tcpstore", "c10d")
_SIGNS = (
    "connection closed by peer",
    "connection reset",
    "socket closed",
    "connection refused",
    "broken pipe",
    "remote process exiting",
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "nccl communicator was aborted",
    "timed out waiting",
)
"""Texts of gloo, NCCL and the store about a peer that is gone: PyTorch 2.4 to 2.13."""


def is_collateral(error: BaseException) -> bool:
    """Whether another rank's end has caused this error."""
    if isinstance(error, PeersLost) or getattr(error, "is_collateral", False):
        return True
    text = str(error).lower()
    if isinstance(error, dist.DistError):
        return any(sign in text for sign in _SIGNS)
    # gloo raises a plain RuntimeError, which names its source file
    is_of_backend = type(error) is RuntimeError and any(name in text for name in _BACKENDS)
    return is_of_backend and any(sign in text for sign in _SIGNS)
