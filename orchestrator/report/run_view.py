"""The current state of a run and its history, in the fields that `status --json` and `start --json` promise (docs/json.md).

Times are ISO 8601 in UTC, durations seconds. A figure that is not known is null, never 0.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.checkpoint import store
from kgorch.core.codes import OVER, Phase, Reason, RunState
from kgorch.core.slurm.job_state import JobState
from kgorch.db import checkpoints, fleet, queue, rungs, runs, samples, sessions
from kgorch.db.rows import AttemptInfo, CheckpointInfo, ResumeInfo, RungInfo, RunInfo, SessionInfo
from kgorch.report import exactness, forecast, quota_view, remote_view, run_notices, slurm_view
from kgorch.report.json_fields import View, finite_metrics, stamp
from kgorch.slurm import jobs
from kgorch.snapshots import keeper_client
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s
from kgorch.system.file_lock import is_locked
from kgorch.system.paths import home_of_folder

MAX_RUNGS = 20
"""Newest rungs of the memory ladder in a view."""

MOST_WITHOUT_STEP = 10
"""Newest sessions in which is searched what the last one has not told."""


def of_run(engine: Engine, run: RunInfo, *, now: datetime | None = None) -> View:
    """The state of a run. Reads the database, and asks the run's snapshot server while training lives."""
    # Read first: a job is closed by the last write of its end. Slurm may take seconds to answer, in which the rows change.
    job = slurm_view.of_run(engine, run)
    if job:
        run = runs.by_id(engine, run.id) or run
    now = now or datetime.now(UTC)
    row = sessions.last(engine, run.id)
    stages = runs.stages(engine, run.id)
    newest = checkpoints.newest_verified(engine, run.id)
    resume = queue.pending_resume(engine, run.id)
    max_steps = sessions.max_steps(engine, run.id)
    own_boot_id = process_identity.boot_id()
    is_alive = row is not None and (
        is_supervised(engine, row) or (row.phase not in OVER and slurm_view.is_alive(job, row.boot_id, own_boot_id))
    )
    # Training outlives its supervisor: a later resume adopts it.
    is_training = row is not None and not is_alive and row.phase not in OVER and is_running(engine, row)
    elsewhere = remote_view.of_run(engine, run)
    reached = _reached(engine, run, row) if row else {}
    return {
        "run": run.name,
        "run_number": run.number,
        "state": run.state,
        "phase": row.phase if row else Phase.QUEUED,
        "reason": row.reason if row else Reason.NONE,
        "why": run.why or (row.why if row else ""),
        "stage": row.stage if row else "",
        "stages": [
            {"name": item.name, "done": item.finished_at is not None, "step": max_steps.get(item.name)}
            for item in stages
        ],
        "epoch": reached.get("epoch", 0),
        "epochs_total": reached.get("epochs_total"),
        "step": reached.get("step", 0),
        "steps_total": reached.get("steps_total"),
        "step_s": (row.step_s or None) if row else None,
        "samples": reached.get("samples", 0),
        "session": session_fields(row, is_alive, is_training, now) if row else None,
        "checkpoint": _checkpoint(newest),
        "best": _best(checkpoints.best(engine, run.id)),
        "on_disk": _on_disk(engine, run, row, newest) if row and not is_alive else None,
        "snapshot": _snapshot(run, now) if is_alive or is_training else None,
        "metrics": reached.get("metrics", {}),
        "telemetry": _telemetry(engine, row) if row else None,
        "exactness": exactness.of_run(engine, run, row) if row else {},
        "memory": _memory(engine, run, row) if row else None,
        "forecast": forecast.of_run(engine, run, row, now, is_live=is_alive or is_training) if row else None,
        "failure": _failure(engine, run),
        "quota": quota_view.of_run(engine, run, now),
        "notices": list(run_notices.of_run(engine, run, row, newest)),
        "remote": elsewhere,
        "slurm": job,
        "next": next_fields(run, row, resume, is_alive, is_training)
        | (remote_view.following(run, elsewhere, is_here=row is not None) if elsewhere else {})
        | (slurm_view.following(run, job) if job and not is_alive else {}),
        "folder": run.folder,
    }


def _reached(engine: Engine, run: RunInfo, row: SessionInfo) -> View:
    """How far the run has come in its stage. What an ended session has not told, as one without a step, those before it have."""
    told = [row]
    if row.phase in OVER:
        before = reversed(sessions.of_run(engine, run.id, limit=MOST_WITHOUT_STEP))
        told += [item for item in before if item.stage == row.stage and item.id != row.id]
    here = [item for item in told if item.step == row.step]
    return {
        "epoch": next((item.epoch for item in here if item.epoch), 0),
        "epochs_total": next((item.epochs_total for item in here if item.epochs_total), None),
        "step": row.step,
        "steps_total": next((item.steps_total for item in told if item.steps_total), None),
        "samples": next((item.samples for item in here if item.samples), 0),
        "metrics": next((finite_metrics(item.metrics) for item in here if item.metrics), {}),
    }


