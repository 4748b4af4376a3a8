"""One session of a run: opened, with its limits and GPUs, or adopted as it runs; and how its end becomes the run's own state."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kgorch.admission import fleet_member, ownership
from kgorch.admission.requests import RunContext
from kgorch.admission.resolve_run import NoSession
from kgorch.checkpoint import registry, store
from kgorch.core.checkpoint import save_deadline
from kgorch.core.codes import NotStarted, Phase, Reason, RunState
from kgorch.core.limits.wall import Wall, nearest
from kgorch.core.session.lifecycle_state import LifecycleState
from kgorch.db import checkpoints as checkpoint_rows
from kgorch.db import fleet, queue, runs, sessions
from kgorch.db.rows import AttemptInfo, RunInfo, SessionInfo
from kgorch.errors import KgorchError, PlanError
from kgorch.hardware import gpu_locks
from kgorch.launch import attempts, launcher
from kgorch.limits import fixed_walls
from kgorch.limits.quota_ledger import Ledger
from kgorch.limits.wall_sources import Walls, moving_walls
from kgorch.nodes import allocation
from kgorch.plan import Plan
from kgorch.supervisor.live_session import OpenSession
from kgorch.supervisor.loop import Supervisor
from kgorch.supervisor.observers import Listener, Observer
from kgorch.supervisor.recorder import say
from kgorch.system import process_identity
from kgorch.system.clock import boottime_s
from kgorch.system.file_lock import FileLock
from kgorch.system.paths import home_of_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySession(OpenSession):
    """A session to supervise, with the lock of its run, which is ours."""

    lock: FileLock

    def supervise(
        self, engine: Engine, observer: Observer = lambda _: None, listener: Listener = lambda _: None
    ) -> LifecycleState:
        """Until the session is over; then the run is concluded and the lock let go."""
        try:
            kept = ownership.RunFolderMonitor(Path(self.run.folder), self.run.name)
            with ownership.call_regularly(self.lock.refresh, self.claim.refresh, kept.look):
                ended = Supervisor(engine, self, observer=observer, listener=listener).run()
            kept.check()
            try:
                if sessions.has_ended_as(engine, self.row.id, ended.phase):
                    conclude(engine, self.run, ended.phase, ended.why)
            except SQLAlchemyError as error:  # the next start does it
                cause = getattr(error, "orig", error)
                say(f"kgorch: that {self.run.name} is {ended.phase.value} cannot be written down: {cause}")
            return ended
        finally:
            self.claim.release()
            self.lock.release()


def conclude(engine: Engine, run: RunInfo, phase: Phase, why: str) -> None:
    """Bring the run's own state up to how its last session ended; safe to repeat."""
    if phase is Phase.FINISHED:
        runs.set_state(engine, run.id, RunState.FINISHED)
    elif phase is Phase.FAILED:
        runs.set_state(engine, run.id, RunState.FAILED, why)


def open_session(context: RunContext, lock: FileLock, until: datetime | None) -> ReadySession | NoSession:
    with ExitStack() as held:
        claim = gpu_locks.acquire(context.home, context.run, gpu_locks.resource_request(context.plan))
        held.callback(claim.release)
        opened = _open_on(claim, context, lock, until)
        if isinstance(opened, ReadySession):
            held.pop_all()
        return opened


def _open_on(
    claim: gpu_locks.GpuLocks, context: RunContext, lock: FileLock, until: datetime | None
) -> ReadySession | NoSession:
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    for stage in attempts.open_stages(engine, run, plan):  # before a session that could train nothing
        if stage.nodes != 1:
            allocation.choose(stage, allocation.hosts_of(plan.nodes))
    now_s = boottime_s()
    walls = Walls(
        fixed_walls.fixed_wall(plan, profile, now_s, until),
        moving_walls(engine, plan, profile, claim.environ),
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
            error_code="KG501",
        )
    ledger = walls.ledger
    if ledger and (waits := _wait_for_quota(engine, run, ledger, session.save_lead_s)):
        return waits
    if not lock.refresh():  # its file was deleted while a source was copied, say, and another has begun a session
        return NoSession(run, NotStarted.LIVE)
    wall_at = None if session.wall_s is None else datetime.now(UTC) + timedelta(seconds=session.wall_s - now_s)
    fleet_member.register(engine, context.home)
    try:
        row = sessions.open_session(
            engine,
            run.id,
            site="local",
            boot_id=process_identity.boot_id(),
            wall_boottime_s=session.wall_s,
            wall_kind=session.wall_kind,
            fixed_wall_boottime_s=walls.fixed.at_s if walls.fixed else None,
            fixed_wall_kind=walls.fixed.kind if walls.fixed else Reason.NONE,
            wall_at=wall_at,
            save_lead_s=session.save_lead_s,
            first_step=_last_step(engine, run),
            step=_last_step(engine, run),
            pool=ledger.terms.quota.pool if ledger else "",
            charged=ledger.first_charges() if ledger else None,
            **_us(),
        )
    except IntegrityError:  # another machine of the fleet has opened one since
        return NoSession(run, NotStarted.LIVE)
    if ledger:
        ledger.begin(run.id, row.id)
    _leave_queue(engine, run, plan)
    return ReadySession(run=run, plan=plan, row=row, session=session, lock=lock, walls=walls, claim=claim)


