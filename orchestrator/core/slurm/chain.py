"""What follows a session in a Slurm job: nothing, another session in the same job, or the job again.

A session that ended before its run is finished is followed by the next one, unless a user has stopped it. A user stops with
`kgorch stop`, or with scancel: both end the chain. Preemption, the time limit and a failed node do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from kgorch.core.codes import Reason
from kgorch.core.scheduling import TRIES
from kgorch.core.slurm.job_state import JobEvent

FINISHED, MISTAKE, SUSPENDED, QUOTA_SPENT, NO_DATABASE, FAILED = 0, 2, 10, 11, 12, 20
"""Exit codes of `kgorch resume` (errors.ExitCode); any other one means that the supervisor was killed, or has a bug."""

SUPERVISORS = 3
"""Supervisors in a row that may die or be refused before the job gives up: one whose bug is deterministic dies each time."""

SOON_S = 600.0
"""A supervisor that lives longer died of something new."""

DATABASE_TRIES = 100
"""Supervisors in a row that may fail because the database cannot be used: half an hour, with the pauses between them."""


class Follow(StrEnum):
    """What follows a session."""

    NOTHING = "nothing"
    SUPERVISOR = "supervisor"
    """Another supervisor in this job, which adopts the training or recovers its session."""
    SLURM = "slurm"
    """The same job, which Slurm requeues by itself."""
    REQUEUE = "requeue"
    """The same job, or a successor where Slurm does not requeue it."""
    SUCCESSOR = "successor"
    """Another job that begins at a given time: the quota has hours again then."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended.

    Attributes:
        exit_code: of its process; negative for a signal.
        reason: of the run's newest session.
        is_stop_requested: a user has asked for a stop through Slurm.
        is_active: the run is not finished; with FINISHED, another process has it.
        supervisors: in a row that ended soon in this job, without those that found the run taken or the database unusable.
        without_database: supervisors in a row that ended with NO_DATABASE, this one included.
        fruitless: consecutive sessions without progress, this one included.
        resume_at: when the quota has hours again; None for never, or without a quota.
    """

    exit_code: int
    reason: Reason = Reason.NONE
    is_stop_requested: bool = False
    is_active: bool = False
    supervisors: int = 1
    without_database: int = 0
    fruitless: int = 0
    resume_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What follows, and why, in words for the job's log.

    Attributes:
        begins_at: of a SUCCESSOR.
        is_later: a SUPERVISOR that would fail at once; what follows is decided again after a pause.
        gives_up: the run has failed.
    """

    follow: Follow
    why: str
    begins_at: datetime | None = None
    is_later: bool = False
    gives_up: bool = False


def next_step(end: SessionEnd, event: JobEvent, *, chains: bool) -> Step:
    """What follows a session. Args: chains: whether sessions follow one another (--requeue)."""
    if end.exit_code == FINISHED and not end.is_active:
        return Step(Follow.NOTHING, "there is nothing left to train")
    if end.exit_code == FAILED:
        return Step(Follow.NOTHING, "the session failed, and would fail again")
    # Before all else that may follow: a job that was cancelled can still be requeued, which would undo the user's stop.
    if end.is_stop_requested or end.reason is Reason.USER:
        return Step(Follow.NOTHING, "stopped by the user")
    if event is JobEvent.CANCELLED:
        return Step(Follow.NOTHING, "the job was cancelled with scancel")
    if event is JobEvent.REQUEUED:
        return Step(Follow.SLURM, "Slurm has requeued the job")
    is_over = end.exit_code in (SUSPENDED, QUOTA_SPENT)
    if not is_over and event in (JobEvent.RUNNING, JobEvent.UNKNOWN):
        if end.exit_code == FINISHED:  # a dead node's session is taken over when its lease is over
            return Step(Follow.SUPERVISOR, "another process has the run", is_later=True)
        if end.without_database >= DATABASE_TRIES:
            why = "the database could not be used, and nothing continues the run: type kgorch slurm submit PLAN"
            return Step(Follow.NOTHING, why, gives_up=True)
        if end.exit_code == NO_DATABASE:
            return Step(Follow.SUPERVISOR, "the database cannot be used", is_later=True)
        if end.supervisors < SUPERVISORS:
            why = f"the supervisor ended with {end.exit_code}; another one takes over"
            # what was refused may pass: GPUs in use, a full disk, a folder that is not mounted
            return Step(Follow.SUPERVISOR, why, is_later=end.exit_code == MISTAKE)
        why = f"{end.supervisors} supervisors of a Slurm job ended with {end.exit_code}, and nothing continues the run"
        return Step(Follow.NOTHING, f"{why}: see the job's log", gives_up=end.is_active)
    if not chains:
        return Step(Follow.NOTHING, "the job was submitted with --no-requeue")
    if end.exit_code == QUOTA_SPENT:
        if end.resume_at is None:
            return Step(Follow.NOTHING, "the quota is exhausted and not renewed")
        return Step(Follow.SUCCESSOR, "the quota is exhausted", end.resume_at)
    if end.fruitless >= TRIES:
        return Step(Follow.NOTHING, f"{end.fruitless} consecutive sessions ended without progress", gives_up=True)
    return Step(Follow.REQUEUE, _WHY.get(event, "the session is over and the run is not finished"))


_WHY = {
    JobEvent.PREEMPTED: "the job was preempted",
    JobEvent.TIME_LIMIT: "the job reached its time limit",
    JobEvent.NODE_FAILED: "a node of the job failed",
}