def history(engine: Engine, run: RunInfo, *, limit: int | None = None) -> list[View]:
    """One entry for each session, oldest first; with a limit the newest sessions. Those at another place come last."""
    rows = sessions.of_run(engine, run.id, limit=limit)
    ids = [row.id for row in rows]
    # One query each for all sessions: a run may have thousands.
    newest_checkpoints, run_rungs = checkpoints.newest_by_session(engine, ids), rungs.of_run(engine, run.id)
    attempts = defaultdict(list)
    for attempt in sessions.attempts_of_sessions(engine, ids):
        attempts[attempt.session_id].append(attempt)
    entries = []
    for row in rows:
        of_session = attempts[row.id]
        until = row.ended_at or row.heartbeat_at or row.started_at
        entries.append(
            {
                "number": row.number,
                "site": row.site,
                "phase": row.phase,
                "reason": row.reason,
                "why": row.why,
                "started_at": stamp(row.started_at),
                "ended_at": stamp(row.ended_at),
                "lasted_s": max(0.0, (until - row.started_at).total_seconds()),  # the wall clock may have been set back
                "stages": _stages(of_session),
                "attempts": [
                    {
                        "number": item.number,
                        "stage": item.stage,
                        "first_step": item.first_step,
                        "last_step": item.last_step,
                        "outcome": item.outcome,
                        "cause": item.cause,
                    }
                    for item in of_session
                ],
                "rungs": [_rung(rung) | {"stage": rung.stage} for rung in run_rungs if rung.session_id == row.id],
                "checkpoint": _checkpoint(newest_checkpoints.get(row.id)),
                "metrics": finite_metrics(row.metrics),
            }
        )
    entries += remote_view.history(engine, run, [row.started_at for row in rows])
    return entries[-limit:] if limit else entries


def _stages(attempts: Sequence[AttemptInfo]) -> list[View]:
    """The stages of a session, with the steps that each did in it."""
    names = dict.fromkeys(attempt.stage for attempt in attempts)
    return [
        {
            "name": name,
            "first_step": min(item.first_step for item in attempts if item.stage == name),
            "last_step": max(item.last_step for item in attempts if item.stage == name),
        }
        for name in names
    ]


def is_live(engine: Engine, row: SessionInfo) -> bool:
    """Whether a session is supervised: on this machine, or on the node of its Slurm job."""
    if is_supervised(engine, row):
        return True
    if row.phase in OVER or row.boot_id == process_identity.boot_id():
        return False
    job, _ = jobs.newest(engine, row.run_id)
    return job is not None and job.ended_at is None and JobState(job.state).is_running


def is_supervised(engine: Engine, row: SessionInfo) -> bool:
    """Whether its supervisor lives; on another machine of the fleet, by its lease."""
    if fleet.is_elsewhere(engine, row.machine):
        return row.phase not in OVER and fleet.is_leased(engine, row.id)
    return row.phase not in OVER and process_identity.is_alive(
        row.supervisor_pid, row.supervisor_started_ticks, row.boot_id
    )


def session_fields(row: SessionInfo, is_alive: bool, is_training: bool, now: datetime) -> View:
    over = row.phase in OVER
    left_s = None if row.wall_at is None or over else max(0.0, _left_s(row, row.wall_at, now))
    return {
        "number": row.number,
        "site": row.site,
        "started_at": stamp(row.started_at),
        "ended_at": stamp(row.ended_at),
        "wall_at": stamp(row.wall_at),
        "left_s": left_s,
        "save_lead_s": row.save_lead_s,
        "supervisor": {"pid": row.supervisor_pid, "alive": is_alive},
        "training_alive": is_alive or is_training,
        "heartbeat_at": stamp(row.heartbeat_at),
    }


def _left_s(row: SessionInfo, wall_at: datetime, now: datetime) -> float:
    """By the boot-time clock, which nobody sets, if the session is of this boot; else by the wall clock."""
    if row.wall_boottime_s is not None and row.boot_id == process_identity.boot_id():
        return row.wall_boottime_s - boottime_s()
    return (wall_at - now).total_seconds()


