"""The row of a run's Slurm job, brought up to what Slurm says.

Rows are written before Slurm is asked to do something. A process that dies in between leaves a row without a number: the job, if
there is one, is found by its name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.core.codes import EventKind
from kgorch.core.slurm.job_state import JobState, JobView
from kgorch.db import sessions, slurm_jobs
from kgorch.db.rows import RunInfo, SlurmJobInfo
from kgorch.db.runs import now
from kgorch.errors import KgorchError
from kgorch.slurm import commands
from kgorch.slurm.commands import SlurmError, SlurmMissing, SlurmUnavailable

SUBMITTING = timedelta(seconds=2 * commands.TIMEOUT_S)
"""After which a process that was submitting a job has died, or has got no answer."""


def job_folder(run: RunInfo) -> Path:
    """Where the batch script and the output of a run's jobs are."""
    return Path(run.folder) / "slurm"


def save_request(run: RunInfo) -> Path:
    """The file by which `kgorch save` on another node asks a job for a checkpoint; the job's process takes it away."""
    return job_folder(run) / "save"


def ask_to_save(engine: Engine, run: RunInfo) -> bool:
    """Ask the run's Slurm job for a checkpoint, wherever it runs. False where the run has none. Raises: KgorchError."""
    row, _ = newest(engine, run.id)
    if row is None or row.ended_at:
        return False
    if not JobState(row.state).is_running:
        raise KgorchError(
            f"{run.name} does not train: job {row.job or row.name} is {described(row)}",
            next_step=f"kgorch status {run.name}",
        )
    save_request(run).touch()
    return True


def submit(
    engine: Engine,
    run: RunInfo,
    name: str,
    *options: str,
    requeue: bool,
    follows: SlurmJobInfo | None = None,
) -> SlurmJobInfo:
    """Submit the run's batch script, which is written already.

    Args:
        follows: the job that this one succeeds. A second call after SlurmUnavailable finds the successor, or submits it again.
    Raises: SlurmError; KgorchError where another process has just submitted one.
    """
    job = None
    row = slurm_jobs.begin(engine, run.id, name=name, state=JobState.SUBMITTING, requeue=requeue, follows=follows)
    if row is None:
        row = slurm_jobs.open_job(engine, run.id)
        if not (row and follows and not row.job and row.follows == follows.job):
            raise KgorchError(f"{run.name} has a Slurm job already", next_step=f"kgorch status {run.name}")
        job = commands.find(row.name, row.follows)
    try:
        job = job or commands.submit(job_folder(run) / "job.sh", *options)
    except SlurmMissing:
        slurm_jobs.forget(engine, row)
        raise
    except SlurmUnavailable:
        raise  # it may have been submitted: the row stays, and the next look finds the job, or none
    except SlurmError:
        slurm_jobs.forget(engine, row)
        raise
    facts = {"job": job} | ({"follows": follows.job} if follows else {})
    sessions.add_event(engine, run.id, EventKind.SLURM_SUBMITTED, facts)
    # the job may run by now, and have recorded that itself
    newest = slurm_jobs.newest(engine, run.id) or row
    state = JobState.PENDING if newest.state == JobState.SUBMITTING else newest.state
    return slurm_jobs.save(engine, row.id, job=job, state=state, seen_at=now())


def refresh(engine: Engine, row: SlurmJobInfo) -> SlurmJobInfo:
    """The row as Slurm shows the job now. A job that is over without anything that follows it is closed.

    Raises: SlurmUnavailable: nothing has changed.
    """
    if row.ended_at:
        return row
    if not row.job:
        if now() - row.submitted_at < SUBMITTING:
            return row
        if (job := commands.find(row.name, row.follows)) is None:
            return slurm_jobs.close(engine, row, "it was not submitted", state=JobState.ABSENT)
        row = slurm_jobs.save(engine, row.id, job=job)
    view = commands.show(row.job)
    if view.state.is_over:
        # The process in the job decides what follows, and closes the row: it was killed before it could.
        return slurm_jobs.close(engine, row, ended_text(view), is_seen=True, **columns_of(view))
    return slurm_jobs.save(engine, row.id, **columns_of(view))


