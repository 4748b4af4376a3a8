"""When the session that we are in began, on CLOCK_BOOTTIME, and what ends it: limits count from there, not from our start."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from sqlalchemy import Engine

from db.records import RunInfo, SessionInfo
from orchestrator.core.codes import Reason
from orchestrator.core.wall import Wall, nearest
from orchestrator.limits import slurm_limit, spot_notice
from orchestrator.limits.quota_ledger import Ledger
from orchestrator.limits.wall_sources import Source
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Began, Profile
from orchestrator.system import process_identity
from orchestrator.system.clock import boottime_s


def began_s(began: Began) -> float:
    """By what the profile says began it; our own start where that cannot be told."""
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
    """The nearest of the walls that stand from the session's beginning on."""
    length_s = plan.session.wall or profile.wall_s
    limit = None if length_s is None else Wall(began_s(profile.began) + length_s, Reason.TIME_LIMIT)
    return nearest([limit, given_wall(until, now_s)])


def given_wall(until: datetime | None, now_s: float) -> Wall | None:
    """What a person gave as an instant; from here on the wall clock may jump."""
    return None if until is None else Wall(now_s + (until - datetime.now(UTC)).total_seconds(), Reason.UNTIL)


def moving_walls(
    engine: Engine, run: RunInfo, plan: Plan, profile: Profile, last: SessionInfo | None = None
) -> list[Source]:
    """`last`: the session that is adopted; None for one that is to be opened."""
    ledger = Ledger.adopting(engine, plan, profile, last) if last else Ledger.opening(engine, plan, profile)
    found: list[Source] = [ledger] if ledger else []
    if profile.notice == "slurm" and "SLURM_JOB_ID" in os.environ:
        found.append(slurm_limit.JobEnd())
    elif profile.notice in spot_notice.PROTOCOLS and profile.metadata:
        found.append(spot_notice.Notices(profile.notice, profile.metadata))
    return found
