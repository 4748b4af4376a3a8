"""Import a run from a source: look for it, choose among several, check what its stored settings would execute, record it here."""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch.admission import import_files, plan_changes, remote_sessions, source_scan
from kgorch.admission.requests import NO_CONSENT, Consent, ImportWatcher, LocalState, StartRequest
from kgorch.admission.source_run import (
    NO_PROGRESS,
    ProgressKey,
    SourceRun,
    choose_run,
    local_run,
    order_stages,
)
from kgorch.admission.source_scan import SourceContents
from kgorch.core.codes import EventKind, RunState
from kgorch.db import runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import KgorchError, NotFound
from kgorch.launch import launcher, rungs
from kgorch.plan import Plan, check_entries, of_missing_stages, parse, stage_names
from kgorch.slurm import jobs
from kgorch.system.paths import checkpoints_folder, last_run_number, make_run_folder, run_folder

MAX_RUNS_COMPARED = 200
"""Newest runs among which one of another name is looked for that was begun in the same folder."""

MAX_SHOWN, MAX_SHOWN_CHARACTERS = 20, 200
"""Of settings that somebody else's database holds: items, and characters of each, that an error shows."""


class SourceChoice(NamedTuple):
    """What a search of the sources came to.

    Attributes:
        run: what they hold of the run to resume, if that is further than what is here; else None.
        contents: all that they hold; None if there are no sources.
        local_progress: of the run in this state folder.
        stage_order: the order of the stages by which progress is compared (source_run.order_stages).
    """

    run: SourceRun | None
    contents: SourceContents | None
    local_progress: ProgressKey = NO_PROGRESS
    stage_order: Sequence[str] = ()


def find_in_sources(
    state: LocalState, plan: Plan, workdir: Path, wanted: str | None, watcher: ImportWatcher
) -> SourceChoice:
    """What the sources of the plan, or else of the platform, hold of the run to resume.

    If the user asks for one of several runs, that choice is recorded, so that the next start does not ask again.

    Args:
        wanted: the run id that the user asks for.
    Raises: KgorchError that lists the runs if there are several; NotFound.
    """
    engine, home = state.engine, state.home
    named = sources = state.profile.sources if plan.resume.sources is None else plan.resume.sources
    local_runs = runs.of_name(engine, plan.name)
    newest = local_runs[0] if local_runs else None
    if newest is None:
        # A lost database costs the history only: the checkpoints that a run left here are found like those of a source.
        sources = [*sources, *_folders_without_database(home, plan)]
    stages = [stage.name for stage in plan.stage]
    own_folders = [home, *(Path(run.checkpoints) for run in local_runs)]
    contents = source_scan.scan_sources(sources, workdir, plan.name, own_folders)
    contents = replace(contents, sources=tuple(named))
    if newest is None:
        _set_folder_without_database(home, plan.name, contents)
    _report_notes(engine, plan.name, contents, watcher)
    # Neither older runs of ours nor those that the user once decided against are offered again.
    excluded = {run.id for run in local_runs[1:]}
    ours = None
    if newest:
        excluded |= {
            key for facts in sessions.facts_of_kind(engine, newest.id, EventKind.RUN_CHOSEN) for key in facts["not"]
        }
        ours = local_run(newest.id, Path(newest.checkpoints), stages)
    source = choose_run(contents.runs, ours, excluded, wanted, stages)
    if newest and wanted == newest.id:
        sessions.add_event(engine, newest.id, *_choice_event(newest.id, contents.runs))
    elif source and wanted:
        source.events.append(_choice_event(wanted, contents.runs))
    is_ours = source is not None and newest is not None and source.run_id == newest.id
    finished = None
    if newest and is_ours:
        finished = {stage.name for stage in runs.stages(engine, newest.id) if stage.finished_at}
    unfinished = (source.unfinished_stages if source else set()) | (ours.unfinished_stages if ours else set())
    order = order_stages(stages, unfinished, source.rows.finished if source and source.rows else None, finished)
    local_progress = ours.progress(order) if ours else NO_PROGRESS
    if source and is_ours and source.progress(order) <= local_progress:
        source = None
    return SourceChoice(source, contents if named else None, local_progress, order)


