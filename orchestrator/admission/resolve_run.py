"""Find the run that a plan or a name means: one in this state folder, one in a source, or a new one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from kgorch.admission import import_run, plan_changes
from kgorch.admission.requests import NO_CONSENT, Consent, ImportWatcher, LocalState, StartRequest
from kgorch.admission.source_run import SourceRun
from kgorch.core.codes import EventKind, NotStarted, RunState
from kgorch.db import runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import KgorchError, PlanError
from kgorch.launch import extension
from kgorch.plan import Plan, check_entries, parse, user_config
from kgorch.services import mirror, notifications, trackers
from kgorch.system.file_lock import FileLock
from kgorch.system.paths import checkpoints_folder, last_run_number, lock_path, make_run_folder


@dataclass(frozen=True, slots=True)
class NoSession:
    """A start or resume that opens no session.

    Attributes:
        why: the run has a living supervisor, is finished, has failed, was stopped by a user, or waits for the quota.
        due_at: when the quota has hours again; None if it does not renew by itself.
        plan_differences: what the plan asks of a finished run that its own plan did not; for the user.
    """

    run: RunInfo
    why: NotStarted
    due_at: datetime | None = None
    plan_differences: Sequence[str] = ()


def load_requested_plan(request: StartRequest) -> Plan:
    """Parse and check the plan of a request, with the user's configuration. Raises: PlanError, ConfigError."""
    plan = _load(request.plan_text, str(request.where), request.overrides)
    check_entries(plan, request.workdir)
    mirror.check(plan)
    notifications.check(plan.notify)
    trackers.check(plan.track)
    return plan


def load_stored_plan(run: RunInfo) -> Plan:
    """Parse the plan that is stored with the run, with the user's configuration. Raises: PlanError, ConfigError."""
    return _load(run.plan, f"{run.folder}/plan.toml", run.overrides)


def _load(text: str, where: str, overrides: Sequence[str]) -> Plan:
    return user_config.apply_to_plan(parse(text, where, overrides), user_config.load())


def resolve(
    state: LocalState, request: StartRequest, plan: Plan, watcher: ImportWatcher
) -> tuple[RunInfo, Plan, SourceRun | None]:
    """Find, import or create the run of the plan's name. Its lock must be held.

    Args:
        state: with the profile that the plan names.
    Returns: the run; its plan with the overrides that it keeps; what a source has of it that this state folder has not.
    Raises: NotFound; as import_run.find_in_sources and import_run.import_run.
    """
    engine, consent, workdir = state.engine, request.consent, request.workdir
    newest, source = runs.newest(engine, plan.name), None
    is_finished = newest is not None and newest.state == RunState.FINISHED
    # A finished run needs nothing from a source, unless the user asks for another run there.
    if not request.fresh and not (newest and is_finished and request.run_id in (None, newest.id)):
        choice = import_run.find_in_sources(state, plan, workdir, request.run_id, watcher)
        source = choice.run
        if newest is None and source is None:
            is_required = request.required or plan.resume.required
            for line in import_run.describe_new_run(engine, plan, workdir, choice, is_required=is_required):
                watcher.note(line)
        if source and (newest is None or newest.id != source.run_id):
            to_extend = _stages_to_extend(source, plan, consent)
            newest = import_run.import_run(state, request, source, watcher)
            if to_extend:
                newest = extension.reopen(engine, newest, to_extend)
            source = None
    if newest and not request.fresh:
        if newest.state == RunState.FINISHED and not consent.extend:
            plan_changes.refuse_of_another_folder(newest, workdir, accept=consent.changes)
            return newest, plan, None
        # The plan is the one that was given; the overrides are those that the run keeps, and the new ones.
        kept = [item for item in newest.overrides if item not in request.overrides]
        kept = import_run.without_missing_stages(kept, request, watcher)
        overrides = [*kept, *request.overrides]
        if kept and request.plan_text != newest.plan:
            given = {item.partition("=")[0] for item in request.overrides}
            if still := [item for item in kept if item.partition("=")[0] not in given]:
                watcher.note(f"kept from an earlier --set, whatever the plan file says now: {', '.join(still)}")
        plan = _load(request.plan_text, str(request.where), overrides)
        if source:
            import_run.check_settings(source, plan, consent)
        if (request.plan_text, overrides, str(workdir)) != (newest.plan, newest.overrides, newest.workdir):
            newest = _apply_changed_plan(engine, newest, plan, replace(request, overrides=overrides), watcher)
        elif newest.state == RunState.FINISHED:
            extension.stages_to_do(newest.name, plan, plan)  # refuses: nothing has changed
        return newest, plan, source
    if newest:
        import_run.refuse_while_training(engine, newest)
        import_run.supersede(engine, newest, "--fresh began another run of this name", watcher)
    number = max(newest.number if newest else 0, last_run_number(state.home, plan.name)) + 1
    return _create(state, request, plan, number), plan, None


