"""kgorch save"""

from __future__ import annotations

import time
from pathlib import Path

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, run_argument, state
from orchestrator.core.codes import EventKind
from orchestrator.errors import KgorchError

PATIENCE_S = 600.0


@click.command("save")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when the checkpoint is verified (default), or at once.")
def command(run: str | None, wait: bool) -> int:
    """Save RUN now; training goes on.

    \b
    Example:
      kgorch save surface-demo
    """
    from db import checkpoints, runs, sessions
    from orchestrator.system.sockets import control_socket

    _, _, engine = state()
    found = find_run(engine, run)
    before = checkpoints.newest_verified(engine, found.id)
    asked_at = runs.now()
    if control_socket.ask(Path(found.folder) / "control.sock", "save") is None:
        raise KgorchError(f"{found.name} is not running under a supervisor", next_step=f"kgorch status {found.name}")
    deadline = time.monotonic() + PATIENCE_S
    while wait and time.monotonic() < deadline:
        now = checkpoints.newest_verified(engine, found.id)
        if now and (before is None or now.path != before.path):
            render.echo(f"{found.name}: step {now.step} is saved and verified in {now.path}")
            return 0
        for event in sessions.events(engine, found.id, limit=20):
            if event.kind == EventKind.SAVE_FAILED and event.at >= asked_at:
                raise KgorchError(
                    f"the save failed: {event.facts.get('why')}", next_step="free some disk; training goes on"
                )
        time.sleep(0.1)
    if wait:
        raise KgorchError(
            f"no checkpoint of {found.name} was verified within {PATIENCE_S:.0f} s; the save goes on, if it can",
            next_step=f"kgorch status {found.name}",
        )
    render.echo(f"{found.name}: asked")
    return 0
