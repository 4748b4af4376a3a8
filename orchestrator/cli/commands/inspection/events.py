"""kgorch events"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument
from kgorch.core.codes import RunState

if TYPE_CHECKING:
    from kgorch.db.rows import EventInfo, RunInfo

INTERVAL_S = 0.5
"""Between two reads of the journal with --follow."""

BATCH = 1000
"""Events that are read at a time: a year's journal is not held in memory."""


@click.command("events")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one event a line (docs/json.md).")
@click.option("-f", "--follow", is_flag=True, help="Go on as events happen, until the run is finished or has failed.")
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="Begin with the newest N; 0 for those to come alone.",
)
def command(run: str | None, as_json: bool, follow: bool, limit: int) -> int:
    """Print the journal of RUN: what happened, over all its sessions. Works without a supervisor, too.

    With -f it goes on from session to session; Ctrl-C ends it, and not the training.

    \b
    Example:
      kgorch events surface-demo -f --json | head -n 20
    """
    from kgorch.db import runs, sessions

    _, _, engine = open_state()
    info = find_run(engine, run)
    # One more than is shown: without any event to begin with, what comes is found by its id all the same.
    newest = sessions.events(engine, info.id, limit=max(limit, 1))
    last_id = newest[-1].id if newest else 0
    _print(info, newest if limit else [], as_json)
    while follow:
        # The state first: what is written between the two reads is read, and then nothing follows.
        current = runs.by_id(engine, info.id)
        while batch := sessions.events_after(engine, info.id, last_id, limit=BATCH):
            last_id = batch[-1].id
            _print(info, batch, as_json)
        if current is None or current.state != RunState.ACTIVE:
            return 0
        time.sleep(INTERVAL_S)
    return 0


def _print(run: RunInfo, events: Iterable[EventInfo], as_json: bool) -> None:
    from kgorch.report import journal

    for event in events:
        view = journal.event_view(run, event)
        if as_json:
            render.as_json_line(view)
        else:
            render.echo(f"{render.clock(view['at'])}  {view['kind']}  {json.dumps(view['facts'])[1:-1]}")