def _report_notes(engine: Engine, name: str, contents: SourceContents, watcher: ImportWatcher) -> None:
    """Report what the search skipped, and drop each run whose id is that of a run with another name here.

    A source can claim any id. Such a run would be written into the rows of the other one.
    """
    for note in contents.notes:
        watcher.note(note)
    for run_id in list(contents.runs):
        ours = runs.by_id(engine, run_id)
        if ours and ours.name != name:
            source = contents.runs.pop(run_id)
            where = source.database or next(item.folder for item in source.checkpoints)
            watcher.note(f"{where} was skipped: its run id {run_id} is that of {ours.name!r} here")


def describe_new_run(
    engine: Engine, plan: Plan, workdir: Path, choice: SourceChoice, *, is_required: bool
) -> list[str]:
    """Notes for a user who starts a new run: where its state was looked for, and what else is there.

    A start that silently began at step 0 would cost a user hours who has forgotten to attach the output of the last session.

    Raises: NotFound if the user (--continue) or the plan requires a run to resume.
    """
    lines = [choice.contents.describe(plan.name)] if choice.contents else []
    folder = str(workdir)
    for run in runs.all_runs(engine, limit=MAX_RUNS_COMPARED):
        if run.workdir == folder and run.state == RunState.ACTIVE and run.name != plan.name:
            last = sessions.last(engine, run.id)
            at = f"is at step {last.step}" if last else "has not trained yet"
            lines.append(f"{run.name!r}, begun in this folder, {at}: a plan of another name begins another run")
            break
    if is_required:
        raise NotFound(
            f"there is no state of {plan.name!r} to resume, and no new run may begin",
            *(lines or ["there is none in the state folder, and no sources are named"]),
            next_step="attach the output of the session before (or name its folder in [resume] sources), then start again; or"
            " begin a new run: without --continue and [resume] required, or with --fresh",
            error_code="KG206",
        )
    return [*(f"{line}; a new run begins" for line in lines[:1]), *lines[1:]]


def import_run(state: LocalState, request: StartRequest, source: SourceRun, watcher: ImportWatcher) -> RunInfo:
    """Record a run of a source in this state folder, under the requested plan and overrides.

    Overrides that the source keeps apply as well, with the user's consent.

    Raises: as import_files.import_files; PlanError; KgorchError for overrides that were neither given nor consented to.
    """
    theirs: dict[str, Any] = source.rows.run if source.rows else {"overrides": [], "number": 1}
    engine, home, text, workdir = state.engine, state.home, request.plan_text, request.workdir
    stages = stage_names(text, str(request.where))
    without_missing_stages([str(item) for item in theirs["overrides"]], request, watcher)
    overrides = [*check_overrides(source, stages, request.overrides, request.consent), *request.overrides]
    plan = parse(text, str(request.where), overrides)
    check_settings(source, plan, request.consent)
    newest = runs.newest(engine, plan.name)
    if newest:
        refuse_while_training(engine, newest)
    number = max(theirs["number"], newest.number + 1 if newest else last_run_number(home, plan.name) + 1)
    folder = make_run_folder(home, plan.name, number, text)
    columns = {
        "id": source.run_id,
        "name": plan.name,
        "number": number,
        "folder": str(folder),
        "workdir": str(workdir),
        "checkpoints": str(checkpoints_folder(folder, workdir, plan.checkpoint.dir, plan.name, source.run_id)),
        "plan": text,
        "overrides": overrides,
        "plan_hash": plan.hash,
        # A source can claim a time in the future.
        "created_at": min(theirs.get("created_at") or datetime.now(UTC), datetime.now(UTC)),
    }
    is_over = theirs.get("state") in (RunState.FINISHED, RunState.FAILED)
    columns |= {name: theirs[name] for name in ("state", "why", "finished_at")} if is_over else import_files.ACTIVE
    if compatibility := plan_changes.compare_with_source(source, plan):
        plan_changes.refuse(plan.name, compatibility, accept=request.consent.changes)
    if theirs.get("plan_hash", plan.hash) != plan.hash:
        facts = plan_change_facts(theirs["plan_hash"], plan, workdir)
        facts |= plan_changes.facts(compatibility) if compatibility else {}
        source.events.append((EventKind.PLAN_CHANGED, facts))
    run = import_files.import_files(engine, columns, plan, source, watcher)
    if newest:
        supersede(engine, newest, f"run {run.id} was chosen in its place", watcher)
    return run


