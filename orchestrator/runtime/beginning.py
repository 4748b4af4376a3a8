"""When the session that we are in began, on CLOCK_BOOTTIME: its limit counts from there, and not from our own start."""

from __future__ import annotations

import os

from orchestrator.platforms.profile import Began
from orchestrator.runtime import processes, slurm
from orchestrator.wire import boottime_s


def began_s(began: Began) -> float:
    """By what the profile says began it; our own start where that cannot be told."""
    match began:
        case "container":  # where PID 1 is the machine's own, this is its boot
            at_s = processes.started_s(1)
        case "job":
            at_s = slurm.job_began_s()
        case "boot":
            at_s = 0.0
        case "start":
            at_s = None
    if at_s is None:
        at_s = processes.started_s(os.getpid())
    return boottime_s() if at_s is None else at_s
