"""kgorch save"""

from __future__ import annotations

import time
from pathlib import Path

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument
from kgorch.core.codes import EventKind
from kgorch.errors import KgorchError

TIMEOUT_S = 600.0
"""For the checkpoint to be verified. A save of a large state to a network disk takes minutes."""


@click.command("save")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when the checkpoint is verified (default), or at once.")
def command(run: str | None, wait: bool) -> int:
    """Save a checkpoint of RUN now; training continues.

    \b
    Example:
      kgorch save surface-demo
    """
    from kgorch.db import checkpoints, runs, sessions
    from kgorch.system.sockets import control_socket

    _, _, engine = open_state()
    info = find_run(engine, run)
    before = checkpoints.newest_verified(engine, info.id)
    request_at = runs.now()
    if control_socket.ask(Path(info.folder) / "control.sock", "save") is None:
        raise KgorchError(f"{info.name} is not running under a supervisor", next_step=f"kgorch status {info.name}")
    deadline_s = time.monotonic() + TIMEOUT_S
    # the supervisor answers before the save is done, so its end is read from the database: a new checkpoint or a failure
    while wait and time.monotonic() < deadline_s:
        newest = checkpoints.newest_verified(engine, info.id)
        if newest and (before is None or newest.path != before.path):
            render.echo(f"{info.name}: step {newest.step} is saved and verified in {newest.path}")
            return 0
        for event in sessions.events(engine, info.id, limit=20):
            if event.kind == EventKind.SAVE_FAILED and event.at >= request_at:
                raise KgorchError(
                    f"the save failed: {event.facts.get('why')}; training continues",
                    next_step=f"free some disk space, then kgorch save {info.name}",
                )
        time.sleep(0.1)
    if wait:
        raise KgorchError(
            f"no checkpoint of {info.name} was verified within {TIMEOUT_S:.0f} s; the save may still succeed",
            next_step=f"kgorch status {info.name}",
        )
    render.echo(f"{info.name}: a save was requested")
    return 0