def without_missing_stages(overrides: Sequence[str], request: StartRequest, watcher: ImportWatcher) -> list[str]:
    """The overrides that a run keeps without those of stages that the plan has no more, which nobody could take back."""
    missing = of_missing_stages(stage_names(request.plan_text, str(request.where)), overrides)
    for line in _show("--set ", missing):
        watcher.note(f"{line} is not kept any more: the plan has no such stage")
    return [item for item in overrides if item not in missing]


def supersede(engine: Engine, run: RunInfo, why: str, watcher: ImportWatcher) -> None:
    """Have another run take the place of this one, after `refuse_while_training`."""
    note = remote_sessions.goes_on(engine, run)
    runs.supersede(engine, run.id, why)
    if note:
        watcher.note(note)


def check_overrides(
    source: SourceRun, stages: Sequence[str], overrides: Sequence[str], consent: Consent = NO_CONSENT
) -> list[str]:
    """Overrides that the source keeps of the run and that are not given now.

    Args:
        stages: of the plan. Overrides of others are left out: they decide nothing.
    Raises: KgorchError if there are some without the user's consent.
    """
    theirs: dict[str, Any] = source.rows.run if source.rows else {"overrides": []}
    # An override that is given again needs no consent: the user has typed it.
    now = {_key(item) for item in overrides}
    others = [str(item) for item in theirs["overrides"] if _key(str(item)) not in now]
    missing = of_missing_stages(stages, others)
    others = [item for item in others if item not in missing]
    if others and not consent.plan:
        raise KgorchError(
            f"the source's database has overrides of the run {theirs.get('name', '')!r:.100}, which decide what is executed",
            *_show("--set ", others),
            "a database from a source is not trusted with that: whoever wrote it could run any program here",
            next_step="give those that you want with --set, or take all of them with --accept-plan",
            error_code="KG208",
        )
    return others


def check_settings(source: SourceRun, plan: Plan, consent: Consent = NO_CONSENT) -> None:
    """Compare the arguments that rungs and remedies of the source set with those that the plan itself names.

    Arguments go to the training script, which may do anything with them.

    Raises: KgorchError for others without the user's consent.
    """
    if consent.plan:
        return
    stages, unknown = {stage.name for stage in plan.stage}, list[str]()
    for change in (change for change in source.changes if change.stage in stages):
        named, restarting = rungs.arguments_of(plan, change.stage)
        allowed = {_item(name, value) for arguments in named for name, value in arguments.items()}
        items = {_item(name, value) for name, value in json.loads(change.arguments).items()}
        unknown += [f"{change.stage}: {item}" for item in sorted(items - allowed)]
        may_restart = any(
            {_item(name, value) for name, value in arguments.items()} <= items for arguments in restarting
        )
        if change.anew_at and not may_restart:
            unknown.append(f"{change.stage}: begin anew, without its checkpoints")
    if unknown:
        raise KgorchError(
            f"the state of {plan.name!r} in a source changes arguments of its training that this plan does not name",
            *_show("stage ", list(dict.fromkeys(unknown))),
            "state from a source is not trusted with that: whoever wrote it could give the script any argument",
            next_step="put it into [memory] ladder of the plan as { set = … }, or take it with --accept-plan",
            error_code="KG208",
        )


def _item(name: str, value: Any) -> str:
    """An argument as text; 1, 1.0 and true differ for a script and are equal in Python."""
    return f"{name} = {json.dumps(value, sort_keys=True)}"


