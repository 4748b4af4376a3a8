"""Which machines a session over several nodes may use, and how a command is run on one of them."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence

from kgorch.errors import KgorchError
from kgorch.plan import StageSection
from kgorch.plan.nodes import HOST, SHELL, WORDS, NodesSection
from kgorch.plan.stages import node_bounds

SCONTROL_S = 30.0


def hosts_of(section: NodesSection, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The machines of the plan, else of the Slurm allocation that this process runs in; this machine is the first. [] for none.

    Raises: KgorchError when Slurm does not tell.
    """
    if section.hosts is not None:
        return list(section.hosts)
    nodes = environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return []
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=SCONTROL_S, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise KgorchError(
            f"the nodes of this Slurm allocation ({nodes}) cannot be listed",
            str(error),
            next_step="name them in the plan: [nodes] hosts",
        ) from None
    here = environ.get("SLURMD_NODENAME", "")
    return sorted(listed, key=lambda host: host != here)


def choose(stage: StageSection, hosts: Sequence[str]) -> tuple[int, list[str]]:
    """The least number of machines that a stage needs, and those that it may use, this one first.

    Raises: KgorchError where there are too few.
    """
    bounds = node_bounds(stage.nodes)
    least, most = (1, max(len(hosts), 1)) if bounds is None else bounds
    if most > 1 and len(hosts) < least:
        where = f"the allocation has {len(hosts)}: {', '.join(hosts)}" if hosts else "there is no Slurm allocation here"
        raise KgorchError(
            f"stage {stage.name!r} needs {least} nodes",
            where,
            next_step="ask for more nodes (sbatch --nodes), or name the machines in the plan: [nodes] hosts and start",
        )
    return least, list(hosts[:most]) if most > 1 else []


def address_of(section: NodesSection, host: str) -> str:
    """The address of this machine at which the other nodes reach it. Raises: KgorchError."""
    if section.address is not None:
        return section.address
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise KgorchError(
            f"the name of this node, {host}, has no address: {error}",
            next_step='give the address of the interface to the other nodes in the plan: [nodes] address = "10.0.0.1"',
        ) from None


def command_on(host: str, words: Sequence[str], start: Sequence[str]) -> list[str]:
    """The command that runs `words` on `host`, by the plan's template `start`."""
    command: list[str] = []
    for part in start:
        if part == WORDS:
            command += words
        else:
            command.append(part.replace(HOST, host).replace(SHELL, shlex.join(words)))
    return command
