"""Whether an exception is what another rank's end did to this one: a collective that a peer has left, an order of the others.

It is decided where the exception is, by its type first. A script's own `ConnectionRefusedError`, of a tracker that is down,
reads like a broken collective and is the cause all the same.
"""

from __future__ import annotations

import torch.distributed as dist

from orchestrator.worker.ranks.consensus_board import PeersLost

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
"""What gloo, NCCL and the store say of a peer that is gone: PyTorch 2.4 to 2.13."""


def is_collateral(error: BaseException) -> bool:
    if isinstance(error, PeersLost) or getattr(error, "is_collateral", False):
        return True
    text = str(error).lower()
    if isinstance(error, dist.DistError):
        return any(sign in text for sign in _SIGNS)
    # gloo raises a plain RuntimeError, which names its source file
    is_of_backend = type(error) is RuntimeError and any(name in text for name in _BACKENDS)
    return is_of_backend and any(sign in text for sign in _SIGNS)
