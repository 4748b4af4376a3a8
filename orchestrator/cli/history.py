"""kgorch history"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import completion, render
from orchestrator.cli.common import find_run, json_option, run_argument, state

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo


@click.command("history")
@run_argument
@json_option
@click.option("--events", is_flag=True, help="The journal instead: everything that happened, newest last.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), help="The newest at the most.  [default: 50 sessions, 100 events]"
)
@click.option(
    "--plot",
    metavar="METRIC",
    shell_complete=completion.metrics,
    help="A metric over all sessions, drawn with letters (needs kgorch[plot]).",
)
@click.option(
    "--x", "axis", type=click.Choice(("step", "hours")), default="step", show_default=True,
    help="What --plot draws over; with hours, the steps are drawn, too.",
)  # fmt: skip
def command(run: str | None, as_json: bool, events: bool, limit: int | None, plot: str | None, axis: str) -> int:
    """The sessions of RUN: when, how long, from which step to which, and how each ended.

    \b
    Example:
      kgorch history surface-demo --events -n 20
    """
    from orchestrator.report import run_view

    _, _, engine = state()
    found = find_run(engine, run)
    if events:
        return _events(engine, found, limit or 100, as_json)
    if plot:
        from orchestrator.cli import plot as drawing

        return drawing.draw_of_run(engine, found, plot, axis)
    entries = run_view.history(engine, found, limit=limit or 50)
    if as_json:
        render.as_json(entries)
        return 0
    rows = [
        [
            str(item["number"]),
            render.clock(item["started_at"]),
            render.duration(item["lasted_s"]),
            ", ".join(f"{stage['name']} {stage['first_step']}→{stage['last_step']}" for stage in item["stages"]) or "–",
            str(len(item["attempts"])),
            f"{item['checkpoint']['stage']} {item['checkpoint']['step']}" if item["checkpoint"] else "–",
            render.words(item["phase"]),
            item["why"][:60],
            ", ".join(_rung(rung) for rung in item["rungs"]) or "–",
        ]
        for item in entries
    ]
    render.table(["session", "began", "lasted", "steps", "attempts", "checkpoint", "ended", "by", "rungs"], rows)
    _say_what_is_left_out(entries)
    _say_what_is_foretold(engine, found)
    _say_how_the_check_held(engine, found)
    return 0


def _say_what_is_left_out(entries: list[dict[str, Any]]) -> None:
    if entries and entries[0]["number"] > 1:
        last = entries[-1]["number"]
        render.echo(f"and {entries[0]['number'] - 1} older; -n {last} shows all", err=True)


def _say_what_is_foretold(engine: Engine, found: RunInfo) -> None:
    """When it will end; of a finished run, how that was foretold."""
    from orchestrator.cli.status import forecast_rows
    from orchestrator.report import forecast, run_view

    if ahead := run_view.of_run(engine, found)["forecast"]:
        render.labelled(forecast_rows(ahead), err=True)
    elif past := forecast.held(engine, found):
        count, inside, off = past
        render.echo(
            f"{inside} of {count} forecasts held the end; the middle was off by {100 * off:.0f}% of the time left",
            err=True,
        )


def _say_how_the_check_held(engine: Engine, found: RunInfo) -> None:
    """What `kgorch check` foretold of the plan, beside what came."""
    from orchestrator.report import check
    from orchestrator.system.paths import home_of_folder

    for one in check.held(engine, found, home_of_folder(found.folder)):
        show = render.size if one.is_bytes else render.duration
        off = f"{one.foretold / one.came - 1:+.0%}" if one.came else "–"
        where = f"{one.stage}: " if one.stage else ""
        render.echo(f"checked: {where}{one.what} {show(one.foretold)}, came {show(one.came)} ({off})", err=True)


def _rung(taken: dict[str, Any]) -> str:
    changes = ", changes the result" if taken["changes_result"] else ""
    return f"{taken['rung']} (step {taken['step']}{changes})"


def _events(engine: Engine, found: RunInfo, limit: int, as_json: bool) -> int:
    from db import sessions
    from orchestrator.report.run_view import stamp

    entries = sessions.events(engine, found.id, limit=limit)
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
