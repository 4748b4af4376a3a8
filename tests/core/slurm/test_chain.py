"""What follows a session in a Slurm job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from kgorch.core.codes import Reason
from kgorch.core.scheduling import TRIES
from kgorch.core.slurm.chain import DATABASE_TRIES, SUPERVISORS, Follow, SessionEnd, next_step
from kgorch.core.slurm.job_state import JobEvent
from kgorch.errors import ExitCode

SUSPENDED = SessionEnd(ExitCode.SUSPENDED, Reason.SLURM)
KILLED = SessionEnd(-9, Reason.NONE)


@pytest.mark.parametrize(
    ("event", "follow"),
    [
        (JobEvent.RUNNING, Follow.REQUEUE),
        (JobEvent.TIME_LIMIT, Follow.REQUEUE),
        (JobEvent.PREEMPTED, Follow.REQUEUE),
        (JobEvent.NODE_FAILED, Follow.REQUEUE),
        (JobEvent.UNKNOWN, Follow.REQUEUE),
        (JobEvent.REQUEUED, Follow.SLURM),
        (JobEvent.CANCELLED, Follow.NOTHING),
    ],
)
def test_an_unfinished_session_is_followed_unless_the_job_was_cancelled(event, follow):
    assert next_step(SUSPENDED, event, chains=True).follow is follow


@pytest.mark.parametrize("event", JobEvent)
@pytest.mark.parametrize("code", [ExitCode.SUSPENDED, ExitCode.QUOTA_SPENT, -9, 1])
def test_nothing_follows_a_users_stop_whatever_slurm_does(event, code):
    end = SessionEnd(code, resume_at=datetime.now(UTC))
    assert next_step(replace(end, is_stop_requested=True), event, chains=True).follow is Follow.NOTHING
    assert next_step(replace(end, reason=Reason.USER), event, chains=True).follow is Follow.NOTHING
    assert next_step(end, JobEvent.CANCELLED, chains=True).follow is Follow.NOTHING


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.FAILED])
@pytest.mark.parametrize("event", JobEvent)
def test_nothing_follows_a_run_that_is_finished_or_failed(code, event):
    assert next_step(SessionEnd(code), event, chains=True).follow is Follow.NOTHING


def test_without_requeue_slurm_alone_continues_the_run():
    assert next_step(SUSPENDED, JobEvent.RUNNING, chains=False).follow is Follow.NOTHING
    assert next_step(SUSPENDED, JobEvent.REQUEUED, chains=False).follow is Follow.SLURM


def test_a_killed_supervisor_gets_a_successor_in_the_job_while_it_runs_and_not_for_ever():
    assert next_step(KILLED, JobEvent.RUNNING, chains=False).follow is Follow.SUPERVISOR
    step = next_step(replace(KILLED, supervisors=SUPERVISORS, is_active=True), JobEvent.RUNNING, chains=True)
    assert (step.follow, step.gives_up) == (Follow.NOTHING, True)
    assert next_step(KILLED, JobEvent.TIME_LIMIT, chains=True).follow is Follow.REQUEUE
    assert next_step(KILLED, JobEvent.REQUEUED, chains=True).follow is Follow.SLURM


def test_what_was_refused_is_tried_again_later_and_then_fails_the_run():
    refused = SessionEnd(ExitCode.MISTAKE, is_active=True)
    step = next_step(refused, JobEvent.RUNNING, chains=False)
    assert (step.follow, step.is_later) == (Follow.SUPERVISOR, True)
    step = next_step(replace(refused, supervisors=SUPERVISORS), JobEvent.RUNNING, chains=True)
    assert (step.follow, step.gives_up) == (Follow.NOTHING, True)
    assert not next_step(
        replace(refused, supervisors=SUPERVISORS, is_active=False), JobEvent.RUNNING, chains=True
    ).gives_up


def test_a_run_that_another_process_has_is_waited_for_while_the_job_runs():
    taken = SessionEnd(ExitCode.DONE, is_active=True, supervisors=SUPERVISORS)
    step = next_step(taken, JobEvent.RUNNING, chains=False)
    assert (step.follow, step.is_later) == (Follow.SUPERVISOR, True)
    assert next_step(taken, JobEvent.TIME_LIMIT, chains=True).follow is Follow.REQUEUE
    assert next_step(taken, JobEvent.REQUEUED, chains=True).follow is Follow.SLURM
    assert next_step(taken, JobEvent.CANCELLED, chains=True).follow is Follow.NOTHING
    assert next_step(replace(taken, is_stop_requested=True), JobEvent.RUNNING, chains=True).follow is Follow.NOTHING


def test_a_database_that_cannot_be_used_is_waited_for_half_an_hour():
    locked = SessionEnd(ExitCode.NO_DATABASE, supervisors=SUPERVISORS, without_database=DATABASE_TRIES - 1)
    step = next_step(locked, JobEvent.UNKNOWN, chains=False)
    assert (step.follow, step.is_later) == (Follow.SUPERVISOR, True)
    assert next_step(locked, JobEvent.TIME_LIMIT, chains=True).follow is Follow.REQUEUE
    assert next_step(replace(locked, reason=Reason.USER), JobEvent.RUNNING, chains=True).follow is Follow.NOTHING
    step = next_step(replace(locked, without_database=DATABASE_TRIES), JobEvent.RUNNING, chains=True)
    assert (step.follow, step.gives_up) == (Follow.NOTHING, True)


def test_a_chain_without_progress_ends():
    fruitless = replace(SUSPENDED, fruitless=TRIES - 1)
    assert next_step(fruitless, JobEvent.RUNNING, chains=True).follow is Follow.REQUEUE
    step = next_step(replace(fruitless, fruitless=TRIES), JobEvent.RUNNING, chains=True)
    assert (step.follow, step.gives_up) == (Follow.NOTHING, True) and f"{TRIES} consecutive sessions" in step.why


def test_an_exhausted_quota_is_followed_when_it_is_renewed_if_ever():
    at = datetime(2026, 11, 28, tzinfo=UTC)
    spent = SessionEnd(ExitCode.QUOTA_SPENT, Reason.QUOTA, resume_at=at)
    step = next_step(spent, JobEvent.RUNNING, chains=True)
    assert (step.follow, step.begins_at) == (Follow.SUCCESSOR, at)
    assert next_step(replace(spent, resume_at=None), JobEvent.RUNNING, chains=True).follow is Follow.NOTHING
