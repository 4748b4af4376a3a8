"""kgorch stop"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, run_argument, state
from orchestrator.core.codes import OVER, ResumeState
from orchestrator.errors import KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from db.records import RunInfo


@click.command("stop")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when the session is over (default), or at once.")
def command(run: str | None, wait: bool) -> int:
    """Save RUN, then end its session; `kgorch resume` goes on later.

    \b
    Example:
      kgorch stop surface-demo
    """
    import time

    from db import sessions
    from orchestrator.launch import launcher
    from orchestrator.report import run_view
    from orchestrator.supervisor import ending_files
    from orchestrator.system.sockets import control_socket

    _, _, engine = state()
    found = find_run(engine, run)
    answer = control_socket.ask(Path(found.folder) / "control.sock", "stop")
    if answer is None:
        last = sessions.last(engine, found.id)
        attempt = sessions.last_attempt(engine, last.id) if last else None
        if attempt and launcher.is_running(Path(attempt.folder)):
            raise KgorchError(
                f"{found.name} trains on without a supervisor that could stop it",
                next_step=f"kgorch resume {found.name} takes it over; Ctrl-C there, or kgorch stop, then saves and stops",
            )
        render.echo(f"{found.name} is not running")
        _say_what_comes(engine, found)
        return 0
    if wait:
        while (last := sessions.last(engine, found.id)) and run_view.is_supervised(last):
            time.sleep(0.1)
        if last and last.phase not in OVER and (ending := ending_files.read(Path(found.folder), last.number)):
            render.echo(
                f"{found.name}: {render.words(ending['phase'])}; the database could not be written, the next start does it"
            )
            return 0
        if last and last.phase not in OVER:
            raise KgorchError(
                f"the supervisor of {found.name} has died meanwhile", next_step=f"kgorch status {found.name}"
            )
        render.echo(f"{found.name}: {render.words(last.phase) if last else 'over'} at step {last.step if last else 0}")
        return 0
    render.echo(f"{found.name}: {answer.text}")
    return 0


def _say_what_comes(engine: Engine, run: RunInfo) -> None:
    """A daemon begins by itself what waits: who wants it stopped has to say so to the queue."""
    from db import queue

    row = queue.open_resume(engine, run.id)
    if row and row.state == ResumeState.CLAIMED:
        render.echo(f"it is being begun just now\nnext: kgorch stop {run.name}")
    elif row and row.due_at:
        render.echo(f"it goes on by itself: due at {render.clock(row.due_at.isoformat())}")
        render.echo(f"next: kgorch queue drop {run.name}")
