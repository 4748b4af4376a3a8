"""From "start this plan" to a supervisor that runs: take the run's lock, settle what a dead supervisor left, open the next session
or adopt the living one."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from db import checkpoints as checkpoint_rows
from db import queue, runs, sessions
from db.records import AttemptInfo, RunInfo, SessionInfo
from orchestrator.admission import import_files, ownership, resolve_run
from orchestrator.admission.requests import NO_CONSENT, Consent, LocalState, RunContext, StartRequest
from orchestrator.admission.resolve_run import Nothing
from orchestrator.admission.source_scan import SILENT, Found, Watcher
from orchestrator.checkpoint import registry, store
from orchestrator.core import save_deadline
from orchestrator.core.codes import OVER, NotStarted, Phase, Reason, RunState
from orchestrator.core.lifecycle import Session
from orchestrator.core.wall import Wall, nearest
from orchestrator.errors import KgorchError, PlanError
from orchestrator.hardware import devices, gpu_locks
from orchestrator.launch import attempts, launcher, requirements, rungs
from orchestrator.launch.attempts import Running
from orchestrator.limits import fixed_walls
from orchestrator.limits.quota_ledger import Ledger, terms_of
from orchestrator.limits.wall_sources import Walls
from orchestrator.plan import Plan, user_config
from orchestrator.services import mirror, notifications
from orchestrator.supervisor.loop import Listener, Observer, Supervisor
from orchestrator.supervisor.orphan_recovery import settle
from orchestrator.supervisor.recorder import say
from orchestrator.system import process_identity
from orchestrator.system.clock import boottime_s
from orchestrator.system.file_lock import FileLock
from orchestrator.system.paths import home_of_folder, lock_path

UNMEASURED = (
    'memory.microbatch = "auto": no kgorch check of stage {0.stage!r} on {0.device} with {0.world} ranks is kept here; '
    "it begins with a rank's whole share, and takes less when memory runs out. kgorch check PLAN measures what fits"
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose lock is ours, with the session to supervise."""

    run: RunInfo
    plan: Plan
    row: SessionInfo
    session: Session
    adopted: Running | None
    lock: FileLock
    walls: Walls
    claim: gpu_locks.GpuLocks

    def supervise(
        self, engine: Engine, observer: Observer = lambda _: None, listener: Listener = lambda _: None
    ) -> Session:
        """Until the session is over; then the run is concluded and the lock let go."""
        try:
            kept = ownership.Kept(Path(self.run.folder), self.run.name)
            with ownership.held(self.lock.refresh, self.claim.refresh, kept.look):
                ended = Supervisor(
                    engine,
                    self.run,
                    self.plan,
                    self.row,
                    self.session,
                    walls=self.walls,
                    claim=self.claim,
                    observer=observer,
                    listener=listener,
                ).run(self.adopted)
            kept.check()
            try:
                conclude(engine, self.run, ended.phase, ended.why)
            except OperationalError as error:  # the next start does it
                say(f"kgorch: that {self.run.name} is {ended.phase.value} cannot be written down: {error.orig}")
            return ended
        finally:
            self.claim.release()
            self.lock.release()


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


def conclude(engine: Engine, run: RunInfo, phase: Phase, why: str) -> None:
    """Bring the run's own state up to how its last session ended; safe to repeat."""
    if phase is Phase.FINISHED:
        runs.set_state(engine, run.id, RunState.FINISHED)
    elif phase is Phase.FAILED:
        runs.set_state(engine, run.id, RunState.FAILED, why)


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
            return _adopt(context, last, attempt, lock, how.until)
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
    return _open_session(context, lock, how.until)


def _open_session(context: RunContext, lock: FileLock, until: datetime | None) -> Opened | Nothing:
    with ExitStack() as held:
        claim = gpu_locks.acquire(context.home, context.run, gpu_locks.resource_request(context.plan))
        held.callback(claim.release)
        opened = _open_on(claim, context, lock, until)
        if isinstance(opened, Opened):
            held.pop_all()
        return opened


