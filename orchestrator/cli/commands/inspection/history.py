"""kgorch history"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli import completion
from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo


@click.command("history")
@run_argument
@json_option
@click.option("--events", is_flag=True, help="List all events of the run instead, the newest last.")
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=click.IntRange(1),
    help="At most the newest N.  [default: 50 sessions, 100 events]",
)
@click.option(
    "--plot",
    metavar="METRIC",
    shell_complete=completion.metrics,
    help="Plot a metric over all sessions (needs kgorch[plot]).",
)
@click.option(
    "--x", "axis", type=click.Choice(("step", "hours")), default="step", show_default=True,
    help="The x axis of --plot; with hours, the steps are plotted, too.",
)  # fmt: skip
def command(run: str | None, as_json: bool, events: bool, limit: int | None, plot: str | None, axis: str) -> int:
    """List the sessions of RUN: start, duration, steps, checkpoint, and how each ended.

    \b
    Example:
      kgorch history surface-demo --events -n 20
    """
    if plot and (as_json or events):
        other = "--json" if as_json else "--events"
        raise KgorchError(f"--plot and {other} exclude each other", next_step="give one of them")
    from kgorch.report import run_view

    _, _, engine = open_state()
    info = find_run(engine, run)
    if events:
        return _print_events(engine, info, limit or 100, as_json)
    if plot:
        from kgorch.cli.display import plot as drawing

        return drawing.draw_of_run(engine, info, plot, axis)
    entries = run_view.history(engine, info, limit=limit or 50)
    if as_json:
        render.as_json(entries)
        return 0
    render.table(
        ["session", "began", "lasted", "steps", "attempts", "checkpoint", "ended", "by", "rungs"],
        [_row(entry) for entry in entries],
    )
    if entries and entries[0]["number"] > 1:
        render.echo(f"and {entries[0]['number'] - 1} older; -n {entries[-1]['number']} shows all", err=True)
    # both on stderr: stdout has the table alone, for cut and awk
    _print_forecast(engine, info)
    _print_check(engine, info)
    return 0


def _row(entry: dict[str, Any]) -> list[str]:
    stages = [f"{stage['name']} {stage['first_step']}→{stage['last_step']}" for stage in entry["stages"]]
    return [
        str(entry["number"]) + (f" {entry['site']}" if entry.get("remote") else ""),
        render.clock(entry["started_at"]),
        render.duration(entry["lasted_s"]),
        ", ".join(stages) or "–",
        str(len(entry["attempts"])),
        f"{entry['checkpoint']['stage']} {entry['checkpoint']['step']}" if entry["checkpoint"] else "–",
        render.words(entry["phase"]),
        render.printable(entry["why"])[:60],
        ", ".join(_rung(rung) for rung in entry["rungs"]) or "–",
    ]


def _print_forecast(engine: Engine, run: RunInfo) -> None:
    """When the run will end; of a finished run, how good the forecasts were."""
    from kgorch.cli.display.status_rows import forecast_rows
    from kgorch.report import forecast, run_view

    if current := run_view.of_run(engine, run)["forecast"]:
        render.labelled(forecast_rows(current), err=True)
    elif past := forecast.accuracy(engine, run):
        count, inside, off = past
        render.echo(
            f"{inside} of {count} forecasts contained the end; their middle was off by {100 * off:.0f}% of the remaining time",
            err=True,
        )


def _print_check(engine: Engine, run: RunInfo) -> None:
    """What `kgorch check` predicted of the plan, beside the measured values."""
    from kgorch.report import check_comparison
    from kgorch.system.paths import home_of_folder

    for one in check_comparison.compare_with_run(engine, run, home_of_folder(run.folder)):
        show = render.size if one.is_bytes else render.duration
        off = f"{one.predicted / one.measured - 1:+.0%}" if one.measured else "–"
        where = f"{one.stage}: " if one.stage else ""
        render.echo(
            f"check: {where}{one.what} predicted {show(one.predicted)}, measured {show(one.measured)} ({off})", err=True
        )


def _rung(rung: dict[str, Any]) -> str:
    changes = ", changes the result" if rung["changes_result"] else ""
    return f"{rung['rung']} (step {rung['step']}{changes})"


def _print_events(engine: Engine, run: RunInfo, limit: int, as_json: bool) -> int:
    from kgorch.db import sessions
    from kgorch.report.json_fields import stamp

    entries = sessions.events(engine, run.id, limit=limit)
    if as_json:
        render.as_json(
            [
                {"at": stamp(item.at), "kind": item.kind, "phase": item.phase, "facts": dict(item.facts)}
                for item in entries
            ]
        )
        return 0
    rows = [
        [render.clock(stamp(item.at)), item.kind, item.phase, json.dumps(dict(item.facts))[1:-1]] for item in entries
    ]
    render.table(["at", "event", "phase", "facts"], rows)
    return 0
