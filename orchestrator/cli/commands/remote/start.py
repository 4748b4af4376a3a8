"""kgorch remote start"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgorch.cli.display import remote_rows, render
from kgorch.cli.lookup import load_plan, open_state
from kgorch.cli.options import json_option, on_option, plan_argument, set_option
from kgorch.core.codes import REMOTE_OPEN, RemoteState, RunState
from kgorch.errors import ExitCode, KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RemoteSessionInfo
    from kgorch.remote.remote_run import RemoteRun

LOOK_S = 1.0
"""Longest time between two looks at the row: another process may drive the run."""


@click.command("start")
@plan_argument
@set_option
@on_option
@click.option("--foreground", is_flag=True, help="Carry the run on in this terminal, until it is finished.")
@click.option("--fresh", is_flag=True, help="Start a new run, even if one of this name is not finished.")
@click.option("--accept-changes", is_flag=True, help="Continue also by a plan whose changes would be refused.")
@json_option
def command(
    plan: Path,
    overrides: tuple[str, ...],
    place: str | None,
    foreground: bool,
    fresh: bool,
    accept_changes: bool,
    as_json: bool,
) -> int:
    """Start the run of PLAN at another place, or go on with it there.

    The daemon pushes a session, waits for its end, and pushes the next one from its output, until the run is finished. Ctrl-C
    with --foreground ends no session: the same command comes back to it.

    Exit codes: 0 finished, or left to the daemon; 10 over with --foreground and not finished; 20 failed; 2 a mistake.

    \b
    Example:
      kgorch remote start plan.toml --on local --foreground
    """
    from kgorch.admission.requests import Consent, LocalState, StartRequest
    from kgorch.cli.display.import_progress import ImportProgress
    from kgorch.remote import remote_run
    from kgorch.system import process_protection

    typed = (*overrides, *([f'remote.on="{place}"'] if place else []))
    _, text = load_plan(plan, typed)
    process_protection.protect()
    profile, home, engine = open_state()
    request = StartRequest(text, plan, typed, fresh, consent=Consent(changes=accept_changes))
    with ImportProgress() as watcher:
        found = remote_run.begin(LocalState(engine, home, profile), request, watcher)
    name = found.run.name
    if foreground and found.run.state != RunState.FINISHED:
        code = _carry(engine, home, found)
    elif found.run.state == RunState.FINISHED:
        render.echo(f"{name} is finished; nothing was started\nnext: kgorch remote fetch {name}", err=as_json)
        code = ExitCode.DONE
    else:
        code = _leave_to_daemon(home, name, found.settings.place, quiet=as_json)
    if as_json:
        from kgorch.cli.commands.inspection.status import print_status

        print_status(name, as_json=True)
    return int(code)


def _leave_to_daemon(home: Path, name: str, place: str, *, quiet: bool) -> ExitCode:
    from kgorch.scheduler import daemon_api

    if daemon_api.wake(home):
        text = f"the daemon runs {name} at {place}\nnext: kgorch status {name}"
    else:
        text = (
            f"{name} is planned at {place}; no daemon is running that would push it\n"
            "next: kgorch daemon, or kgorch systemd install; or the same command with --foreground"
        )
    render.echo(text, err=quiet)
    return ExitCode.DONE


def _carry(engine: Engine, home: Path, found: RemoteRun) -> ExitCode:
    """Visit the run whenever it is due, and print what changes."""
    from kgorch.db import remote
    from kgorch.remote import remote_run
    from kgorch.remote.places.registry import open_place

    place, shown = open_place(found.settings.place, home), ""
    row = remote.newest(engine, found.run.id)
    try:
        while row and row.state in REMOTE_OPEN:
            row = remote_run.visit(engine, found, place)
            shown = _print_changes(engine, found.run.id, shown)
            if row and row.state in REMOTE_OPEN:
                wait_s = (row.due_at - datetime.now(UTC)).total_seconds()
                time.sleep(min(max(0.05, wait_s), LOOK_S))
    except KeyboardInterrupt:
        render.echo(f"\nwhat runs at {place.name} goes on; the same command comes back to it", err=True)
        return ExitCode.SUSPENDED
    finally:
        place.close()
    if row and row.state == RemoteState.DONE:
        render.echo(f"{found.run.name} is finished\nnext: kgorch remote fetch {found.run.name}", err=True)
        return ExitCode.DONE
    if row and row.state == RemoteState.FAILED:
        failed = KgorchError(
            f"{found.run.name} failed at {place.name}: {row.why}",
            next_step=f"kgorch logs {found.run.name}",
            error_code="KG401",
        )
        render.echo(render.printable(failed.render()), err=True)
        return ExitCode.FAILED
    return ExitCode.SUSPENDED


def _print_changes(engine: Engine, run_id: str, shown: str) -> str:
    """Print the lines of sessions that are new since `shown`, the last one that was printed. Returns: the last one now."""
    from kgorch.db import remote

    lines = [_line(row) for row in remote.of_run(engine, run_id)[-2:]]
    for line in lines[lines.index(shown) + 1 if shown in lines else -1 :]:
        render.echo(f"{datetime.now():%H:%M:%S} {line}", err=True)
    return lines[-1]


def _line(row: RemoteSessionInfo) -> str:
    from kgorch.report import remote_view

    url = f" {row.url}" if row.state == RemoteState.QUEUED else ""
    step = f", step {row.reached_step} of {row.stage}" if row.stage else ""
    return render.printable(f"session {row.number}: {remote_rows.sentence(remote_view.session(row))}{step}{url}")
