"""Put a run into the daemon's queue instead of starting it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime

from sqlalchemy import Engine

from kgorch.admission import import_files, ownership, remote_sessions, resolve_run
from kgorch.admission.requests import SILENT, ImportWatcher, LocalState, StartRequest
from kgorch.admission.resolve_run import NoSession
from kgorch.core.codes import OVER, NotStarted, Reason, RunState
from kgorch.db import fleet, queue, runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import KgorchError
from kgorch.hardware import gpu_locks
from kgorch.plan import Plan, user_config
from kgorch.slurm import jobs
from kgorch.system.file_lock import FileLock, is_locked
from kgorch.system.paths import home_of_folder, lock_path


def enqueue(
    state: LocalState, request: StartRequest, *, due_at: datetime | None, watcher: ImportWatcher = SILENT
) -> RunInfo | NoSession:
    """Put the run of a plan into the queue, found, imported or created as session_start.start does.

    Args:
        due_at: None for a run that no daemon starts.
    Raises: as session_start.start.
    """
    engine = state.engine
    plan = resolve_run.load_requested_plan(request)
    with ExitStack() as locks:
        lock = FileLock(lock_path(state.home, plan.name))
        if not lock.acquire():
            return NoSession(resolve_run.wait_for_row(engine, plan.name), NotStarted.LIVE)
        locks.callback(lock.release)
        if ownership.is_live(engine, state.home, plan.name, fresh=request.fresh):
            return NoSession(resolve_run.wait_for_row(engine, plan.name), NotStarted.LIVE)
        profile = user_config.resolve_platform(plan.platform, state.profile)
        run, plan, source = resolve_run.resolve(replace(state, profile=profile), request, plan, watcher)
        if run.state == RunState.FINISHED:
            return NoSession(run, NotStarted.FINISHED)
        last = sessions.last(engine, run.id)
        if source and (last is None or last.phase in OVER):
            import_files.sync_from_source(engine, run, plan, source, watcher)
        _put(engine, run, plan, due_at)
        return run


def enqueue_known(engine: Engine, run: RunInfo, *, due_at: datetime, priority: int | None = None) -> NoSession | None:
    """Put a run of this state folder into the queue. Returns: None, or why it was not put there.

    Args:
        priority: instead of the plan's `session.priority`, until the run is queued anew.
    Raises: KgorchError for a superseded run; PlanError; ConfigError.
    """
    if run.state == RunState.FINISHED:
        return NoSession(run, NotStarted.FINISHED)
    if run.state == RunState.SUPERSEDED:
        raise KgorchError(
            f"another run has taken the place of {run.name}/{run.number}: {run.why}",
            next_step=f"kgorch queue add {run.name} queues that one",
        )
    last = sessions.last(engine, run.id)
    if (
        last
        and last.phase not in OVER
        and fleet.is_elsewhere(engine, last.machine)
        and fleet.is_leased(engine, last.id)
    ):
        return NoSession(run, NotStarted.LIVE)
    if is_locked(lock_path(home_of_folder(run.folder), run.name)):
        return NoSession(run, NotStarted.LIVE)
    _put(engine, run, resolve_run.load_stored_plan(run), due_at, priority)
    return None


def _put(engine: Engine, run: RunInfo, plan: Plan, due_at: datetime | None, priority: int | None = None) -> None:
    remote_sessions.refuse_here(engine, run)
    jobs.refuse_here(engine, run)
    if run.state == RunState.FAILED:
        runs.set_state(engine, run.id, RunState.ACTIVE)
    resource_request = gpu_locks.resource_request(plan) | {
        "failed_starts": 0
    }  # a user who queues it again has removed the cause of failures
    if priority is not None:
        resource_request["priority"] = priority
    if due_at and due_at <= datetime.now(UTC):  # at once, also by the clock of a fleet's server
        due_at = min(due_at, fleet.server_now(engine))
    queue.put(engine, run.id, reason=Reason.QUEUED, due_at=due_at, resource_request=resource_request)