def import_by_name(state: LocalState, name: str, watcher: ImportWatcher, consent: Consent = NO_CONSENT) -> RunInfo:
    """Import a run that only the platform's sources have, under the plan in the database there. Its code must be on this machine.

    Raises: NotFound; KgorchError without consent to that plan; as import_run.
    """
    sources = state.profile.sources
    contents = source_scan.scan_sources(sources, Path.cwd(), name, [state.home])
    _report_notes(state.engine, name, contents, watcher)
    source = choose_run(contents.runs, None, (), None, ())
    if source is None:
        facts = [contents.describe(name)] if sources else []
        raise NotFound(f"there is no run named {name!r}", *facts, next_step="`kgorch status` lists the runs")
    if source.rows is None:
        raise NotFound(
            f"the sources hold checkpoints of {name!r} and no database with its plan",
            next_step="kgorch start PLAN resumes it",
            error_code="KG206",
        )
    workdir, text = Path(source.rows.run["workdir"]), source.rows.run["plan"]
    if not workdir.is_dir():
        raise NotFound(
            f"the folder of its plan, {workdir}, is not on this machine",
            next_step="kgorch start PLAN",
            error_code="KG206",
        )
    where = workdir / "plan.toml"
    plan = parse(text, str(where), source.rows.run["overrides"])
    if not consent.plan:
        raise KgorchError(
            f"the plan of {name!r} is only in a database of a source, which is not trusted to decide what is executed here",
            *_show("it would run ", [f"{stage.entry} {stage.args}" for stage in plan.stage]),
            *_show("in the folder ", [str(workdir)]),
            *_show("it would send metrics to ", plan.track.to),
            next_step=f"kgorch start PLAN resumes it by a plan of yours; or kgorch resume {name} --accept-plan",
            error_code="KG208",
        )
    check_entries(plan, workdir)
    return import_run(state, StartRequest(text, where, consent=consent), source, watcher)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _show(prefix: str, items: Sequence[str]) -> list[str]:
    """Facts of an error, of text that somebody else wrote: bounded, and without control characters."""
    more = [f"… {len(items) - MAX_SHOWN} more"] if len(items) > MAX_SHOWN else []
    printable = ("".join(letter if letter.isprintable() else "?" for letter in item) for item in items[:MAX_SHOWN])
    return [
        prefix + (item if len(item) <= MAX_SHOWN_CHARACTERS else f"{item[:MAX_SHOWN_CHARACTERS]}…")
        for item in printable
    ] + more


def _folders_without_database(home: Path, plan: Plan) -> list[str]:
    """Folders with checkpoints of the newest run of that name that the database does not know: it was lost, they were not.

    Raises: KgorchError while the run still trains.
    """
    number = last_run_number(home, plan.name)
    if not number:
        return []
    folder = run_folder(home, plan.name, number)
    if attempt := next((path for path in (folder / "attempts").glob("*") if launcher.is_running(path)), None):
        raise KgorchError(
            f"the run {plan.name!r} still trains in {attempt}, and the database does not know it",
            next_step="put the database back; or end what runs there (ps), then start again",
        )
    return [glob.escape(str(folder)), *([plan.checkpoint.dir] if plan.checkpoint.dir else [])]


def _set_folder_without_database(home: Path, name: str, contents: SourceContents) -> None:
    """Set the folder of the run that a lost database had here, by its launches: with the plan's `checkpoint.dir` no path of a
    checkpoint shows it.
    """
    folder = run_folder(home, name, last_run_number(home, name)).resolve()
    for launch in folder.glob("attempts/*/launch.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):  # cut off by a full disk, for example
            run = contents.runs.get(json.loads(launch.read_text()).get("run_id"))
            if run and run.folder is None:
                run.folder = folder


def refuse_while_training(engine: Engine, run: RunInfo) -> None:
    """Raises: KgorchError if processes of the run's last attempt are alive, or its sessions go on at another place or in Slurm."""
    remote_sessions.refuse_to_supersede(engine, run)
    jobs.refuse_here(engine, run)
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    if attempt and launcher.is_running(Path(attempt.folder)):
        raise KgorchError(
            f"the run {run.name!r} still trains, without a supervisor",
            next_step=f"kgorch resume {run.name} takes it over, kgorch stop {run.name} ends it; then start again",
        )


def plan_change_facts(old_hash: str, plan: Plan, workdir: Path) -> dict[str, Any]:
    """Facts of the event PLAN_CHANGED. The hash covers what determines the result."""
    what = (
        "only settings without effect on the result"
        if plan.hash == old_hash
        else "the training (stages, arguments or seed)"
    )
    return {"what": what, "from": old_hash, "to": plan.hash, "workdir": str(workdir)}


def _choice_event(wanted: str, contents: dict[str, SourceRun]) -> tuple[str, dict[str, Any]]:
    return EventKind.RUN_CHOSEN, {"run": wanted, "not": sorted({*contents} - {wanted})}