def ended_text(view: JobView) -> str:
    if view.state is JobState.ABSENT:
        return "Slurm does not know the job any more"
    reason = f", {view.reason}" if view.reason else ""
    return f"the job ended before the session could decide what follows it ({view.state}{reason})"


def columns_of(view: JobView) -> dict[str, Any]:
    columns: dict[str, Any] = {"state": view.state, "reason": view.reason, "seen_at": now()}
    if view.state is not JobState.ABSENT:  # what is known of it stays
        columns |= {"restarts": view.restarts, "node": view.node, "starts_at": view.starts_at}
    return columns


def newest(engine: Engine, run_id: str) -> tuple[SlurmJobInfo | None, str]:
    """The run's newest job as Slurm shows it now, and why Slurm did not answer; empty where it did, or was not asked."""
    row = slurm_jobs.newest(engine, run_id)
    if row is None or row.ended_at:
        return row, ""
    try:
        return refresh(engine, row), ""
    except SlurmUnavailable as error:
        return row, error.what


def stop(engine: Engine, row: SlurmJobInfo) -> tuple[SlurmJobInfo, str]:
    """Cancel a job that waits; have one that runs save and end. Nothing follows it.

    Returns: the row, and what was done. Raises: SlurmError; KgorchError while nobody knows the number of the job.
    """
    row = refresh(engine, slurm_jobs.save(engine, row.id, stop_at=now()))
    if not row.job and row.ended_at is None:
        if (job := commands.find(row.name, row.follows)) is None:
            raise KgorchError(
                f"the submission of the job {row.name} has not answered yet; if Slurm has the job, it ends as soon as it starts",
                next_step=f"type it again in {SUBMITTING.seconds} s: by then the job is found, or known not to exist",
            )
        row = refresh(engine, slurm_jobs.save(engine, row.id, job=job))
    if row.ended_at:
        return row, f"job {row.job} is over: {row.why}"
    if not JobState(row.state).is_running:
        commands.cancel_waiting(row.job)  # it leaves a job alone that has begun to run meanwhile
        view = commands.show(row.job)
        if view.state.is_over or view.state is JobState.COMPLETING:
            closed = slurm_jobs.close(engine, row, "stopped by the user", **columns_of(view))
            return closed, f"job {row.job} waited; it is cancelled"
    commands.ask_to_stop(row.job)
    return row, f"job {row.job} on {row.node or 'its node'} was asked to save and end"


def newest_row(engine: Engine, row: SlurmJobInfo) -> SlurmJobInfo:
    """The row as the job's own process, or Slurm, has it by now. Raises: SlurmUnavailable."""
    now_row = slurm_jobs.newest(engine, row.run_id)
    return refresh(engine, now_row) if now_row else row


def refuse_here(
    engine: Engine, run: RunInfo, environ: Mapping[str, str] = os.environ, *, then: str = "start again"
) -> None:
    """Refuse a session of a run on this machine, or its removal, while its Slurm job waits or runs. The job itself may.

    The lock of a run does not protect it everywhere: some cluster file systems have no locks across nodes.

    Args:
        then: what the user does after `kgorch stop`.

    Raises: KgorchError.
    """
    row, trouble = newest(engine, run.id)
    if row is None or row.ended_at or row.job == environ.get("SLURM_JOB_ID"):
        return
    facts = [f"Slurm does not answer: {trouble}"] if trouble else []
    raise KgorchError(
        f"{run.name} is trained by the Slurm job {row.job or row.name}: {described(row)}",
        *facts,
        next_step=f"kgorch stop {run.name}, then {then}",
    )


def described(row: SlurmJobInfo) -> str:
    """The state for people: `PENDING (Resources)`, or `RUNNING on n1`."""
    where = f" on {row.node}" if row.node and JobState(row.state).is_running else ""
    return f"{row.state}{where}" + (f" ({row.reason})" if row.reason else "")


def starts_at(row: SlurmJobInfo) -> datetime | None:
    """When a waiting job is expected to start."""
    return row.starts_at if row.state == JobState.PENDING and row.ended_at is None else None
