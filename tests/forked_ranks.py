"""Ranks in processes that are forked from one which has imported PyTorch, as those of a session are from its standby.

python -m forked_ranks DESCRIPTOR     the server; see forked_cli.py
"""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import forked_cli
from forked_cli import PREFIXES, ForkedCommand, Server

THREADS = {"OMP_NUM_THREADS": "1"}
"""Of the ranks: read when PyTorch is imported."""

READ_BY_PYTORCH = ("CUDA", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH", "TORCH")


class ForkedRank(ForkedCommand):
    """A rank that the server of this process has forked."""

    @staticmethod
    def _server() -> Server:
        return server()


@functools.cache
def server() -> Server:
    return Server("forked_ranks", THREADS, (*PREFIXES, *READ_BY_PYTORCH))


def popen(env: Mapping[str, str]) -> subprocess.Popen[str]:
    """The process of a rank, forked where that is the same as a new one."""
    kind = ForkedRank if server().can_fork(env) else subprocess.Popen
    return kind([sys.executable, "-m", "kgorch.worker.entry"], env=env, cwd=Path.cwd(), text=True)


def main() -> None:
    from kgorch.worker import elastic_agent, entry

    elastic_agent.share_memory()
    forked_cli.serve(socket.socket(fileno=int(sys.argv[1])))
    elastic_agent._reset_signals()
    elastic_agent._draw_anew()
    entry.leave(entry.main())


if __name__ == "__main__":
    main()