def _checkpoint(row: CheckpointInfo | None) -> View | None:
    if row is None:
        return None
    return {
        "stage": row.stage,
        "step": row.step,
        "at": stamp(row.created_at),
        "verified": row.verified_at is not None,
        "final": row.final,
        "bytes": row.bytes,
        "path": row.path,
        "source": row.source or None,
    }


def _best(row: CheckpointInfo | None) -> View | None:
    if row is None:
        return None
    metric = row.best.rpartition(":")[0]
    return {
        "by": row.best,
        "value": finite_metrics(row.metrics).get(metric),
        "stage": row.stage,
        "step": row.step,
        "path": row.path,
    }


def _on_disk(engine: Engine, run: RunInfo, row: SessionInfo, newest: CheckpointInfo | None) -> View | None:
    """A checkpoint that ranks have saved and no supervisor has recorded, newer than the newest verified one; None if there is none.

    Ranks save without a supervisor, too.
    """
    if run.state == RunState.FINISHED or not row.stage:
        return None
    is_known = functools.partial(checkpoints.is_recorded, engine, run.id, row.stage)
    after = newest.step if newest and newest.stage == row.stage else -1
    checkpoint = store.newest_by_manifest(Path(run.checkpoints, row.stage), run.id, after=after, is_known=is_known)
    if checkpoint is None:
        return None
    folder, manifest, at = checkpoint
    return {
        "stage": manifest.stage,
        "step": manifest.step,
        "at": stamp(at),
        "bytes": manifest.total_bytes,
        "path": str(folder),
    }


def _snapshot(run: RunInfo, now: datetime) -> View | None:
    """The newest snapshot in the memory of the run's snapshot server, which is asked now."""
    snapshot = keeper_client.newest(Path(run.folder), timeout_s=0.2)
    if snapshot is None or snapshot.run_id != run.id:
        return None
    at = now - timedelta(seconds=boottime_s() - snapshot.at_s)
    return {"stage": snapshot.stage, "step": snapshot.step, "at": stamp(at)}


def _telemetry(engine: Engine, row: SessionInfo) -> View | None:
    sample = samples.newest(engine, row.id)
    return {"at": stamp(sample.at), "span_s": sample.span_s, "values": dict(sample.values)} if sample else None


def _memory(engine: Engine, run: RunInfo, row: SessionInfo) -> View | None:
    """The rungs of the memory ladder that the newest session's stage has taken; None if it has taken none."""
    stage_rungs = [rung for rung in rungs.of_run(engine, run.id) if rung.stage == row.stage]
    if not stage_rungs:
        return None
    # Remedies of health are rows of the same table, without settings of memory.
    settings: Mapping[str, Any] = next(
        (rung.settings["settings"] for rung in reversed(stage_rungs) if "settings" in rung.settings), {}
    )
    return {
        "microbatch": settings.get("microbatch"),
        "activation_checkpointing": bool(settings.get("activation_checkpointing")),
        "rungs": [_rung(rung) for rung in stage_rungs[-MAX_RUNGS:]],
    }


def _rung(rung: RungInfo) -> View:
    return {"rung": rung.rung, "step": rung.step, "why": rung.why, "changes_result": rung.changes_result}


def _failure(engine: Engine, run: RunInfo) -> View | None:
    if run.state != RunState.FAILED:
        return None
    from kgorch.report import failure  # loads what judges attempts; most runs have not failed

    return failure.of_run(engine, run)


def next_fields(
    run: RunInfo, row: SessionInfo | None, resume: ResumeInfo | None, is_alive: bool, is_training: bool
) -> View:
    command: str | None = f"kgorch resume {run.name}"
    at = None
    if run.state == RunState.FINISHED:
        what, command = "nothing", None
    elif run.state == RunState.FAILED:
        what = "mend"
    elif row is not None and row.phase not in OVER:
        what, command = ("train", None) if is_alive else ("adopt" if is_training else "resume", command)
    else:
        what, at = "resume", stamp(resume.due_at) if resume else None
    return {"what": what, "at": at, "command": command, "daemon_alive": _is_daemon_alive(run)}


def _is_daemon_alive(run: RunInfo) -> bool:
    """By its lock. A request over its socket would wait while the daemon is busy."""
    try:
        return is_locked(home_of_folder(run.folder) / "daemon.lock")
    except (OSError, ValueError):
        return False


def is_running(engine: Engine, row: SessionInfo) -> bool:
    """Whether processes of the session's last attempt live, with a supervisor or without."""
    attempt = sessions.last_attempt(engine, row.id)
    # The attempt's lock is held by its processes, not by the supervisor.
    return attempt is not None and attempt.outcome is None and is_locked(Path(attempt.folder, "lock"))