def _open_on(
    claim: gpu_locks.GpuLocks, context: RunContext, lock: FileLock, until: datetime | None
) -> Opened | Nothing:
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    now_s = boottime_s()
    walls = Walls(
        fixed_walls.fixed_wall(plan, profile, now_s, until), fixed_walls.moving_walls(engine, run, plan, profile)
    )
    session = _session_of(context, walls.nearest(now_s))
    length_s = plan.session.wall or profile.wall_s
    if length_s is not None and length_s <= session.least_lead_s:
        raise PlanError(
            f"session.wall = {length_s:g} s is over before a save would be",
            f"a save of this run with its margin takes {session.least_lead_s:.1f} s at least",
            next_step="give the session a longer wall, or session.margin a smaller value",
        )
    if (
        session.wall_kind is Reason.UNTIL
        and session.wall_s is not None
        and session.wall_s - now_s <= session.least_lead_s
    ):
        raise KgorchError(
            f"--until leaves {session.wall_s - now_s:.0f} s, which is over before a save would be",
            f"a save of this run with its margin takes {session.least_lead_s:.1f} s at least",
            next_step="give the session more time",
        )
    # Of a session that began with us, what we have done since has used the time up: copied a state that was found, perhaps.
    began_before_us = profile.began != "start"
    left_s = math.inf if session.wall_s is None else session.wall_s - now_s
    if session.wall_kind is Reason.TIME_LIMIT and began_before_us and left_s <= session.least_lead_s:
        raise KgorchError(
            f"the session's wall is over, or nearer than a save takes: {left_s:.0f} s are left of {length_s:g} s",
            f"it counts from the beginning of the {profile.began}, {now_s - fixed_walls.began_s(profile.began):.0f} s ago",
            next_step='give this session an end (--until 19:30), or count from its own start ([platform] began = "start")',
        )
    newest = checkpoint_rows.newest_verified(engine, run.id)
    if newest and (free_bytes := registry.disk_free_bytes(Path(newest.path).parent)) < newest.bytes:
        raise KgorchError(
            registry.no_room_message(Path(newest.path).parent, newest.bytes, free_bytes),
            next_step=f"kgorch checkpoints prune {run.name} drops what is not needed; then start again",
        )
    ledger = walls.ledger
    if ledger and (waits := _wait_for_quota(engine, run, ledger, session.lead_s)):
        return waits
    if not lock.refresh():  # its file was deleted while a source was copied, say, and another has begun a session
        return Nothing(run, NotStarted.LIVE)
    wall_at = None if session.wall_s is None else datetime.now(UTC) + timedelta(seconds=session.wall_s - now_s)
    row = sessions.open_session(
        engine,
        run.id,
        place="local",
        boot_id=process_identity.boot_id(),
        boot_wall_s=session.wall_s,
        wall_kind=session.wall_kind,
        fixed_wall_s=walls.fixed.at_s if walls.fixed else None,
        fixed_wall_kind=walls.fixed.kind if walls.fixed else Reason.NONE,
        wall_at=wall_at,
        lead_s=session.lead_s,
        first_step=_last_step(engine, run),
        step=_last_step(engine, run),
        pool=ledger.terms.quota.pool if ledger else "",
        **_us(),
    )
    if ledger:
        ledger.begin(run.id, row.id)
    _leave_queue(engine, run, plan)
    return Opened(run, plan, row, session, None, lock, walls, claim)


def _leave_queue(engine: Engine, run: RunInfo, plan: Plan) -> None:
    pid = os.getpid()
    queue.taken(
        engine,
        run.id,
        by=f"pid {pid}",
        pid=pid,
        ticks=process_identity.start_ticks(pid),
        boot=process_identity.boot_id(),
        wants=gpu_locks.resource_request(plan),
    )


