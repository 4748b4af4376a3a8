"""A session over two nodes, both of them this machine: an agent with shim, torchrun, keeper and sockets is the second one."""

from __future__ import annotations

from pathlib import Path

import psutil
from harness import Kgorch, processes_of

HOSTS = '[nodes]\nhosts = ["first", "second"]\nstart = ["env", "KGORCH_TEST_NODE={host}", "{words}"]\naddress = "127.0.0.1"\n'


def plan_of(
    kgorch: Kgorch, program: str = "learns.py", *, nodes: str = "2", ranks: int = 1, extra: str = "", **changes: object
) -> Path:
    """A plan with so many ranks on each node."""
    return kgorch.plan(program, ranks=f"{ranks}\nnodes = {nodes}", extra=HOSTS + extra, **changes)


def processes_on(kgorch: Kgorch, node: str) -> list[psutil.Process]:
    """Agent, shim, torchrun, ranks and keeper of the node that is played on this machine."""
    found = []
    for process in processes_of(kgorch.home):
        try:
            if process.environ().get("KGORCH_TEST_NODE") == node:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
