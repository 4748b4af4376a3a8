"""The processes of a foreign program: started, asked to stop, watched to their end, killed.

The agent is the sub-reaper of all of them, so that a process whose parent has ended stays below it: a shell that dies of SIGTERM
leaves its training behind, and so does a program that puts itself into the background.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kgorch.system.process_identity import stat_fields

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)


class ProcessInfo(NamedTuple):
    """A living process below the agent.

    Attributes:
        ticks: processor time that it has used, in clock ticks.
    """

    pid: int
    parent: int
    ticks: int


class Program:
    """One start of a program.

    Attributes:
        pid: of its first process.
        status: exit code of that (negative: the signal); None while it lives.
        was_killed: a process of it was killed from here, perhaps while it wrote.
    """

    def __init__(self, command: Sequence[str], *, cwd: str, env: Mapping[str, str], log: Path) -> None:
        """Start it. Raises: OSError."""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        me = os.getpid()

        def in_child() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)

        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child,
            )
        self.pid = self._process.pid
        self.status: int | None = None
        self.was_killed = False

    def reap(self) -> None:
        """Collect the exit codes of all processes below the agent that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.status = self._process.returncode = os.waitstatus_to_exitcode(status)

    def processes(self) -> dict[int, ProcessInfo]:
        """The living processes below the agent, by pid."""
        everything = {info.pid: info for info in _all_processes()}
        below: dict[int, ProcessInfo] = {}
        parents = {os.getpid()}
        while parents:
            found = {pid: info for pid, info in everything.items() if info.parent in parents and pid not in below}
            below |= found
            parents = set(found)
        return below

    def roots(self) -> list[int]:
        """The processes that a stop is meant for: the ranks of a launcher, else what the agent is the parent of.

        Not all processes: loading processes that get the signal die first, and take the save of their rank along.
        """
        below = self.processes()
        ranks = [pid for pid, info in below.items() if info.parent == self.pid and _has_rank(pid)]
        return ranks or [pid for pid, info in below.items() if info.parent == os.getpid()]

    def kill(self) -> None:
        """Send SIGKILL to every process; call it until there is none: a process may start another one meanwhile."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.was_killed = True


def _all_processes() -> list[ProcessInfo]:
    """Without zombies."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = stat_fields(entry.name)
            except OSError:
                continue
            if fields[0] not in b"ZX":
                found.append(ProcessInfo(int(entry.name), int(fields[1]), int(fields[11]) + int(fields[12])))
    return found


def _has_rank(pid: int) -> bool:
    """Whether a launcher has started this process as a rank."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(item.startswith(b"LOCAL_RANK=") for item in variables)
