"""Give a run to Slurm: find or create it, write its batch script, submit it."""

from __future__ import annotations

import sys
from pathlib import Path

from sqlalchemy import Engine

from kgorch.admission import queue_entry, resolve_run
from kgorch.admission.requests import SILENT, ImportWatcher, LocalState, StartRequest
from kgorch.admission.resolve_run import NoSession
from kgorch.db import runs, sessions
from kgorch.db.rows import RunInfo, SlurmJobInfo
from kgorch.errors import KgorchError, StateUnusable
from kgorch.slurm import batch_script, jobs
from kgorch.slurm.batch_script import JobRequest, JobSetting
from kgorch.system import files
from kgorch.system.paths import last_run_number, run_folder

UNKNOWN_ID = "000000"
"""In the script that is shown of a run that does not exist yet."""


def preview(state: LocalState, request: StartRequest, job: JobRequest) -> str:
    """The batch script that `submit` would write. Changes nothing. Raises: PlanError, ConfigError, KgorchError."""
    job.check()
    plan = resolve_run.load_requested_plan(request)
    newest = runs.newest(state.engine, plan.name)
    if newest and not request.fresh:
        return batch_script.render(job, _setting(state.engine, newest, request.workdir))
    number = max(newest.number if newest else 0, last_run_number(state.home, plan.name)) + 1
    folder = run_folder(state.home, plan.name, number) / "slurm"
    name = batch_script.job_name(plan.name, UNKNOWN_ID)
    setting = JobSetting(name, plan.name, folder, state.home, request.workdir, sys.executable)
    return batch_script.render(job, setting)


def submit(
    state: LocalState, request: StartRequest, job: JobRequest, watcher: ImportWatcher = SILENT
) -> tuple[RunInfo, SlurmJobInfo, Path]:
    """Returns: the run, its job, and the batch script. Raises: as session_start.start; SlurmError; KgorchError."""
    job.check()
    if newest := runs.newest(state.engine, resolve_run.load_requested_plan(request).name):
        jobs.refuse_here(state.engine, newest)
    # without a time: sessions are started by Slurm, and by no daemon
    result = queue_entry.enqueue(state, request, due_at=None, watcher=watcher)
    if isinstance(result, NoSession):
        raise KgorchError(
            f"{result.run.name} is {result.why}; nothing was submitted", next_step=f"kgorch status {result.run.name}"
        )
    setting = _setting(state.engine, result, request.workdir)
    text = batch_script.render(job, setting)
    try:
        setting.folder.mkdir(parents=True, exist_ok=True)
        files.write(setting.script, text.encode(), durable=True)
    except OSError as error:
        raise StateUnusable(
            f"{setting.script} cannot be written",
            str(error.strerror),
            next_step="point KGORCH_HOME at a folder that can be written",
        ) from None
    row = jobs.submit(state.engine, result, setting.name, requeue=job.requeue)
    return result, row, setting.script


def _setting(engine: Engine, run: RunInfo, workdir: Path) -> JobSetting:
    last = sessions.last(engine, run.id)
    return JobSetting(
        batch_script.job_name(run.name, run.id),
        run.name,
        jobs.job_folder(run),
        Path(run.folder).parents[2],
        workdir,
        sys.executable,
        last.save_lead_s if last else None,
    )
