"""The Slurm job of a run, in the fields that `--json` promises (docs/json.md)."""

from __future__ import annotations

from sqlalchemy import Engine

from kgorch.core.codes import RunState
from kgorch.core.slurm.job_state import JobState
from kgorch.db import slurm_jobs
from kgorch.db.rows import RunInfo, SlurmJobInfo
from kgorch.report.json_fields import View, stamp
from kgorch.slurm import jobs
from kgorch.slurm.commands import SlurmUnavailable


def of_run(engine: Engine, run: RunInfo) -> View | None:
    """The run's newest job, as Slurm shows it now where it answers; None for a run without one."""
    row, trouble = jobs.newest(engine, run.id)
    if row is None:
        return None
    return {
        "job": row.job or None,
        "name": row.name,
        "state": row.state,
        "reason": row.reason,
        "node": row.node or None,
        "restarts": row.restarts,
        "requeue": row.requeue,
        "is_open": row.ended_at is None,
        "starts_at": stamp(jobs.starts_at(row)),
        "submitted_at": stamp(row.submitted_at),
        "seen_at": stamp(row.seen_at),
        "stop_at": stamp(row.stop_at),
        "ended_at": stamp(row.ended_at),
        "why": row.why,
        "trouble": trouble,
        "log": str(jobs.job_folder(run) / f"{row.job}.log") if row.job else None,
    }


def following(run: RunInfo, view: View) -> View:
    """What `next` says of a run whose job waits or runs; nothing for one whose job is over."""
    if not view["is_open"]:
        return {"command": "kgorch slurm submit PLAN"} if run.state == RunState.ACTIVE else {}
    return {"what": "slurm", "at": view["starts_at"], "command": None}


def is_alive(view: View | None, boot_id: str, own_boot_id: str) -> bool:
    """Whether a session that was opened on another machine may be alive there, in the run's job."""
    return bool(view and view["is_open"] and JobState(view["state"]).is_running and boot_id not in ("", own_boot_id))


def queue_entries(engine: Engine) -> list[View]:
    """The open jobs, in the fields of a run that waits to be started here (docs/json.md)."""
    entries = []
    for name, number, row in slurm_jobs.open_jobs(engine):
        trouble = ""
        try:
            row = jobs.refresh(engine, row)
        except SlurmUnavailable as error:
            trouble = error.what
        if row.ended_at is None:
            entries.append(_queue_entry(name, number, row, trouble))
    return entries


def _queue_entry(name: str, number: int, row: SlurmJobInfo, trouble: str) -> View:
    return {
        "run": name,
        "run_number": number,
        "state": "slurm",
        "due_at": stamp(jobs.starts_at(row)),
        "priority": 0,
        "reason": "",
        "why": f"job {row.job}: {jobs.described(row)}",
        "failed_starts": 0,
        "last_error": trouble or None,
        "ranks": None,
        "share": None,
    }
