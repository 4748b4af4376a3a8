"""Finds and kills the processes of a step, including those with a session of their own (shim, keeper, ranks)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

import psutil

VARIABLE = "KGORCH_GPU_STEP"
"""Environment variable of all processes that a step starts. Its value is unique to the run of the step."""


def find_processes(token: str, *, exclude: Collection[int] = ()) -> list[psutil.Process]:
    """The living processes with this token, except those of `exclude` and the caller."""
    excluded = {*exclude, os.getpid()}
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_of_step = process.pid not in excluded and process.environ().get(VARIABLE) == token
            if is_of_step and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
    return result


def end_all(token: str, *, exclude: Collection[int] = (), within_s: float = 20.0) -> list[int]:
    """Send SIGKILL until no process is left: one that is killed may just have started another.

    Returns: the pids of those that do not die; a process may be stuck in the driver.
    """
    until = time.monotonic() + within_s
    while alive := find_processes(token, exclude=exclude):
        if time.monotonic() > until:
            return [process.pid for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    return []
