"""A Slurm job as `scontrol show job` describes it, and what has happened to the job that a process runs in.

While Slurm ends a job, whatever the cause, it shows the state COMPLETING. The cause is seen from other fields (measured on
22.05.8): a job that is requeued has one more restart, one at its time limit has the reason TimeLimit, and one that scancel ended
has neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

MAX_TEXT = 64 << 10
"""Characters of an answer that are read."""

_LINES = (
    "JobState",
    "Requeue",
    "StartTime",
    "SubmitTime",
    "PreemptEligibleTime",
    "NodeList",
    "BatchHost",
    "ArrayJobId",
)
"""First fields of the lines that are read. Other lines hold text of users (JobName, Comment), which may look like fields."""

_NO_INSTANT = ("Unknown", "N/A", "None", "NONE")


class JobState(StrEnum):
    """Slurm's words for the state of a job; UNKNOWN for a word that is not known here, which is never taken for an end."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    PREEMPTED = "PREEMPTED"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    REVOKED = "REVOKED"
    SUBMITTING = "SUBMITTING"
    """Ours, not Slurm's: the job is about to be submitted."""
    ABSENT = "ABSENT"
    """Ours: Slurm does not know the job. It forgets one some minutes after its end (MinJobAge)."""
    UNKNOWN = "UNKNOWN"

    @property
    def is_over(self) -> bool:
        return self in _OVER

    @property
    def is_running(self) -> bool:
        """Processes of the job may be alive."""
        return self in _RUNNING


_OVER = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.BOOT_FAIL,
        JobState.PREEMPTED,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.REVOKED,
        JobState.ABSENT,
    }
)
_RUNNING = frozenset(
    {JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.STOPPED, JobState.COMPLETING}
)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job, as Slurm shows it.

    Attributes:
        job: its number.
        reason: why it waits or ended, in Slurm's word; empty for none.
        restarts: how often it was requeued.
        node: the one on which its batch script runs; empty before it runs.
        starts_at: start, for a job that waits an estimate; None where Slurm gives none.
        ends_at: when its time limit ends it.
        is_preempted: its preemption has begun.
        is_array: it is a task of an array.
    """

    job: str
    state: JobState
    reason: str = ""
    restarts: int = 0
    node: str = ""
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    is_preempted: bool = False
    is_array: bool = False


def parse_job(job: str, text: str) -> JobView:
    """The answer of `scontrol show job` with SLURM_TIME_FORMAT=standard. Raises: ValueError where it is none."""
    fields: dict[str, str] = {}
    for line in text[:MAX_TEXT].splitlines():
        if line.strip().partition("=")[0] in _LINES:
            fields |= dict(re.findall(r"(?<!\w)(\w+)=(\S*)", line))
    word = fields.get("JobState")
    if not word:
        raise ValueError(f"expected a line JobState=…, found {text[:80]!r}")
    restarts = fields.get("Restarts", "0")
    return JobView(
        job,
        _state(word),
        "" if (reason := fields.get("Reason", "")) in ("None", "(null)") else reason[:64],
        int(restarts) if restarts.isdecimal() and len(restarts) < 7 else 0,
        fields.get("BatchHost", "")[:255],
        _instant(fields.get("StartTime", "")),
        _instant(fields.get("EndTime", "")),
        _instant(fields.get("PreemptTime", "")) is not None,
        "ArrayTaskId" in text.partition("\n")[0],
    )


def _state(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        return JobState.UNKNOWN


def _instant(text: str) -> datetime | None:
    if text in _NO_INSTANT:
        return None
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None


class JobEvent(StrEnum):
    """What has happened to the job of a process that still runs in it."""

    RUNNING = "running"
    """Nothing: it goes on."""
    REQUEUED = "requeued"
    """Slurm, or a user, has requeued it: after preemption, say. It runs again without our doing."""
    PREEMPTED = "preempted"
    """It is preempted, and not requeued."""
    TIME_LIMIT = "time_limit"
    NODE_FAILED = "node_failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


def job_event(job: JobView | None, restarts: int) -> JobEvent:
    """What has happened to the job.

    Args:
        job: as Slurm shows it now; None where it does not answer.
        restarts: of the job when the process began (SLURM_RESTART_COUNT).
    """
    if job is None:
        return JobEvent.UNKNOWN
    if job.restarts > restarts or job.state in (JobState.PENDING, JobState.REQUEUED, JobState.REQUEUE_HOLD):
        return JobEvent.REQUEUED
    if job.state is JobState.PREEMPTED or (job.state is JobState.COMPLETING and job.is_preempted):
        return JobEvent.PREEMPTED
    if job.state is JobState.TIMEOUT or (job.state is JobState.COMPLETING and job.reason == "TimeLimit"):
        return JobEvent.TIME_LIMIT
    if job.state in (JobState.NODE_FAIL, JobState.BOOT_FAIL):
        return JobEvent.NODE_FAILED
    if job.state in (JobState.CANCELLED, JobState.COMPLETING, JobState.DEADLINE, JobState.REVOKED):
        return JobEvent.CANCELLED
    return JobEvent.RUNNING if job.state.is_running else JobEvent.UNKNOWN
