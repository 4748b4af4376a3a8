"""A run put into the daemon's queue instead of being begun."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime

from sqlalchemy import Engine

from db import queue, runs, sessions
from db.records import RunInfo
from orchestrator.admission import import_files, ownership, resolve_run
from orchestrator.admission.requests import LocalState, StartRequest
from orchestrator.admission.resolve_run import Nothing
from orchestrator.admission.source_scan import SILENT, Watcher
from orchestrator.core.codes import OVER, NotStarted, Reason, RunState
from orchestrator.errors import KgorchError
from orchestrator.hardware import gpu_locks
from orchestrator.plan import Plan, user_config
from orchestrator.system.file_lock import FileLock, is_locked
from orchestrator.system.paths import home_of_folder, lock_path


def enqueue(
    state: LocalState, request: StartRequest, *, due_at: datetime, watcher: Watcher = SILENT
) -> RunInfo | Nothing:
    """Like session_start.start, but the run waits in the queue for the daemon. Raises: as that."""
    engine = state.engine
    plan = resolve_run.checked(request)
    with ExitStack() as held:
        lock = FileLock(lock_path(state.home, plan.name))
        if not lock.acquire():
            return Nothing(resolve_run.run_elsewhere(engine, plan.name), NotStarted.LIVE)
        held.callback(lock.release)
        if ownership.is_live(engine, state.home, plan.name, fresh=request.fresh):
            return Nothing(resolve_run.run_elsewhere(engine, plan.name), NotStarted.LIVE)
        profile = user_config.resolve_platform(plan.platform, state.profile)
        run, plan, found = resolve_run.run_of(replace(state, profile=profile), request, plan, watcher)
        if run.state == RunState.FINISHED:
            return Nothing(run, NotStarted.FINISHED)
        last = sessions.last(engine, run.id)
        if found and (last is None or last.phase in OVER):
            import_files.catch_up(engine, run, plan, found, watcher)
        _put(engine, run, plan, due_at)
        return run


def enqueue_known(engine: Engine, run: RunInfo, *, due_at: datetime) -> Nothing | None:
    """A run that is known here stands in the queue, for the daemon; None when it does. Raises: KgorchError for a superseded one."""
    if run.state == RunState.FINISHED:
        return Nothing(run, NotStarted.FINISHED)
    if run.state == RunState.SUPERSEDED:
        raise KgorchError(
            f"another run has taken the place of {run.name}/{run.number}: {run.why}",
            next_step=f"kgorch queue add {run.name} queues that one",
        )
    if is_locked(lock_path(home_of_folder(run.folder), run.name)):
        return Nothing(run, NotStarted.LIVE)
    _put(engine, run, resolve_run.plan_of(run), due_at)
    return None


def _put(engine: Engine, run: RunInfo, plan: Plan, due_at: datetime) -> None:
    if run.state == RunState.FAILED:
        runs.set_state(engine, run.id, RunState.ACTIVE)
    wants = gpu_locks.resource_request(plan) | {"tries": 0}  # who asks has mended the cause
    queue.put(engine, run.id, reason=Reason.QUEUED, due_at=due_at, wants=wants)