def _stages_to_extend(source: SourceRun, plan: Plan, consent: Consent) -> list[str]:
    """The stages in which the plan has more to do than a run did that is finished in a source; empty if that one is not.

    Raises: PlanError if there are any and the user has not asked for it; if --extend finds nothing to do.
    """
    if source.rows is None or source.rows.run["state"] != RunState.FINISHED:
        return []
    old, compatibility = plan_changes.plan_in_source(source), plan_changes.compare_with_source(source, plan)
    if consent.extend:
        if old is None:
            raise PlanError(
                f"the plan of the finished run {source.run_id} in {source.database} cannot be read",
                next_step="kgorch start PLAN --fresh begins a new run",
            )
        return extension.stages_to_do(plan.name, old, plan)
    if compatibility and any(item.key.startswith("stage") for item in compatibility.differences):
        raise PlanError(
            f"the run {plan.name!r} in {source.database} is finished, and the plan asks for more",
            *map(str, compatibility.differences),
            next_step="kgorch start PLAN --extend trains it longer, --fresh begins a new run",
        )
    return []


def import_by_name(state: LocalState, name: str, watcher: ImportWatcher, consent: Consent = NO_CONSENT) -> RunInfo:
    """Import a run that only a source has. If another process holds its lock, return the row that this one writes."""
    lock = FileLock(lock_path(state.home, name))
    if not lock.acquire():
        return wait_for_row(state.engine, name)
    try:
        return import_run.import_by_name(state, name, watcher, consent)
    finally:
        lock.release()


def _create(state: LocalState, request: StartRequest, plan: Plan, number: int) -> RunInfo:
    folder = make_run_folder(state.home, plan.name, number, request.plan_text)
    run_id = request.new_id or uuid.uuid4().hex[:12]
    return runs.create(
        state.engine,
        id=run_id,
        name=plan.name,
        number=number,
        folder=str(folder),
        workdir=str(request.workdir),
        checkpoints=str(checkpoints_folder(folder, request.workdir, plan.checkpoint.dir, plan.name, run_id)),
        plan=request.plan_text,
        overrides=list(request.overrides),
        plan_hash=plan.hash,
        stages=[stage.name for stage in plan.stage],
    )


def _apply_changed_plan(
    engine: Engine, run: RunInfo, plan: Plan, request: StartRequest, watcher: ImportWatcher
) -> RunInfo:
    """Store the changed plan with the run, and record and report each difference.

    Args:
        request: with all overrides that apply now. Its consent decides about changes that only the user can know to be right.
    Raises: PlanError that shows what differs.
    """
    old = load_stored_plan(run)
    to_extend = extension.stages_to_do(run.name, old, plan) if run.state == RunState.FINISHED else []
    compatibility = plan_changes.compare_with_run(engine, run, old, plan, to_extend)
    if refusal := plan_changes.why_of_another_folder(run, request.workdir):
        compatibility = replace(compatibility, refusals=(*compatibility.refusals, refusal))
    plan_changes.refuse(run.name, compatibility, accept=request.consent.changes)
    for difference in compatibility.differences:
        watcher.note(f"the plan has changed: {difference}")
    if to_extend:  # before the new plan is stored: if a kill comes between the two, the next start does both
        run = extension.reopen(engine, run, to_extend)
    values: dict[str, Any] = {
        "plan": request.plan_text,
        "overrides": list(request.overrides),
        "workdir": str(request.workdir),
        "plan_hash": plan.hash,
    }
    runs.set_plan(engine, run.id, stages=[stage.name for stage in plan.stage], **values)
    facts = import_run.plan_change_facts(run.plan_hash, plan, request.workdir) | plan_changes.facts(compatibility)
    sessions.add_event(engine, run.id, EventKind.PLAN_CHANGED, facts)
    # On a machine of a fleet that has not trained the run the folder is made later, with its files (moved_state.py).
    if (folder := Path(run.folder)).is_dir():
        (folder / "plan.toml").write_text(request.plan_text)
    return run._replace(**values)


def differences_from_finished(engine: Engine, run: RunInfo, plan: Plan) -> Sequence[str]:
    """What a plan asks of a finished run that it has not done, for the user; nothing is changed."""
    return [str(item) for item in plan_changes.compare_with_run(engine, run, load_stored_plan(run), plan).differences]


def wait_for_row(engine: Engine, name: str) -> RunInfo:
    """The row of a run whose lock another process holds.

    Waits up to 5 s: the process may have taken the lock a moment ago and not have written the row yet.

    Raises: KgorchError if it does not appear.
    """
    for _ in range(100):
        if run := runs.newest(engine, name):
            return run
        time.sleep(0.05)
    raise KgorchError(
        f"another kgorch holds the lock of {name!r} and has not begun the run",
        next_step="kgorch status",
        error_code="KG303",
    )
