"""kgorch status"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli.display import render, status_rows
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument

if TYPE_CHECKING:
    from kgorch.report.glance import Glance

INTERVAL_S = 1.0
"""Between two reads of --watch: as often as ranks report."""


@click.command("status")
@run_argument
@json_option
@click.option("--watch", is_flag=True, help="Update every second until the session is over; q ends it.")
@click.option("--all", "everyone", is_flag=True, help="List all runs, one a line, the newest first.")
@click.option(
    "-n",
    "--limit",
    metavar="N",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="With --all: at most N runs.",
)
def command(run: str | None, as_json: bool, watch: bool, everyone: bool, limit: int) -> int:
    """Show the state of RUN (default: the newest run). Reads the database, so it works without a supervisor, too.

    \b
    Example:
      kgorch status --json | python -m json.tool
    """
    if everyone:
        return _list(as_json, limit)
    if watch and not as_json:
        from kgorch.cli.display import watch as screen

        return screen.watch(reader(run), status_rows.rows)
    while True:
        view = print_status(run, as_json=as_json)
        if not watch or not (view["session"] or {}).get("training_alive"):
            return 0
        time.sleep(INTERVAL_S)


def print_status(name: str | None, *, as_json: bool) -> dict[str, Any]:
    view = _view(name)
    if as_json:
        render.as_json(view)
    else:
        render.labelled(status_rows.rows(view))
    return view


def reader(name: str | None) -> Callable[[bool], tuple[dict[str, Any], Glance]]:
    """Reads the view of a run and its glance; the curves of a long run less often."""
    from kgorch.report import glance, run_view

    reader = glance.GlanceReader()

    def read(with_glance: bool) -> tuple[dict[str, Any], Glance]:
        _, _, engine = open_state()
        try:
            info = find_run(engine, name)
            return run_view.of_run(engine, info), reader.read(engine, info) if with_glance else glance.Glance()
        finally:
            engine.dispose()  # the database is opened each second; its connections must not add up

    return read


def _view(name: str | None) -> dict[str, Any]:
    from kgorch.report import run_view

    _, _, engine = open_state()
    try:
        return run_view.of_run(engine, find_run(engine, name))
    finally:
        engine.dispose()


def _list(as_json: bool, limit: int) -> int:
    from kgorch.db import runs
    from kgorch.report import run_view

    _, _, engine = open_state()
    views = [run_view.of_run(engine, run) for run in runs.all_runs(engine, limit=limit)]
    if as_json:
        render.as_json(views)
    else:
        columns = ("run", "run_number", "state", "phase", "stage", "step")
        rows = [[*(str(view[name]) for name in columns), status_rows.next_step(view)] for view in views]
        render.table(["run", "number", "state", "phase", "stage", "step", "next"], rows)
        if (older := runs.count(engine) - len(views)) > 0:
            render.echo(f"and {older} older; -n {limit + older} shows all", err=True)
    return 0
