"""Runs at a place, as the verbs and the daemon handle them: begin or continue one, visit it, stop it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from kgorch.admission import ownership, remote_sessions, resolve_run
from kgorch.admission.requests import SILENT, ImportWatcher, LocalState, StartRequest
from kgorch.core.codes import OVER, REMOTE_OPEN, NoticeKind, RunState
from kgorch.core.remote import session_plan
from kgorch.core.remote.session_states import Moment, stop
from kgorch.core.session.notification_policy import Notice, failure_notice, remote_notice
from kgorch.db import queue, remote, runs, sessions
from kgorch.db.rows import RemoteSessionInfo, RunInfo
from kgorch.errors import KgorchError
from kgorch.plan import Plan
from kgorch.remote import bootstrap, bundle, wheels
from kgorch.remote.bundle import BundleSource
from kgorch.remote.driver import Driver, Tools, exclusive, new_columns
from kgorch.remote.place import Place
from kgorch.remote.run_settings import RunSettings, settings_of
from kgorch.remote.session_rows import columns_of, session_of
from kgorch.services import notifications
from kgorch.slurm import jobs
from kgorch.system.file_lock import FileLock
from kgorch.system.paths import home_of_folder, lock_path

NOTICE_S = 120.0
"""For the notices of one visit, retries included."""


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """A run with its plan and what it asks of its place."""

    run: RunInfo
    plan: Plan
    settings: RunSettings

    @property
    def bundle_source(self) -> BundleSource:
        run, settings = self.run, self.settings
        overrides = [item for item in run.overrides if not item.startswith("remote.")]
        pythons = () if settings.profile.has_kgorch else tuple(wheels.PYTHONS)
        return BundleSource(self.plan, run.plan, overrides, Path(run.workdir), pythons)


def load(run: RunInfo) -> RemoteRun:
    """By the plan that is stored with the run. Raises: PlanError, ConfigError."""
    plan = resolve_run.load_stored_plan(run)
    return RemoteRun(run, plan, settings_of(plan))


def begin(state: LocalState, request: StartRequest, watcher: ImportWatcher = SILENT) -> RemoteRun:
    """Find or create the run of a plan that names a place, and plan its next session unless one is open. Pushes nothing.

    Raises: as session_start.start; KgorchError where it would part the run's history.
    """
    engine, plan = state.engine, resolve_run.load_requested_plan(request)
    settings_of(plan)
    with ExitStack() as locks:
        lock = FileLock(lock_path(state.home, plan.name))
        if not lock.acquire() or ownership.is_live(engine, state.home, plan.name, fresh=request.fresh):
            raise KgorchError(
                f"{plan.name!r} is being trained on this machine",
                next_step=f"kgorch stop {plan.name}",
                error_code="KG303",
            )
        locks.callback(lock.release)
        run, plan, _ = resolve_run.resolve(state, replace(request, run_id=None), plan, watcher)
        found = RemoteRun(run, plan, settings_of(plan))
        if run.state != RunState.FINISHED:
            _make_bundle(found, watcher)
            _plan_next(engine, found)
        return found


def _make_bundle(found: RemoteRun, watcher: ImportWatcher) -> None:
    """Now, while a person waits, who sees what is wrong with it; the daemon finds it unchanged, with the wheels."""
    folder = bundles_folder(found.run)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        bundle.build(found.bundle_source, folder)
    except wheels.DownloadFailed as error:
        watcher.note(f"{error}; it is tried again before the push")


def bundles_folder(run: RunInfo) -> Path:
    return home_of_folder(run.folder) / "places" / "bundles"


def _plan_next(engine: Engine, found: RemoteRun) -> None:
    run = found.run
    newest = remote.newest(engine, run.id)
    is_open = newest is not None and newest.state in REMOTE_OPEN
    if newest and is_open and newest.place != found.settings.place:
        raise KgorchError(
            f"session {newest.number} of {run.name!r} is not over at {newest.place}",
            next_step=f"wait for its end (kgorch status {run.name}), or kgorch stop {run.name}",
        )
    if not is_open:
        jobs.refuse_here(engine, run)
        _refuse_local_progress(engine, run, found.settings.place)
    queue.close(engine, run.id)  # a daemon that started it here would fail, and after eight tries the run with it
    if run.state == RunState.FAILED:
        runs.set_state(engine, run.id, RunState.ACTIVE)
    if is_open:
        remote.hurry(engine, run.id)
        return
    history = [session_of(row) for row in remote.of_run(engine, run.id)]
    moment = Moment(datetime.now(UTC), poll_s=found.settings.poll_s)
    following = session_plan.next_session(history, moment, session_s=found.settings.session_s, anew=True)
    if following:
        remote.plan(engine, run.id, new_columns(run, found.settings, following))


def _refuse_local_progress(engine: Engine, run: RunInfo, place: str) -> None:
    """State travels from one session's output to the next: what was trained here would be lost."""
    last = sessions.last(engine, run.id)
    if last and last.phase not in OVER:
        raise KgorchError(
            f"the last session of {run.name!r} on this machine was not ended",
            next_step=f"kgorch resume {run.name}",
            error_code="KG303",
        )
    here, best = remote_sessions.local_position(engine, run), remote_sessions.remote_best(engine, run)
    there = (best.reached_position, best.reached_step) if best else (-1, -1)
    if best and best.place != place:
        raise KgorchError(
            f"the state of {run.name!r} is at {best.place}, and cannot be attached at {place}",
            next_step=f"kgorch remote start PLAN --on {best.place}; or another run: --fresh",
        )
    if here > there:
        raise KgorchError(
            f"the newest state of {run.name!r} is on this machine: step {here[1]}",
            "a session at a place continues from the output of the one before; it cannot be sent from here",
            next_step="kgorch start PLAN continues it here; kgorch remote start PLAN --fresh begins a new run",
        )


