"""The view of a run (report/run_view.py) as the lines of `kgorch status`: a label and a value each."""

from __future__ import annotations

from typing import Any

from kgorch.cli.display import remote_rows, render, slurm_rows, telemetry_rows
from kgorch.core.codes import Phase

View = dict[str, Any]


def rows(view: View) -> list[tuple[str, str]]:
    """All lines, the most important first. A figure that is not known has no line."""
    session = view["session"]
    is_training = session is not None and session["training_alive"]
    lines = [
        ("run", f"{view['run']}" + (f" (number {view['run_number']})" if view["run_number"] > 1 else "")),
        *([("phase", _phase(view))] if session or not view["remote"] else []),
        *(remote_rows.rows(view["remote"]) if view["remote"] else []),
        *(slurm_rows.rows(view["slurm"]) if view["slurm"] else []),
        ("stages", " → ".join(_stage(item, view["stage"]) for item in view["stages"])),
    ]
    if view["step"]:
        lines.append(("step", _step(view, is_training=is_training)))
    if session:
        lines += [
            ("session", _session(session)),
            ("supervisor", _supervisor(session, (view["slurm"] or {}).get("node"))),
        ]
    if session or not view["remote"]:
        lines.append(("checkpoint", _checkpoint(view)))
    if best := view["best"]:
        value = "nan" if best["value"] is None else f"{best['value']:.6g}"
        lines.append(("best", f"step {best['step']} of {best['stage']}: {best['by'].rpartition(':')[0]} {value}"))
    if snapshot := view["snapshot"]:
        text = f"step {snapshot['step']} of {snapshot['stage']}, in memory, {render.ago(snapshot['at'])}"
        lines.append(("snapshot", text))
    if view["telemetry"] and is_training:
        lines += telemetry_rows.rows(view["telemetry"]["values"])
    if view["metrics"]:
        lines.append(("metrics", render.metrics(view["metrics"])))
    if view["exactness"]:
        lines.append(("exactness", ". ".join(f"{what}: {state}" for what, state in view["exactness"].items())))
    lines += [("memory", render.rung(rung)) for rung in (view["memory"] or {"rungs": []})["rungs"]]
    lines += [("quota", render.quota(view["quota"]))] if view["quota"] else []
    lines += forecast_rows(view["forecast"]) if view["forecast"] else []
    lines += _failure_rows(view["failure"]) if view["failure"] else []
    lines += [("notice", text) for text in view["notices"]]
    lines.append(("next", next_step(view)))
    return lines


def forecast_rows(forecast: View) -> list[tuple[str, str]]:
    """When the stage ends and when the plan's target is reached."""
    lines = []
    if forecast["end_at"]:
        more = f"{forecast['sessions']} more session{'s' if forecast['sessions'] != 1 else ''}"
        here = f"; this one does {forecast['now_steps']} steps" if forecast["now_steps"] is not None else ""
        lines.append(("end", f"of {forecast['stage']} {render.span(forecast)}, {more}{here}"))
    elif forecast["steps_left"]:
        lines.append(("end", "unknown: no session is long enough, or the quota is never renewed"))
    if target := forecast["target"]:
        lines.append(("target", _target(target)))
    return lines


def next_step(view: View) -> str:
    """What happens next, and what to type for it."""
    following, session = view["next"], view["session"]
    match following["what"]:
        case "nothing":
            return "nothing: the run is finished"
        case "train":
            return "training continues"
        case "mend":
            from kgorch.report import failure  # loads what judges attempts; most runs have not failed

            return failure.next_step(view, first="fix the cause,")
        case "remote" | "fetch":
            return remote_rows.next_step(view["run"], view["remote"], daemon_alive=following["daemon_alive"])
        case "slurm":
            return slurm_rows.next_step(view["slurm"])
        case "adopt":
            return f"{following['command']} adopts the training"
    # a daemon continues a session that was cut off, but not one that the user stopped
    is_cut_off = session is not None and not session["ended_at"]
    if following["daemon_alive"] and (following["at"] or is_cut_off):
        when = f", due {render.clock(following['at'])}" if following["at"] else ""
        return f"the daemon continues it{when}; or {following['command']}"
    if following["at"]:
        due = f"due {render.clock(following['at'])}"
        return f"{following['command']} ({due}, but no daemon is running that would start it)"
    return str(following["command"])