def _wait_for_quota(engine: Engine, run: RunInfo, ledger: Ledger, lead_s: float) -> Nothing | None:
    """Put the run into the queue when the quota leaves no time for a session.

    Raises: PlanError when it never will.
    """
    quota, factor = ledger.terms.quota, ledger.terms.factor
    if quota.usable_s <= lead_s * factor:
        raise PlanError(
            f"the quota of {quota.pool!r} allows {quota.usable_s / factor:g} s a window: over before a save would be",
            f"a save of this run with its margin takes about {lead_s:.1f} s",
            next_step="give quota.hours more, quota.reserve less, or session.margin a smaller value",
        )
    if not ledger.is_spent(lead_s):
        return None
    due_at = ledger.resume_at(lead_s, on_quota=True)
    ledger.tell_pool(run.id)
    queue.put(engine, run.id, reason=Reason.QUOTA, due_at=due_at)
    return Nothing(run, NotStarted.QUOTA, due_at)


def _session_of(context: RunContext, wall: Wall | None) -> Session:
    engine, run, plan = context.engine, context.run, context.plan
    root = Path(run.checkpoints)
    speed = store.measure_write_speed(root)
    newest = checkpoint_rows.newest_verified(engine, run.id)
    trained_s, failures = sessions.trained(engine, run.id)
    wall_s = wall.at_s if wall else None
    length_s = None if wall_s is None else wall_s - boottime_s()
    return Session(
        wall_s=wall_s,
        wall_kind=wall.kind if wall else Reason.TIME_LIMIT,
        margin_s=plan.session.margin or save_deadline.default_margin_s(length_s),
        every_s=None if plan.checkpoint.every == "auto" else plan.checkpoint.every,
        saves=tuple(
            save_deadline.Save(*save)
            for save in checkpoint_rows.saves(engine, run.id, limit=save_deadline.RECENT_SAVES)
        ),
        state_bytes=newest.bytes if newest else 0,
        guess_s=save_deadline.first_guess_s(newest.bytes if newest else 0, speed),
        blocking_s=newest.blocking_s if newest else 0.0,
        trained_s=trained_s,
        failures=failures,
        write_bytes_per_s=speed,
    )


def _adopt(
    context: RunContext, last: SessionInfo, attempt: AttemptInfo, lock: FileLock, until: datetime | None
) -> Opened:
    """Training has outlived its supervisor: take it over as it runs, up to the wall that was, or one that is given now."""
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    # First the session's own CUDA_VISIBLE_DEVICES: what it costs follows from the GPUs that can be seen.
    told = launcher.environment(Path(attempt.folder)).get(gpu_locks.VISIBLE)
    claim = gpu_locks.reacquire(home_of_folder(run.folder), told, share=plan.session.share)
    was = None if last.fixed_wall_s is None else Wall(last.fixed_wall_s, last.fixed_wall_kind)
    fixed = nearest([was, fixed_walls.given_wall(until, boottime_s())])
    walls = Walls(fixed, fixed_walls.moving_walls(engine, run, plan, profile, last))
    more = attempts.more_after(engine, run, plan, attempt.stage)
    session = replace(
        _session_of(
            context,
            None if last.boot_wall_s is None else Wall(last.boot_wall_s, last.wall_kind or Reason.TIME_LIMIT),
        ),
        phase=Phase(last.phase),
        entered_s=boottime_s(),
        saved_s=boottime_s(),
        reason=last.reason,
        why=last.why,
        has_saved=last.id in checkpoint_rows.by_session(engine, [last.id]),
    )
    columns: dict[str, Any] = {
        **_us(),
        "fixed_wall_s": fixed.at_s if fixed else None,
        "fixed_wall_kind": fixed.kind if fixed else Reason.NONE,
    }
    sessions.update_session(engine, last.id, **columns)
    _leave_queue(engine, run, plan)
    row = last._replace(**columns)
    adopted = attempts.running(engine, run, last, attempt, more_stages=more)
    return Opened(run, plan, row, session, adopted, lock, walls, claim)


def _last_step(engine: Engine, run: RunInfo) -> int:
    last = sessions.last(engine, run.id)
    newest = checkpoint_rows.newest_verified(engine, run.id)
    return newest.step if newest else (last.first_step if last else 0)


def _us() -> dict[str, int | None]:
    return {"supervisor_pid": os.getpid(), "supervisor_started_ticks": process_identity.start_ticks(os.getpid())}
