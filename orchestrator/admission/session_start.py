"""Start or resume a run: take its lock, recover what a dead supervisor left, then open a session or adopt the running one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.admission import import_files, moved_state, ownership, remote_sessions, resolve_run
from kgorch.admission.open_session import ReadySession, adopt, conclude, open_session
from kgorch.admission.requests import (
    SILENT,
    ImportWatcher,
    LocalState,
    ResumeRequest,
    RunContext,
    StartRequest,
)
from kgorch.admission.resolve_run import NoSession
from kgorch.admission.source_run import SourceRun
from kgorch.core.codes import OVER, NotStarted, Phase, Reason, RunState
from kgorch.db import fleet, queue, runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import KgorchError, PlanError
from kgorch.hardware import devices
from kgorch.launch import attempts, launcher, requirements, rungs, standby
from kgorch.limits.quota_ledger import terms_of
from kgorch.plan import user_config
from kgorch.services import mirror, notifications, trackers
from kgorch.slurm import jobs
from kgorch.supervisor.orphan_recovery import recover_session
from kgorch.system.file_lock import FileLock
from kgorch.system.paths import home_of_folder, lock_path

UNMEASURED = (
    'memory.microbatch = "auto": no kgorch check of stage {0.stage!r} on {0.device} with {0.world_size} ranks is kept here; '
    "it begins with a rank's whole share, and takes less when memory runs out. kgorch check PLAN measures what fits"
)


class _SessionRequest(NamedTuple):
    """How a session is to be opened.

    Attributes:
        source: what a source has of the run that this state folder has not.
        until: when this session, and no later one, is to be over; None for no such time.
        by_user: as in ResumeRequest.
    """

    source: SourceRun | None
    watcher: ImportWatcher
    until: datetime | None
    by_user: bool = True


def start(
    state: LocalState, request: StartRequest, *, watcher: ImportWatcher = SILENT, until: datetime | None = None
) -> ReadySession | NoSession:
    """Resume the run of this plan's name, which may be in this state folder or in a source, or begin it.

    Args:
        until: when this session, and no later one, is to be over.
    Raises: NotFound, PlanError, ConfigError, StateUnusable, CheckpointBroken, CheckpointUnreadable; KgorchError that lists several
        runs, or asks for consent.
    """
    engine, plan = state.engine, resolve_run.load_requested_plan(request)
    with ExitStack() as locks:  # releases the lock unless a session is opened, which keeps it
        if (lock := _lock(state, plan.name, locks, fresh=request.fresh)) is None:
            return NoSession(resolve_run.wait_for_row(engine, plan.name), NotStarted.LIVE)
        profile = user_config.resolve_platform(plan.platform, state.profile)
        run, plan, source = resolve_run.resolve(replace(state, profile=profile), request, plan, watcher)
        if run.state == RunState.FINISHED:
            differences = resolve_run.differences_from_finished(engine, run, plan)
            return NoSession(run, NotStarted.FINISHED, plan_differences=differences)
        # The overrides that the run keeps may name another platform than the plan's text.
        profile = user_config.resolve_platform(plan.platform, state.profile)
        context = RunContext(engine, run, plan, profile)
        result = _open_or_adopt(context, lock, _SessionRequest(source, watcher, until))
        if isinstance(result, ReadySession):
            locks.pop_all()
        return result


def _lock(state: LocalState, name: str, locks: ExitStack, *, fresh: bool = False) -> FileLock | None:
    """The lock of the runs of that name, released by `locks`; None if another supervisor is alive."""
    lock = FileLock(lock_path(state.home, name))
    if not lock.acquire():
        return None
    locks.callback(lock.release)
    return None if ownership.is_live(state.engine, state.home, name, fresh=fresh) else lock


def resume(
    state: LocalState, request: ResumeRequest, *, watcher: ImportWatcher = SILENT, until: datetime | None = None
) -> ReadySession | NoSession | None:
    """Resume a run by the plan that is stored with it; None if there is none to resume.

    A run that this state folder does not know is looked for in the platform's sources.

    Raises: NotFound for an unknown name; as start.
    """
    engine = state.engine
    if request.name:
        run = runs.named(engine, request.name) or resolve_run.import_by_name(
            state, request.name, watcher, request.consent
        )
        if (newest := runs.newest(engine, run.name)) and newest.id != run.id:
            what = f"a newer run of this name continues instead: number {newest.number}"
            raise KgorchError(what, next_step=f"kgorch resume {run.name}", error_code="KG303")
    elif newest := runs.newest_in_states(engine, (RunState.ACTIVE, RunState.FAILED)):
        run = newest
    else:
        return None
    if run.state == RunState.FINISHED:
        return NoSession(run, NotStarted.FINISHED)
    with ExitStack() as locks:
        if (lock := _lock(state, run.name, locks)) is None:
            return NoSession(run, NotStarted.LIVE)
        plan = resolve_run.load_stored_plan(run)
        standby.prepare(plan.launchers)
        context = RunContext(engine, run, plan, user_config.resolve_platform(plan.platform, state.profile))
        result = _open_or_adopt(context, lock, _SessionRequest(None, watcher, until, request.by_user))
        if isinstance(result, ReadySession):
            locks.pop_all()
        return result


def _open_or_adopt(context: RunContext, lock: FileLock, request: _SessionRequest) -> ReadySession | NoSession:
    """Adopt the run's session if its processes are alive; else recover it, check the machine, and open the next one."""
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    remote_sessions.refuse_here(engine, run)
    jobs.refuse_here(engine, run)
    mirror.check(plan)
    moved_state.bring(context, context.home, request.watcher)
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    if last and last.phase not in OVER:
        # Training does not end with its supervisor: it is adopted as it runs, without losing a step.
        is_elsewhere = fleet.is_elsewhere(engine, last.machine)
        if is_elsewhere and fleet.is_leased(engine, last.id):  # it was heard of again while its files were fetched
            return NoSession(run, NotStarted.LIVE)
        if attempt and attempt.outcome is None and launcher.is_running(Path(attempt.folder)):
            if is_elsewhere:  # a shared state folder: its machine cannot reach the database, and trains
                return NoSession(run, NotStarted.LIVE)
            ownership.refuse_moved(home_of_folder(run.folder), run, attempt)
            return adopt(context, last, attempt, lock, request.until)
        before = last.reason
        try:
            last = recover_session(engine, run, plan, last, attempt, terms_of(plan, profile))
        except sessions.SessionTaken:  # another machine has just ended it, and opens the next one
            return NoSession(run, NotStarted.LIVE)
        # The daemon does not resume what a user has stopped and not queued since, also if the supervisor died while it stopped.
        is_stopped = Reason.USER in (before, last.reason) and not _is_queued_as(engine, run, Reason.QUEUED)
        if is_stopped and not request.by_user:
            queue.put(engine, run.id, reason=Reason.USER, due_at=None)
            return NoSession(run, NotStarted.STOPPED)
    elif not request.by_user and _is_queued_as(engine, run, Reason.USER):  # stopped since the daemon claimed it
        return NoSession(run, NotStarted.STOPPED)
    # A supervisor may die after it has recorded the session's end and before it has ended the processes.
    if attempt and not launcher.kill(Path(attempt.folder)):
        raise KgorchError(
            f"processes of {attempt.folder} do not end", next_step="see what holds them (ps), then start again"
        )
    # A failure that the database did not take at first is known by now, and only a user tries a failed run again.
    if last and last.phase == Phase.FAILED and not request.by_user and _is_queued_as(engine, run, Reason.LOST):
        conclude(engine, run, Phase.FAILED, last.why)
        return NoSession(run, NotStarted.FAILED)
    if request.source:
        import_files.sync_from_source(engine, run, plan, request.source, request.watcher)
        last = sessions.last(engine, run.id)
    if last and last.phase == Phase.FINISHED and not attempts.open_stages(engine, run, plan):
        conclude(engine, run, Phase.FINISHED, "")
        return NoSession(run, NotStarted.FINISHED)
    if run.state == RunState.FAILED:  # a user who starts it again has removed the cause, or wants to see it once more
        runs.set_state(engine, run.id, RunState.ACTIVE)
    if not Path(run.workdir).is_dir():
        raise PlanError(
            f"the plan's folder {run.workdir} is gone: the training is started there",
            next_step="kgorch start NEW/plan.toml, with its new path",
            error_code="KG103",
        )
    # Checked only now: adopting a living session must not fail on a notification target.
    notifications.check(plan.notify)
    trackers.check(plan.track)
    requirements.check_gpus(plan, request.watcher.note, platform=profile.name)
    stages = attempts.open_stages(engine, run, plan)
    requirements.check_stages(stages, Path(run.workdir), request.watcher.note, platform=profile.name)
    for stage in stages[:1]:
        place = rungs.RungScope(stage.name, devices.model_name(), devices.rank_count(stage.ranks))
        if rungs.is_unmeasured(engine, run, plan, place):
            request.watcher.note(UNMEASURED.format(place))
    return open_session(context, lock, request.until)


def _is_queued_as(engine: Engine, run: RunInfo, reason: Reason) -> bool:
    row = queue.pending_resume(engine, run.id)
    return row is not None and row.reason == reason