def tools_of(engine: Engine, found: RemoteRun) -> Tools:
    """With bundles in the state folder, and notices to the plan's targets."""
    folder = bundles_folder(found.run)

    def build() -> bundle.Bundle:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return bundle.build(found.bundle_source, folder)

    def notify(text: str, state: RunState | None) -> None:
        notice = remote_notice(text)
        if state is RunState.FAILED:
            notice = failure_notice(text)
        elif state is RunState.FINISHED:
            notice = Notice((NoticeKind.FINISHED,), text)
        _send(engine, found, notice)

    return Tools(build, bootstrap.render, notify)


def _send(engine: Engine, found: RemoteRun, notice: Notice) -> None:
    run = found.run
    notifier = notifications.Notifier(
        found.plan.notify,
        run.name,
        Path(run.workdir),
        lambda kind, facts: sessions.add_event(engine, run.id, kind, facts),
    )
    notifier.tell(notice)
    notifier.finish(NOTICE_S)


def visit(engine: Engine, found: RemoteRun, place: Place) -> RemoteSessionInfo | None:
    """Do what is due (driver.py). Where another process is at it, nothing."""
    with exclusive(found.run) as is_ours:
        if is_ours:
            return Driver(engine, found.run, found.settings, place, tools_of(engine, found)).visit()
    return remote.newest(engine, found.run.id)


def stop_after_this(engine: Engine, run: RunInfo, ask_place: Callable[[str], str]) -> tuple[RemoteSessionInfo, str]:
    """No session follows the run's open one; what was not pushed is not pushed.

    Args:
        ask_place: has the place end a session of that name; returns what a person must know.
    Returns: the session, and that; empty where nothing was pushed.
    """
    remote.mark_last(engine, run.id)
    with exclusive(run) as is_ours:
        row = remote.newest(engine, run.id)
        assert row
        if is_ours and row.state in REMOTE_OPEN:
            session = stop(session_of(row), Moment(datetime.now(UTC)))
            row = remote.save(engine, row.id, columns_of(session))
    return row, ask_place(row.name) if row.pushed_at and row.state in REMOTE_OPEN else ""
