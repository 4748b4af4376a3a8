"""The walls of a session that do not change, on CLOCK_BOOTTIME.

A platform's limit counts from when it started the container, job or machine, not from our own start.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

from kgorch.core.codes import Reason
from kgorch.core.limits.wall import Wall, nearest
from kgorch.limits import slurm_limit
from kgorch.plan import Plan
from kgorch.platforms.profile import Began, Profile
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s


def began_s(began: Began) -> float:
    """When the time that the platform limits began, seconds of CLOCK_BOOTTIME; our own start where that is not known."""
    match began:
        case "container":  # where PID 1 is the machine's own, this is its boot
            at_s = process_identity.start_time_s(1)
        case "job":
            at_s = slurm_limit.job_began_s()
        case "boot":
            at_s = 0.0
        case "start":
            at_s = None
    if at_s is None:
        at_s = process_identity.start_time_s(os.getpid())
    return boottime_s() if at_s is None else at_s


def fixed_wall(plan: Plan, profile: Profile, now_s: float, until: datetime | None) -> Wall | None:
    """The nearer one of the time limit (the plan's, else the platform's) and `--until`; None without either."""
    length_s = plan.session.wall or profile.wall_s
    limit = None if length_s is None else Wall(began_s(profile.began) + length_s, Reason.TIME_LIMIT)
    return nearest([limit, until_wall(until, now_s)])


def until_wall(until: datetime | None, now_s: float) -> Wall | None:
    """The wall of `--until`; None without. Converted to CLOCK_BOOTTIME once: a later jump of the wall clock does not move it."""
    return None if until is None else Wall(now_s + (until - datetime.now(UTC)).total_seconds(), Reason.UNTIL)
