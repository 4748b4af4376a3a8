"""kgorch history"""

from __future__ import annotations

import json
from typing import Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, json_option, run_argument, state


@click.command("history")
@run_argument
@json_option
@click.option("--events", is_flag=True, help="The journal instead: everything that happened, newest last.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), help="The newest at the most.  [default: 50 sessions, 100 events]"
)
def command(run: str | None, as_json: bool, events: bool, limit: int | None) -> int:
    """The sessions of RUN: when, how long, from which step to which, and how each ended.

    \b
    Example:
      kgorch history ink-demo --events -n 20
    """
    from orchestrator.report import view

    _, _, engine = state()
    found = find_run(engine, run)
    if events:
        return _events(engine, found, limit or 100, as_json)
    entries = view.history(engine, found, limit=limit or 50)
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
            item["phase"],
            item["why"][:60],
            ", ".join(_rung(rung) for rung in item["rungs"]) or "–",
        ]
        for item in entries
    ]
    render.table(["session", "began", "lasted", "steps", "attempts", "checkpoint", "ended", "by", "rungs"], rows)
    return 0


def _rung(taken: dict[str, Any]) -> str:
    changes = ", changes the result" if taken["changes_result"] else ""
    return f"{taken['rung']} (step {taken['step']}{changes})"


def _events(engine, found, limit: int, as_json: bool) -> int:  # type: ignore[no-untyped-def]
    from db import sessions
    from orchestrator.report.view import stamp

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
