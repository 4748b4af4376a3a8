"""kgorch status"""

from __future__ import annotations

import time
from typing import Any

import click

from orchestrator.cli import render, telemetry_rows
from orchestrator.cli.common import find_run, json_option, run_argument, state


@click.command("status")
@run_argument
@json_option
@click.option("--watch", is_flag=True, help="Look again every second until the session is over.")
@click.option("--all", "everyone", is_flag=True, help="A line a run, the newest first.")
@click.option("-n", "--limit", default=50, show_default=True, type=click.IntRange(1), help="Runs of --all at the most.")
def command(run: str | None, as_json: bool, watch: bool, everyone: bool, limit: int) -> int:
    """Where RUN stands (the newest run by default). Answers from the database, also when no supervisor lives.

    \b
    Example:
      kgorch status --json | python -m json.tool
    """
    if everyone:
        return _list(as_json, limit)
    if watch and not as_json:
        from orchestrator.cli import watch as watching

        return watching.watch(lambda: _look(run), rows)
    while True:
        found = print_status(run, as_json=as_json)
        if not watch or not (found["session"] or {}).get("training_alive"):
            return 0
        time.sleep(1)


def print_status(name: str | None, *, as_json: bool) -> dict[str, Any]:
    found = _look(name)
    if as_json:
        render.as_json(found)
    else:
        render.labelled(rows(found))
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The view as labels and values."""
    session = found["session"]
    stages = " → ".join(_stage(item, found["stage"]) for item in found["stages"])
    total = f" of {found['steps_total']}" if found["steps_total"] else ""
    epochs = f", epoch {found['epoch']} of {found['epochs_total']}" if found["epochs_total"] else ""
    pace = (
        f", {render.duration(found['step_s'])} a step"
        if found["step_s"] and session and session["training_alive"]
        else ""
    )
    lines = [
        ("run", f"{found['run']}" + (f" (number {found['run_number']})" if found["run_number"] > 1 else "")),
        ("phase", _phase(found)),
        ("stages", stages),
    ]
    if found["step"]:
        samples = (
            f", {found['samples']} samples" if found["samples"] else ""
        )  # known once the session's ranks have told
        lines.append(("step", f"{found['step']}{total}{epochs}{samples}{pace}"))
    if session:
        lines.append(("session", _session_line(session)))
        lines.append(("supervisor", _supervisor_line(found, session)))
    lines.append(("checkpoint", _checkpoint_line(found)))
    if best := found["best"]:
        value = "nan" if best["value"] is None else f"{best['value']:.6g}"
        lines.append(("best", f"step {best['step']} of {best['stage']}: {best['by'].rpartition(':')[0]} {value}"))
    if held := found["snapshot"]:
        lines.append(("snapshot", f"step {held['step']} of {held['stage']}, in memory, {render.ago(held['at'])}"))
    if found["telemetry"] and session and session["training_alive"]:
        lines += telemetry_rows.rows(found["telemetry"]["values"])
    if found["metrics"]:
        lines.append(("metrics", render.metrics(found["metrics"])))
    if found["exactness"]:
        lines.append(("exactness", ". ".join(f"{what}: {held}" for what, held in found["exactness"].items())))
    lines += [("memory", render.rung(rung)) for rung in (found["memory"] or {"rungs": []})["rungs"]]
    lines += [("quota", render.quota(found["quota"]))] if found["quota"] else []
    lines += forecast_rows(found["forecast"]) if found["forecast"] else []
    lines += _failure_rows(found["failure"]) if found["failure"] else []
    lines += [("notice", text) for text in found["notices"]]
    lines.append(("next", _next_line(found)))
    return lines


def _phase(found: dict[str, Any]) -> str:
    """A phase that nobody is there to leave is none: its supervisor has died, and the ranks with it."""
    session = found["session"]
    if session and not session["ended_at"] and not session["training_alive"]:
        return "ended without a supervisor"
    return render.words(found["phase"]) + (f": {found['why']}" if found["why"] else "")


def _checkpoint_line(found: dict[str, Any]) -> str:
    """The newest that a resume would begin with: one that lies on the disk counts, whoever has written it down."""
    if saved := found["on_disk"]:
        what = "on disk, read back when the run goes on"
    elif saved := found["checkpoint"]:
        what = "verified" if saved["verified"] else "not verified"
    else:
        return "none yet"
    return f"step {saved['step']} of {saved['stage']}, {what}, {render.ago(saved['at'])}, {render.size(saved['bytes'])}"


def forecast_rows(forecast: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if forecast["end_at"]:
        more = f"{forecast['sessions']} more session{'s' if forecast['sessions'] != 1 else ''}"
        here = f"; this one does {forecast['now_steps']} steps" if forecast["now_steps"] is not None else ""
        rows.append(("end", f"of {forecast['stage']} {render.span(forecast)}, {more}{here}"))
    elif forecast["steps_left"]:
        rows.append(("end", "not to be seen: no session is long enough, or no hours come back"))
    if target := forecast["target"]:
        rows.append(("target", _target_line(target)))
    return rows


def _target_line(target: dict[str, Any]) -> str:
    best = "" if target["best"] is None else f" (best {target['best']:.4g})"
    match target["verdict"]:
        case "reached":
            return f"{target['target']} was reached at step {target['step']}{best}"
        case "foreseeable":
            epochs = target["epochs"]
            most = "perhaps never" if target["epochs_most"] is None else f"{target['epochs_most']:.0f}"
            when = f"about step {target['step']}"
            if epochs is not None:
                when = f"about {epochs:.0f} epochs ({target['epochs_fewest']:.0f} to {most})"
            return f"{target['target']} in {when}: {render.span(target)}{best}"
        case "flat":
            return f"{target['target']}: not foreseeable, the trend is flat{best}"
        case "away":
            return f"{target['target']}: not foreseeable, the metric moves away from it{best}"
        case "levels off":
            return f"{target['target']}: not foreseeable, the metric levels off before it{best}"
    return f"{target['target']}: too few points yet{best}"


def _failure_rows(failure: dict[str, Any]) -> list[tuple[str, str]]:
    times = f", {failure['times']} attempts in a row" if failure["times"] > 1 else ""
    first = "" if failure["rank"] is None else f"rank {failure['rank']} first, "
    when = f", {render.ago(failure['at'])}" if failure["at"] else ""
    where = f", {failure['where']}" if failure["where"] else ""
    rows = [("failed", f"{first}at step {failure['step']}{where}{when}{times}")]
    rows += [("", line) for line in failure["traceback"]]
    return [*rows, ("whole log", f"{failure['log']} ({failure['command']})")]


def _stage(item: dict[str, Any], current: str) -> str:
    """`prepare ✓ (20 steps) → train (at step 1316) → predict`"""
    if item["done"]:
        return f"{item['name']} ✓" + (f" ({item['step']} steps)" if item["step"] else "")
    if item["name"] == current:
        return f"{item['name']} (at step {item['step'] or 0})"
    return str(item["name"])


def _session_line(session: dict[str, Any]) -> str:
    began = f"number {session['number']}, {session['place']}, since {render.clock(session['started_at'])}"
    if session["ended_at"]:
        return f"{began} until {render.clock(session['ended_at'])}"
    if not session["training_alive"]:
        return began + (
            f", its wall {_was_or_is(session)} at {render.clock(session['wall_at'])}" if session["wall_at"] else ""
        )
    if session["left_s"] is None:
        return f"{began}, no wall"
    lead = f"last save asked for {render.duration(session['lead_s'])} before"
    if session["left_s"] <= 0:
        return f"{began}, at its wall ({lead})"
    return f"{began}, wall in {render.duration(session['left_s'])} ({lead})"


def _was_or_is(session: dict[str, Any]) -> str:
    return "is" if session["left_s"] else "was"


def _supervisor_line(found: dict[str, Any], session: dict[str, Any]) -> str:
    if session["ended_at"]:
        return "none: the session is over"
    if session["supervisor"]["alive"]:
        return f"alive, pid {session['supervisor']['pid']}"
    heard = render.ago(session["heard_at"])
    if session["training_alive"]:
        return f"dead (pid {session['supervisor']['pid']}); training goes on without it, last heard {heard}"
    return f"dead (pid {session['supervisor']['pid']}), and nothing of the session runs any more; last heard {heard}"


def _next_line(found: dict[str, Any]) -> str:
    following, session = found["next"], found["session"]
    match following["what"]:
        case "nothing":
            return "nothing: the run is finished"
        case "train":
            return "it trains"
        case "mend":
            return f"mend the cause, then {following['command']}"
        case "adopt":
            return f"{following['command']} takes it over"
    is_cut_off = session is not None and not session["ended_at"]  # what a person stopped, no daemon begins
    if following["daemon_alive"] and (following["at"] or is_cut_off):
        when = f", due {render.clock(following['at'])}" if following["at"] else ""
        return f"the daemon goes on with it{when}; or {following['command']}"
    if following["at"]:
        due = f"due {render.clock(following['at'])}"
        return f"{following['command']} ({due}, and no daemon lives that would begin it)"
    return str(following["command"])


def _look(name: str | None) -> dict[str, Any]:
    from orchestrator.report import run_view

    _, _, engine = state()
    try:
        return run_view.of_run(engine, find_run(engine, name))
    finally:
        engine.dispose()


def _list(as_json: bool, limit: int) -> int:
    from db import runs
    from orchestrator.report import run_view

    _, _, engine = state()
    found = [run_view.of_run(engine, run) for run in runs.everyone(engine, limit=limit)]
    if as_json:
        render.as_json(found)
    else:
        columns = ("run", "run_number", "state", "phase", "stage", "step")
        rows = [[*(str(item[name]) for name in columns), _next_line(item)] for item in found]
        render.table(["run", "number", "state", "phase", "stage", "step", "next"], rows)
        if (more := runs.count(engine) - len(found)) > 0:
            render.echo(f"and {more} older; -n {limit + more} shows all", err=True)
    return 0