def _phase(view: View) -> str:
    session = view["session"]
    # the database has the phase in which the supervisor died; with no rank alive either, that phase is over
    if session and not session["ended_at"] and not session["training_alive"]:
        return "ended without a supervisor"
    # a session that finished as its time was over had a reason to end, too
    return render.words(view["phase"]) + (f": {view['why']}" if view["why"] and view["phase"] != Phase.FINISHED else "")


def _stage(item: View, current: str) -> str:
    """`prepare ✓ (20 steps)`, `train (at step 1316)` or `predict`."""
    if item["done"]:
        return f"{item['name']} ✓" + (f" ({item['step']} steps)" if item["step"] else "")
    if item["name"] == current:
        return f"{item['name']} (at step {item['step'] or 0})"
    return str(item["name"])


def _step(view: View, *, is_training: bool) -> str:
    total = f" of {view['steps_total']}" if view["steps_total"] else ""
    epochs = f", epoch {view['epoch']} of {view['epochs_total']}" if view["epochs_total"] else ""
    samples = f", {view['samples']} samples" if view["samples"] else ""  # 0 until the session's ranks have reported
    pace = f", {render.duration(view['step_s'])} a step" if view["step_s"] and is_training else ""
    return f"{view['step']}{total}{epochs}{samples}{pace}"


def _session(session: View) -> str:
    start = f"number {session['number']}, {session['site']}, since {render.clock(session['started_at'])}"
    if session["ended_at"]:
        return f"{start} until {render.clock(session['ended_at'])}"
    if not session["training_alive"]:
        if not session["wall_at"]:
            return start
        return f"{start}, its wall {'is' if session['left_s'] else 'was'} at {render.clock(session['wall_at'])}"
    if session["left_s"] is None:
        return f"{start}, no wall"
    lead = f"last save starts {render.duration(session['save_lead_s'])} before"
    if session["left_s"] <= 0:
        return f"{start}, at its wall ({lead})"
    return f"{start}, wall in {render.duration(session['left_s'])} ({lead})"


def _supervisor(session: View, node: str | None) -> str:
    if session["ended_at"]:
        return "none: the session is over"
    pid = session["supervisor"]["pid"]
    if session["supervisor"]["alive"]:
        return f"alive, pid {pid}" + (f" on {node}" if node else "")
    heartbeat = f"last heartbeat {render.ago(session['heartbeat_at'])}"
    if session["training_alive"]:
        return f"dead (pid {pid}); training continues without it, {heartbeat}"
    return f"dead (pid {pid}), and no process of the session is running; {heartbeat}"


def _checkpoint(view: View) -> str:
    """The checkpoint from which a resume would start: one that lies on disk counts, even if no row was written for it."""
    if newest := view["on_disk"]:
        state = "on disk, to be verified when the run continues"
    elif newest := view["checkpoint"]:
        state = "verified" if newest["verified"] else "not verified"
    else:
        return "none yet"
    return f"step {newest['step']} of {newest['stage']}, {state}, {render.ago(newest['at'])}, {render.size(newest['bytes'])}"


def _target(target: View) -> str:
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
            return f"{target['target']}: no forecast, the trend is flat{best}"
        case "away":
            return f"{target['target']}: no forecast, the metric moves away from it{best}"
        case "levels off":
            return f"{target['target']}: no forecast, the metric levels off before it{best}"
    return f"{target['target']}: no forecast, too few points yet{best}"


def _failure_rows(failure: View) -> list[tuple[str, str]]:
    times = f", {failure['times']} attempts in a row" if failure["times"] > 1 else ""
    first = "" if failure["rank"] is None else f"rank {failure['rank']} first, "
    when = f", {render.ago(failure['at'])}" if failure["at"] else ""
    where = f", {failure['where']}" if failure["where"] else ""
    lines = [("failed", f"{first}at step {failure['step']}{where}{when}{times}")]
    lines += [("", line) for line in failure["traceback"]]
    return [*lines, ("whole log", f"{failure['log']} ({failure['command']})")]