def _leave_queue(engine: Engine, run: RunInfo, plan: Plan) -> None:
    pid = os.getpid()
    queue.mark_started(
        engine,
        run.id,
        queue.Claimant(pid, process_identity.start_ticks(pid), process_identity.boot_id(), runs.machine_of(engine)),
        by=f"pid {pid}",
        resource_request=gpu_locks.resource_request(plan),
    )


def _wait_for_quota(engine: Engine, run: RunInfo, ledger: Ledger, save_lead_s: float) -> NoSession | None:
    """Put the run into the queue when the quota leaves no time for a session.

    Raises: PlanError when it never will.
    """
    quota, factor = ledger.terms.quota, ledger.terms.factor
    if quota.usable_s <= save_lead_s * factor:
        raise PlanError(
            f"the quota of {quota.pool!r} allows {quota.usable_s / factor:g} s a window: over before a save would be",
            f"a save of this run with its margin takes about {save_lead_s:.1f} s",
            next_step="give quota.hours more, quota.reserve less, or session.margin a smaller value",
            error_code="KG302",
        )
    if not ledger.is_spent(save_lead_s):
        return None
    due_at = ledger.resume_at(save_lead_s, on_quota=True)
    ledger.record_pool(run.id)
    queue.put(engine, run.id, reason=Reason.QUOTA, due_at=due_at)
    return NoSession(run, NotStarted.QUOTA, due_at)


def _session_of(context: RunContext, wall: Wall | None) -> LifecycleState:
    engine, run, plan = context.engine, context.run, context.plan
    root = Path(run.checkpoints)
    speed = store.measure_write_speed(root)
    newest = checkpoint_rows.newest_verified(engine, run.id)
    trained_s, failures = sessions.duration_and_failures(engine, run.id)
    wall_s = wall.at_s if wall else None
    length_s = None if wall_s is None else wall_s - boottime_s()
    return LifecycleState(
        wall_s=wall_s,
        wall_kind=wall.kind if wall else Reason.TIME_LIMIT,
        margin_s=plan.session.margin or save_deadline.default_margin_s(length_s),
        every_s=None if plan.checkpoint.every == "auto" else plan.checkpoint.every,
        saves=tuple(
            save_deadline.Save(*save)
            for save in checkpoint_rows.save_history(engine, run.id, limit=save_deadline.RECENT_SAVES)
        ),
        state_bytes=newest.bytes if newest else 0,
        guess_s=save_deadline.first_guess_s(newest.bytes if newest else 0, speed),
        blocking_s=newest.blocking_s if newest else 0.0,
        trained_s=trained_s,
        failures=failures,
        write_bytes_per_s=speed,
    )


def adopt(
    context: RunContext, last: SessionInfo, attempt: AttemptInfo, lock: FileLock, until: datetime | None
) -> ReadySession:
    """Training has outlived its supervisor: take it over as it runs, up to the wall that was, or one that is given now."""
    engine, run, plan, profile = context.engine, context.run, context.plan, context.profile
    newest = checkpoint_rows.newest_verified(engine, run.id)
    # First the CUDA_VISIBLE_DEVICES of the training: what the session costs follows from the GPUs that it has.
    told = launcher.shim_environment(Path(attempt.folder)).get(gpu_locks.VISIBLE)
    claim = gpu_locks.reacquire(home_of_folder(run.folder), told, share=plan.session.share)
    was = None if last.fixed_wall_boottime_s is None else Wall(last.fixed_wall_boottime_s, last.fixed_wall_kind)
    fixed = nearest([was, fixed_walls.until_wall(until, boottime_s())])
    walls = Walls(fixed, moving_walls(engine, plan, profile, claim.environ, last))
    session = replace(
        _session_of(
            context,
            None if last.wall_boottime_s is None else Wall(last.wall_boottime_s, last.wall_kind or Reason.TIME_LIMIT),
        ),
        phase=Phase(last.phase),
        entered_s=boottime_s(),
        saved_s=boottime_s(),
        reason=last.reason,
        why=last.why,
        has_saved=last.id in checkpoint_rows.newest_by_session(engine, [last.id]),
        # only what its script does after the training is left
        is_final=newest is not None and newest.final and (newest.session_id, newest.stage) == (last.id, attempt.stage),
    )
    fleet.renew_session(engine, last.id)
    columns: dict[str, Any] = {
        **_us(),
        "fixed_wall_boottime_s": fixed.at_s if fixed else None,
        "fixed_wall_kind": fixed.kind if fixed else Reason.NONE,
    }
    sessions.update_session(engine, last.id, **columns)
    _leave_queue(engine, run, plan)
    row = last._replace(**columns)
    adopted = attempts.load_attempt(attempts.SessionContext(engine, run, plan, last, claim.environ), attempt)
    return ReadySession(
        run=run, plan=plan, row=row, session=session, adopted=adopted, lock=lock, walls=walls, claim=claim
    )


def _last_step(engine: Engine, run: RunInfo) -> int:
    last = sessions.last(engine, run.id)
    newest = checkpoint_rows.newest_verified(engine, run.id)
    return newest.step if newest else (last.first_step if last else 0)


def _us() -> dict[str, Any]:
    return {"supervisor_pid": os.getpid(), "supervisor_started_ticks": process_identity.start_ticks(os.getpid())}
