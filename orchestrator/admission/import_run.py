"""A run whose state lies elsewhere: looked for in the sources, chosen among its rivals, made ours."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from db import runs, sessions
from db.records import RunInfo
from orchestrator.admission import import_files, plan_changes, source_scan
from orchestrator.admission.requests import NO_CONSENT, Consent, LocalState, StartRequest
from orchestrator.admission.source_scan import Found, Place, Search, Watcher
from orchestrator.core.codes import EventKind, RunState
from orchestrator.errors import KgorchError, NotFound
from orchestrator.launch import launcher, rungs
from orchestrator.plan import Plan, check_entries, parse
from orchestrator.system.paths import checkpoints_folder, last_run_number, make_run_folder, run_folder

OTHERS_LOOKED_AT = 200
SHOWN, SHOWN_LETTERS = 20, 200
"""Of what a database from elsewhere would have decided: so much is shown."""


class Looked(NamedTuple):
    """What a look into the sources came to.

    Attributes:
        found: what they hold of the run to go on with, as far as that is more than is here; None for nothing.
        search: None where there are no sources.
        furthest: of what is here already. order: of the stages, by which places are compared (finding.order_of).
    """

    found: Found | None
    search: Search | None
    furthest: Place = source_scan.NOWHERE
    order: Sequence[str] = ()


def look_around(
    state: LocalState, plan: Plan, workdir: Path, wanted: str | None, watcher: Watcher, *, remembers: bool = True
) -> Looked:
    """What the plan's sources, else the platform's, hold of the run to go on with.

    A run that a person asks for is remembered, so that its rivals are none the next time.

    Raises: KgorchError that lists the rivals; NotFound.
    """
    engine, home = state.engine, state.home
    given = sources = state.profile.sources if plan.resume.sources is None else plan.resume.sources
    mine = runs.of_name(engine, plan.name)
    known = mine[0] if mine else None
    if known is None:
        sources = [*sources, *_left_without_database(home, plan)]
    stages = [stage.name for stage in plan.stage]
    search = source_scan.find(sources, workdir, plan.name, [home, *(Path(run.checkpoints) for run in mine)], watcher)
    search = replace(search, sources=tuple(given))
    _leave_others_alone(engine, plan.name, search, watcher)
    foreign = {run.id for run in mine[1:]}
    ours = None
    if known:
        foreign |= {key for facts in sessions.told(engine, known.id, EventKind.RUN_CHOSEN) for key in facts["not"]}
        ours = source_scan.of_run(known.id, Path(known.checkpoints), stages)
    chosen = source_scan.choose(search.runs, ours, foreign, wanted, stages)
    if known and wanted == known.id and remembers:
        sessions.note(engine, known.id, *_choice(known.id, search.runs))
    elif chosen and wanted:
        chosen.events.append(_choice(wanted, search.runs))
    done = {stage.name for stage in runs.stages(engine, known.id) if stage.finished_at} if known else None
    is_known = chosen is not None and known is not None and chosen.run_id == known.id
    training = (chosen.training if chosen else set()) | (ours.training if ours else set())
    theirs = chosen.rows.finished if chosen and chosen.rows else None
    order = source_scan.order_of(stages, training, theirs, done if is_known else None)
    furthest = ours.place(order) if ours else source_scan.NOWHERE
    if chosen and is_known and chosen.place(order) <= furthest:
        chosen = None
    return Looked(chosen, search if given else None, furthest, order)


def _leave_others_alone(engine: Engine, name: str, search: Search, watcher: Watcher) -> None:
    """Another run of ours may bear the id that a source claims: nothing is written into that one."""
    for run_id in list(search.runs):
        ours = runs.by_id(engine, run_id)
        if ours and ours.name != name:
            where = search.runs.pop(run_id)
            place = where.database or next(item.folder for item in where.checkpoints)
            watcher.note(f"{place} was passed over: its run id {run_id} is that of {ours.name!r} here")


def announce(engine: Engine, plan: Plan, workdir: Path, looked: Looked, *, required: bool, watcher: Watcher) -> None:
    """Before a new run is begun: say where its state was looked for, and what else is there.

    Raises: NotFound where a person (--continue) or the plan has said that there must be state to go on with.
    """
    said = [looked.search.in_words(plan.name)] if looked.search else []
    folder = str(workdir)
    for run in runs.everyone(engine, limit=OTHERS_LOOKED_AT):
        if run.workdir == folder and run.state == RunState.ACTIVE and run.name != plan.name:
            last = sessions.last(engine, run.id)
            at = f"is at step {last.step}" if last else "has not trained yet"
            said.append(f"{run.name!r}, begun in this folder, {at}: a plan of another name begins another run")
            break
    if required:
        raise NotFound(
            f"there is no state of {plan.name!r} to go on with, and a new run was not wanted",
            *(said or ["there is none in the state folder, and no sources are named"]),
            next_step="attach the output of the session before (or name its folder in [resume] sources), then start again; or"
            " begin a new run: without --continue and [resume] required, or with --fresh",
        )
    for text in said[:1]:
        watcher.note(f"{text}; a new run begins")
    for text in said[1:]:
        watcher.note(text)


def bring(state: LocalState, request: StartRequest, found: Found, watcher: Watcher) -> RunInfo:
    """A run that a source holds becomes ours, by the plan and the overrides given here; with those that it keeps, by consent.

    Raises: as import_files.bring; PlanError; KgorchError where it keeps overrides that were neither given nor consented to.
    """
    theirs: dict[str, Any] = found.rows.run if found.rows else {"overrides": [], "number": 1}
    engine, home, text, workdir = state.engine, state.home, request.plan_text, request.workdir
    merged = [*check_overrides(found, request.overrides, request.consent), *request.overrides]
    plan = parse(text, str(request.where), merged)
    check_settings(found, plan, request.consent)
    known = runs.newest(engine, plan.name)
    if known:
        refuse_while_training(engine, known)
    number = max(theirs["number"], known.number + 1 if known else last_run_number(home, plan.name) + 1)
    folder = make_run_folder(home, plan.name, number, text)
    columns = {
        "id": found.run_id,
        "name": plan.name,
        "number": number,
        "folder": str(folder),
        "workdir": str(workdir),
        "checkpoints": str(checkpoints_folder(folder, workdir, plan.checkpoint.dir, plan.name, found.run_id)),
        "plan": text,
        "overrides": merged,
        "plan_hash": plan.hash,
        "created_at": min(theirs.get("created_at") or datetime.now(UTC), datetime.now(UTC)),
    }
    ended = theirs.get("state") in (RunState.FINISHED, RunState.FAILED)
    columns |= {name: theirs[name] for name in ("state", "why", "finished_at")} if ended else import_files.GOES_ON
    if judged := plan_changes.judge_found(found, plan):
        plan_changes.refuse(plan.name, judged, accept=request.consent.changes)
    if theirs.get("plan_hash", plan.hash) != plan.hash:
        told = change(theirs["plan_hash"], plan, workdir) | (plan_changes.facts(judged) if judged else {})
        found.events.append((EventKind.PLAN_CHANGED, told))
    run = import_files.bring(engine, columns, plan, found, watcher)
    if known:
        runs.supersede(engine, known.id, f"run {run.id} was chosen in its place")
    return run


def check_overrides(found: Found, overrides: Sequence[str], consent: Consent = NO_CONSENT) -> list[str]:
    """Settings from the command line that a found run keeps and that are not given now.

    Raises: KgorchError where there are some and nobody has consented to them.
    """
    theirs: dict[str, Any] = found.rows.run if found.rows else {"overrides": []}
    given = {_key(item) for item in overrides}
    kept = [str(item) for item in theirs["overrides"] if _key(str(item)) not in given]
    if kept and not consent.plan:
        raise KgorchError(
            f"the run {theirs.get('name', '')!r:.100} was found with settings from its command line, which decide what runs",
            *_shown("--set ", kept),
            "a database that was found is not trusted with that: whoever wrote it could run any program here",
            next_step="give those that you want with --set, or take all of them with --accept-plan",
        )
    return kept


def check_settings(found: Found, plan: Plan, consent: Consent = NO_CONSENT) -> None:
    """What was found may have changed arguments of a stage, which are the training script's: by a rung of the memory ladder, by a
    remedy. Those that this plan names itself may hold.

    Raises: KgorchError for others, where nobody has consented to them.
    """
    if consent.plan:
        return
    strange = []
    for change in (one for one in found.changes if one.stage in {stage.name for stage in plan.stage}):
        named, anew = rungs.arguments_of(plan, change.stage)
        allowed = {_item(name, value) for one in named for name, value in one.items()}
        arguments = json.loads(change.arguments)
        items = {_item(name, value) for name, value in arguments.items()}
        strange += [f"{change.stage}: {item}" for item in sorted(items - allowed)]
        may_begin_anew = any({_item(name, value) for name, value in one.items()} <= items for one in anew)
        if change.anew_at and not may_begin_anew:
            strange.append(f"{change.stage}: begin anew, without its checkpoints")
    if strange:
        raise KgorchError(
            f"the state of {plan.name!r} that was found changes what its training is given, and this plan does not name that",
            *_shown("stage ", list(dict.fromkeys(strange))),
            "what was found is not trusted with that: whoever wrote it could hand the script any argument",
            next_step="put it into [memory] ladder of the plan as { set = … }, or take it with --accept-plan",
        )


def _item(name: str, value: Any) -> str:
    """An argument as text: 1, 1.0 and true are three things to a script."""
    return f"{name} = {json.dumps(value, sort_keys=True)}"


def by_name(state: LocalState, name: str, watcher: Watcher, consent: Consent = NO_CONSENT) -> RunInfo:
    """A run that only the platform's sources know, by the plan that the database there keeps; its code has to be here.

    Raises: NotFound; KgorchError without consent to that plan; as bring.
    """
    sources = state.profile.sources
    search = source_scan.find(sources, Path.cwd(), name, [state.home], watcher)
    _leave_others_alone(state.engine, name, search, watcher)
    held = source_scan.choose(search.runs, None, (), None, ())
    if held is None:
        said = [search.in_words(name)] if sources else []
        raise NotFound(f"there is no run named {name!r}", *said, next_step="`kgorch status` lists the runs")
    if held.rows is None:
        raise NotFound(
            f"the sources hold checkpoints of {name!r} and no database that keeps its plan",
            next_step="kgorch start PLAN goes on with it",
        )
    workdir, text = Path(held.rows.run["workdir"]), held.rows.run["plan"]
    if not workdir.is_dir():
        raise NotFound(f"the folder of its plan, {workdir}, is not on this machine", next_step="kgorch start PLAN")
    where = workdir / "plan.toml"
    plan = parse(text, str(where), held.rows.run["overrides"])
    if not consent.plan:
        raise KgorchError(
            f"the plan of {name!r} is known from a database that was found, and that is not trusted with what runs here",
            *_shown("it would run ", [f"{stage.entry} {stage.args}" for stage in plan.stage]),
            *_shown("in the folder ", [str(workdir)]),
            next_step=f"kgorch start PLAN goes on with it by a plan of yours; or kgorch resume {name} --accept-plan",
        )
    check_entries(plan, workdir)
    return bring(state, StartRequest(text, where, consent=consent), held, watcher)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _shown(what: str, items: Sequence[str]) -> list[str]:
    """Facts for a person, of text that somebody else wrote: bounded, and without control characters."""
    more = [f"… {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    plain = ("".join(letter if letter.isprintable() else "?" for letter in item) for item in items[:SHOWN])
    return [what + (item if len(item) <= SHOWN_LETTERS else f"{item[:SHOWN_LETTERS]}…") for item in plain] + more


def _left_without_database(home: Path, plan: Plan) -> list[str]:
    """Where the newest run of that name has left checkpoints that our database knows nothing of: it was lost, and they are not.

    Raises: KgorchError while it trains still.
    """
    number = last_run_number(home, plan.name)
    if not number:
        return []
    folder = run_folder(home, plan.name, number)
    if living := next((path for path in (folder / "attempts").glob("*") if launcher.is_running(path)), None):
        raise KgorchError(
            f"the run {plan.name!r} is training still in {living}, and the database knows nothing of it",
            next_step="put the database back; or end what runs there (ps), then start again",
        )
    return [glob.escape(str(folder)), *([plan.checkpoint.dir] if plan.checkpoint.dir else [])]


def refuse_while_training(engine: Engine, run: RunInfo) -> None:
    last = sessions.last(engine, run.id)
    attempt = sessions.last_attempt(engine, last.id) if last else None
    if attempt and launcher.is_running(Path(attempt.folder)):
        raise KgorchError(
            f"the run {run.name!r} is training still, without a supervisor",
            next_step=f"kgorch resume {run.name} takes it over, kgorch stop {run.name} ends it; then start again",
        )


def change(before: str, plan: Plan, workdir: Path) -> dict[str, Any]:
    """The facts of a changed plan, for the journal."""
    same = plan.hash == before
    what = "only what the bits do not hang on" if same else "the training (stages, arguments or seed)"
    return {"what": what, "from": before, "to": plan.hash, "workdir": str(workdir)}


def _choice(wanted: str, found: dict[str, Found]) -> tuple[str, dict[str, Any]]:
    return EventKind.RUN_CHOSEN, {"run": wanted, "not": sorted({*found} - {wanted})}
