"""What Slurm shows of a job, as scontrol 22.05.8 printed it, and what has happened to the job."""

from __future__ import annotations

import pytest

from kgorch.core.slurm.job_state import JobEvent, JobState, JobView, job_event, parse_job

SHOWN = """\
JobId=1 JobName=kgorch-a JobState=CANCELLED
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:9
   RunTime=00:00:54 TimeLimit=00:01:00 TimeMin=N/A
   SubmitTime=2026-11-25T02:24:56 EligibleTime=2026-11-25T02:24:56
   StartTime=2026-11-25T02:24:57 EndTime=2026-11-25T02:25:51 Deadline=N/A
   PreemptEligibleTime=2026-11-25T02:24:57 PreemptTime={preempted}
   NodeList=n[1-2]
   BatchHost=n1
   Comment=a JobState=CANCELLED Restarts=9
"""


def shown(state: str, reason: str = "None", restarts: int = 0, preempted: str = "None") -> JobView:
    return parse_job("1", SHOWN.format(state=state, reason=reason, restarts=restarts, preempted=preempted))


def test_a_job_is_read_from_the_lines_that_no_user_writes():
    job = shown("TIMEOUT", "TimeLimit", 2)
    assert (job.state, job.reason, job.restarts, job.node) == (JobState.TIMEOUT, "TimeLimit", 2, "n1")
    assert job.ends_at and job.starts_at and (job.ends_at - job.starts_at).total_seconds() == 54
    assert not job.is_preempted and not job.is_array


def test_what_is_not_known_is_no_end():
    assert shown("DREAMING").state is JobState.UNKNOWN and not shown("DREAMING").state.is_over
    assert parse_job("1", "   JobState=RUNNING\n   Requeue=1 Restarts=many\n   StartTime=Unknown\n").restarts == 0
    with pytest.raises(ValueError, match="expected a line JobState"):
        parse_job("1", "slurm_load_jobs error: Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("job", "restarts", "event"),
    [
        (shown("RUNNING"), 0, JobEvent.RUNNING),
        (shown("RUNNING", restarts=3), 3, JobEvent.RUNNING),
        (shown("COMPLETING", restarts=1), 0, JobEvent.REQUEUED),  # scontrol requeue, and PreemptMode=REQUEUE
        (shown("PENDING", "BeginTime", 1), 1, JobEvent.REQUEUED),
        (shown("COMPLETING", preempted="2026-11-25T02:25:00"), 0, JobEvent.PREEMPTED),  # PreemptMode=CANCEL
        (shown("PREEMPTED"), 0, JobEvent.PREEMPTED),
        (shown("RUNNING", preempted="2026-11-25T02:25:00"), 0, JobEvent.RUNNING),  # in its GraceTime
        (shown("COMPLETING", "TimeLimit"), 0, JobEvent.TIME_LIMIT),
        (shown("TIMEOUT", "TimeLimit"), 0, JobEvent.TIME_LIMIT),
        (shown("NODE_FAIL"), 0, JobEvent.NODE_FAILED),
        (shown("COMPLETING"), 0, JobEvent.CANCELLED),  # scancel
        (shown("CANCELLED"), 0, JobEvent.CANCELLED),
        (shown("DREAMING"), 0, JobEvent.UNKNOWN),
        (None, 0, JobEvent.UNKNOWN),
    ],
)
def test_the_cause_is_told_although_slurm_shows_completing_for_each(job, restarts, event):
    assert job_event(job, restarts) is event
