"""Rows of Slurm jobs: a run has one that is open, and meanwhile no daemon starts it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine

from kgorch.core.codes import Phase, Reason, ResumeState
from kgorch.core.slurm.job_state import JobState
from kgorch.db import active_sessions, queue, runs, sessions, slurm_jobs

NOW = datetime.now(UTC)


@pytest.fixture
def run_id(engine: Engine, tmp_path) -> str:
    folder = tmp_path / "home" / "runs" / "far" / "1"
    return runs.create(
        engine, id="0123456789ab", name="far", number=1, folder=str(folder), workdir=str(tmp_path),
        checkpoints=str(folder / "checkpoints"), plan="", plan_hash="", overrides=(), stages=["train"],
    ).id  # fmt: skip


def begin(engine: Engine, run_id: str, **more):
    return slurm_jobs.begin(engine, run_id, name="kgorch-far", state=JobState.SUBMITTING, requeue=True, **more)


def due(engine: Engine) -> list[str]:
    return [entry.run for entry in queue.due_entries(engine, datetime.now(UTC), limit=10)]


def test_a_run_with_an_open_job_is_no_daemons_business(engine, run_id):
    queue.put(engine, run_id, reason=Reason.SLURM, due_at=NOW)
    sessions.open_session(engine, run_id, site="local", boot_id="another machine's")
    assert due(engine) == ["far"] and len(active_sessions.all_of(engine)) == 1
    row = begin(engine, run_id)
    assert due(engine) == [] and queue.due_entry(engine, run_id, datetime.now(UTC)) is None
    assert queue.counts(engine, datetime.now(UTC))[0] == 0 and active_sessions.all_of(engine) == []
    slurm_jobs.close(engine, row, "stopped by the user")
    assert due(engine) == [], "nor after its end: it waits for a user"
    waits = queue.pending_resume(engine, run_id)
    assert waits and waits.due_at is None and waits.state == ResumeState.DUE


def test_a_session_that_died_in_a_job_is_no_daemons_business_after_the_job_either(engine, run_id):
    row = begin(engine, run_id)
    sessions.open_session(engine, run_id, site="local", boot_id="another machine's")
    slurm_jobs.close(engine, row, "a node of the job failed")
    assert active_sessions.all_of(engine) == []


def test_a_run_has_one_open_job_and_a_successor_closes_the_one_before(engine, run_id):
    first = slurm_jobs.save(engine, begin(engine, run_id).id, job="7")
    assert begin(engine, run_id) is None
    second = begin(engine, run_id, follows=first)
    assert second and second.follows == "7" and slurm_jobs.open_job(engine, run_id) == second
    assert [row.id for _, _, row in slurm_jobs.open_jobs(engine)] == [second.id]
    slurm_jobs.forget(engine, second)
    assert slurm_jobs.open_job(engine, run_id) is None and slurm_jobs.newest(engine, run_id).job == "7"


def test_the_end_of_a_chain_is_in_the_journal(engine, run_id):
    row = slurm_jobs.save(engine, begin(engine, run_id).id, job="7")
    slurm_jobs.close(engine, row, "the job was cancelled with scancel", state=JobState.CANCELLED)
    [event] = sessions.events(engine, run_id, limit=5)
    assert event.kind == "slurm_ended" and event.facts["job"] == "7" and event.facts["state"] == "CANCELLED"
    assert event.phase not in list(Phase)
