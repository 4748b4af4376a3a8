"""Find and terminate every process that an attempt has started, whoever its parent is now.

Each of them has the path of the attempt's launch file in its environment, which children inherit: also those that have left
their session, and those that were reparented. Control groups and pid namespaces would need rights that notebooks do not give.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kgorch.protocol.launch_spec import LAUNCH_VARIABLE
from kgorch.system.process_identity import start_ticks, stat_fields

GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for helper processes of a training."""

TIMEOUT_S = 10.0
"""Seconds until the search is given up: a process may be stuck in the kernel."""


def attempt_pids(folder: Path) -> Iterator[int]:
    """Living processes of the attempt in `folder`, without this process and its ancestors.

    A process that has overwritten its own environment is not found.
    """
    variable, launch_file = f"{LAUNCH_VARIABLE}=".encode(), os.path.realpath(folder / "launch.json")
    name = os.fsencode(folder.name) + b"/launch.json"
    excluded = set(_ancestors())
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) not in excluded:
            try:
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                continue
            value = next((item.removeprefix(variable) for item in variables if item.startswith(variable)), b"")
            # the name first: realpath costs system calls, and there may be thousands of processes
            if value.endswith(name) and os.path.realpath(os.fsdecode(value)) == launch_file:
                yield int(entry.name)


def terminate_attempt(folder: Path) -> bool:
    """Terminate what is left of the attempt in `folder`. True when nothing is left; safe to repeat."""
    start_s = time.monotonic()
    signalled: set[tuple[int, int]] = set()
    while alive := {(pid, ticks) for pid in attempt_pids(folder) if (ticks := start_ticks(pid))}:
        waited_s = time.monotonic() - start_s
        if waited_s > TIMEOUT_S:
            return False
        # each start time is compared again: a pid may have been reused between listing and signal
        for pid, ticks in alive if waited_s > GRACE_S else alive - signalled:
            if start_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if waited_s > GRACE_S else signal.SIGTERM)
        signalled |= alive
        time.sleep(0.05)
    return True


def _ancestors() -> Iterator[int]:
    """This process, its parent, and so on."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        try:
            pid = int(stat_fields(pid)[1])
        except OSError:
            return
