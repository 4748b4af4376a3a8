"""From "start this plan" to a supervisor that runs: take the run's lock, settle what a dead supervisor left, open the next session
or adopt the living one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from db import queue, runs, sessions
from db.records import RunInfo
from orchestrator.admission import import_files, ownership, resolve_run
from orchestrator.admission.open_session import Opened, adopt, conclude, open_session
from orchestrator.admission.requests import NO_CONSENT, Consent, LocalState, RunContext, StartRequest
from orchestrator.admission.resolve_run import Nothing
from orchestrator.admission.source_scan import SILENT, Found, Watcher
from orchestrator.core.codes import OVER, NotStarted, Phase, Reason, RunState
from orchestrator.errors import KgorchError, PlanError
from orchestrator.hardware import devices
from orchestrator.launch import attempts, launcher, requirements, rungs
from orchestrator.limits.quota_ledger import terms_of
from orchestrator.plan import user_config
from orchestrator.services import mirror, notifications
from orchestrator.supervisor.orphan_recovery import settle
from orchestrator.system.file_lock import FileLock
from orchestrator.system.paths import home_of_folder, lock_path

UNMEASURED = (
    'memory.microbatch = "auto": no kgorch check of stage {0.stage!r} on {0.device} with {0.world} ranks is kept here; '
    "it begins with a rank's whole share, and takes less when memory runs out. kgorch check PLAN measures what fits"
)


def start(
    state: LocalState, request: StartRequest, *, watcher: Watcher = SILENT, until: datetime | None = None
) -> Opened | Nothing:
    """Go on with the run of this plan's name, which may lie here or in a source, or begin it.

    Args:
        until: when this session, and no later one, shall be over.
    Raises: NotFound without one, PlanError, ConfigError, StateUnusable, CheckpointBroken, CheckpointUnreadable; KgorchError that
        lists several runs, or asks for consent.
    """
    engine, plan = state.engine, resolve_run.checked(request)
    with ExitStack() as held:  # what is held is let go of unless a session is opened
        if (lock := _lock(state, plan.name, held, fresh=request.fresh)) is None:
            return Nothing(resolve_run.run_elsewhere(engine, plan.name), NotStarted.LIVE)
        profile = user_config.resolve_platform(plan.platform, state.profile)
        run, plan, found = resolve_run.run_of(replace(state, profile=profile), request, plan, watcher)
        if run.state == RunState.FINISHED:
            return Nothing(run, NotStarted.FINISHED, changed=resolve_run.difference_of_finished(engine, run, plan))
        profile = user_config.resolve_platform(plan.platform, state.profile)
        context = RunContext(engine, run, plan, profile)
        opened = _go_on(context, lock, _Start(found, watcher, until))
        if isinstance(opened, Opened):
            held.pop_all()
        return opened


def _lock(state: LocalState, name: str, held: ExitStack, *, fresh: bool = False) -> FileLock | None:
    """The lock of the runs of that name, in `held`; None where another supervisor lives."""
    lock = FileLock(lock_path(state.home, name))
    if not lock.acquire():
        return None
    held.callback(lock.release)
    return None if ownership.is_live(state.engine, state.home, name, fresh=fresh) else lock


def resume(
    state: LocalState,
    name: str | None,
    *,
    watcher: Watcher = SILENT,
    until: datetime | None = None,
    by_user: bool = True,
    consent: Consent = NO_CONSENT,
) -> Opened | Nothing | None:
    """Go on with a run by the plan that it keeps: the named one, else the newest that is not finished. None when there is none.

    One that is not known here is looked for in the platform's sources.

    Raises: NotFound for a name that no run bears; as start.
    """
    engine = state.engine
    run: RunInfo | None
    if name:
        run = runs.newest(engine, name) or resolve_run.bring_by_name(state, name, watcher, consent)
    else:
        run = runs.newest_in(engine, (RunState.ACTIVE, RunState.FAILED))
        if run is None:
            return None
    if run.state == RunState.FINISHED:
        return Nothing(run, NotStarted.FINISHED)
    with ExitStack() as held:
        if (lock := _lock(state, run.name, held)) is None:
            return Nothing(run, NotStarted.LIVE)
        plan = resolve_run.plan_of(run)
        context = RunContext(engine, run, plan, user_config.resolve_platform(plan.platform, state.profile))
        opened = _go_on(context, lock, _Start(None, watcher, until, by_user))
        if isinstance(opened, Opened):
            held.pop_all()
        return opened


class _Start(NamedTuple):
    """How a session is to be opened. `found`: what a source has further of the run."""

    found: Found | None
    watcher: Watcher
    until: datetime | None
    by_user: bool = True


def _go_on(context: RunContext, lock: FileLock, how: _Start) -> Opened | Nothing:
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    mirror.check(plan)
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    if last and last.phase not in OVER:
        if attempt and attempt.outcome is None and launcher.is_running(Path(attempt.folder)):
            ownership.refuse_moved(home_of_folder(run.folder), run, attempt)
            return adopt(context, last, attempt, lock, how.until)
        before = last.reason
        last = settle(engine, run, plan, last, attempt, terms_of(plan, profile))
        if Reason.USER in (before, last.reason) and not how.by_user:
            queue.put(engine, run.id, reason=Reason.USER, due_at=None)
            return Nothing(run, NotStarted.STOPPED)
    if attempt and not launcher.kill(Path(attempt.folder)):  # its supervisor died between "over" and ending it
        raise KgorchError(
            f"processes of {attempt.folder} do not end", next_step="see what holds them (ps), then start again"
        )
    if how.found:
        import_files.catch_up(engine, run, plan, how.found, how.watcher)
        last = sessions.last(engine, run.id)
    if last and last.phase == Phase.FINISHED and not attempts.open_stages(engine, run, plan):
        conclude(engine, run, Phase.FINISHED, "")
        return Nothing(run, NotStarted.FINISHED)
    if run.state == RunState.FAILED:  # who starts it again has mended the cause, or wants to see it once more
        runs.set_state(engine, run.id, RunState.ACTIVE)
    if not Path(run.workdir).is_dir():
        raise PlanError(
            f"the plan's folder {run.workdir} is gone: the training is started there",
            next_step="kgorch start NEW/plan.toml, where it lies now",
        )
    notifications.check(plan.notify)  # not before what lives is taken over: that does not hang on a hook
    requirements.check_gpus(plan, how.watcher.note, platform=profile.name)
    stages = attempts.open_stages(engine, run, plan)
    requirements.check_data(stages, Path(run.workdir), how.watcher.note, platform=profile.name)
    for stage in stages[:1]:
        place = rungs.Place(stage.name, devices.model_name(), devices.rank_count(stage.ranks))
        if rungs.is_unmeasured(engine, run, plan, place):
            how.watcher.note(UNMEASURED.format(place))
    return open_session(context, lock, how.until)
