"""Which run a plan or a name means: one that is known here, one that lies in a source, or a new one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from db import runs, sessions
from db.records import RunInfo
from orchestrator.admission import import_run, plan_changes
from orchestrator.admission.requests import NO_CONSENT, Consent, LocalState, StartRequest
from orchestrator.admission.source_scan import Found, Watcher
from orchestrator.core.codes import EventKind, NotStarted, RunState
from orchestrator.errors import KgorchError, PlanError
from orchestrator.launch import extension
from orchestrator.plan import Plan, check_entries, parse, user_config
from orchestrator.services import mirror, notifications
from orchestrator.system.file_lock import FileLock
from orchestrator.system.paths import checkpoints_folder, last_run_number, lock_path, make_run_folder


@dataclass(frozen=True, slots=True)
class Nothing:
    """There is nothing to do: the run is live under another supervisor, finished, or waits for the quota.

    `due_at`: when there are hours again; None when a person has to give some.
    `changed`: what the plan asks of a finished run that it was not asked before.
    """

    run: RunInfo
    why: NotStarted
    due_at: datetime | None = None
    changed: Sequence[str] = ()


def checked(request: StartRequest) -> Plan:
    """The plan of a request, with the user's configuration. Raises: PlanError, ConfigError."""
    plan = read(request.plan_text, str(request.where), request.overrides)
    check_entries(plan, request.workdir)
    mirror.check(plan)
    notifications.check(plan.notify)
    return plan


def read(text: str, where: str, overrides: Sequence[str]) -> Plan:
    return user_config.apply_to_plan(parse(text, where, overrides), user_config.load())


def plan_of(run: RunInfo) -> Plan:
    """The run's own copy, with what the person's configuration says besides."""
    return read(run.plan, f"{run.folder}/plan.toml", run.overrides)


def run_of(
    state: LocalState, request: StartRequest, plan: Plan, watcher: Watcher
) -> tuple[RunInfo, Plan, Found | None]:
    """The run of the plan's name, from here or from a source, or a new one; its plan with the overrides that it keeps, and what a
    source has further of it.

    Args:
        state: with the profile that the plan names.
    Raises: NotFound where there is none; as import_run.look_around and import_run.bring.
    """
    engine, consent, workdir = state.engine, request.consent, request.workdir
    fresh, run_id, plan_text, overrides = request.fresh, request.run_id, request.plan_text, request.overrides
    known, found = runs.newest(engine, plan.name), None
    if not fresh and not (known and known.state == RunState.FINISHED and run_id in (None, known.id)):
        looked = import_run.look_around(state, plan, workdir, run_id, watcher)
        found = looked.found
        if known is None and found is None:
            needed = request.required or plan.resume.required
            import_run.announce(engine, plan, workdir, looked, required=needed, watcher=watcher)
        if found and (known is None or known.id != found.run_id):
            longer = _longer_than_found(found, plan, consent)
            known = import_run.bring(state, request, found, watcher)
            if longer:
                known = extension.reopen(engine, known, longer)
            found = None
    if known and not fresh:
        if known.state == RunState.FINISHED and not consent.extend:
            return known, plan, None
        merged = [*(item for item in known.overrides if item not in overrides), *overrides]
        plan = read(plan_text, str(request.where), merged)
        if found:
            import_run.check_settings(found, plan, consent)
        if (plan_text, merged, str(workdir)) != (known.plan, known.overrides, known.workdir):
            known = _take_changed_plan(engine, known, plan, replace(request, overrides=merged), watcher)
        elif known.state == RunState.FINISHED:
            extension.stages_to_do(known.name, plan, plan)  # refuses: nothing has changed
        return known, plan, found
    if known:
        import_run.refuse_while_training(engine, known)
        runs.supersede(engine, known.id, "--fresh began another run of this name")
    number = max(known.number if known else 0, last_run_number(state.home, plan.name)) + 1
    return _create(state, request, plan, number), plan, None


def _longer_than_found(found: Found, plan: Plan, consent: Consent) -> list[str]:
    """The stages that a plan has more to do in than a finished run did that a source holds.

    Raises: PlanError where it does and nobody has asked for that, or where --extend finds nothing to do.
    """
    if found.rows is None or found.rows.run["state"] != RunState.FINISHED:
        return []
    old, judged = plan_changes.plan_of_found(found), plan_changes.judge_found(found, plan)
    if consent.extend:
        if old is None:
            raise PlanError(f"the plan of the finished run {found.run_id} in {found.database} cannot be read")
        return extension.stages_to_do(plan.name, old, plan)
    if judged and any(item.key.startswith("stage") for item in judged.differences):
        raise PlanError(
            f"the run {plan.name!r} in {found.database} is finished, and the plan asks for more",
            *map(str, judged.differences),
            next_step="kgorch start PLAN --extend trains it longer, --fresh begins a new run",
        )
    return []


def bring_by_name(state: LocalState, name: str, watcher: Watcher, consent: Consent = NO_CONSENT) -> RunInfo:
    lock = FileLock(lock_path(state.home, name))
    if not lock.acquire():
        return run_elsewhere(state.engine, name)
    try:
        return import_run.by_name(state, name, watcher, consent)
    finally:
        lock.release()


def _create(state: LocalState, request: StartRequest, plan: Plan, number: int) -> RunInfo:
    folder, run_id = make_run_folder(state.home, plan.name, number, request.plan_text), uuid.uuid4().hex[:12]
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


def _take_changed_plan(engine: Engine, run: RunInfo, plan: Plan, request: StartRequest, watcher: Watcher) -> RunInfo:
    """Keep the changed plan with the run, and note each difference.

    Args:
        request: with all overrides that hold now. Its consent decides about changes that only the user can know to be right.

    Raises: PlanError that shows what differs.
    """
    old = plan_of(run)
    longer = extension.stages_to_do(run.name, old, plan) if run.state == RunState.FINISHED else []
    judged = plan_changes.judge(engine, run, old, plan, longer)
    plan_changes.refuse(run.name, judged, accept=request.consent.changes)
    for difference in judged.differences:
        watcher.note(f"the plan has changed: {difference}")
    if longer:  # before the plan is the new one: cut between the two, it can be done again
        run = extension.reopen(engine, run, longer)
    kept = {"plan": request.plan_text, "overrides": list(request.overrides), "workdir": str(request.workdir)}
    changed: dict[str, Any] = kept | {"plan_hash": plan.hash}
    runs.set_plan(engine, run.id, stages=[stage.name for stage in plan.stage], **changed)
    facts = import_run.change(run.plan_hash, plan, request.workdir) | plan_changes.facts(judged)
    sessions.note(engine, run.id, EventKind.PLAN_CHANGED, facts)
    (Path(run.folder) / "plan.toml").write_text(request.plan_text)
    return run._replace(**changed)


def difference_of_finished(engine: Engine, run: RunInfo, plan: Plan) -> Sequence[str]:
    """What a plan asks of a finished run that it has not done; nothing of it is carried out."""
    return [str(item) for item in plan_changes.judge(engine, run, plan_of(run), plan).differences]


def run_elsewhere(engine: Engine, name: str) -> RunInfo:
    """The row of a run whose lock another process holds; it may have taken it just now and be about to write."""
    for _ in range(100):
        if run := runs.newest(engine, name):
            return run
        time.sleep(0.05)
    raise KgorchError(f"another kgorch holds the lock of {name!r} and has not begun the run", next_step="kgorch status")
