"""kgorch save"""

from __future__ import annotations

import time

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument
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
    from kgorch.admission import live_requests

    _, _, engine = open_state()
    info = find_run(engine, run)
    request = live_requests.request_save(engine, info)
    deadline_s = time.monotonic() + TIMEOUT_S
    # the supervisor answers before the save is done, so its end is read from the database: a new checkpoint or a failure
    while wait and time.monotonic() < deadline_s:
        if saved := live_requests.saved_checkpoint(engine, info, request):
            render.echo(f"{info.name}: step {saved.step} is saved and verified in {saved.path}")
            return 0
        time.sleep(0.1)
    if wait:
        raise KgorchError(
            f"no checkpoint of {info.name} was verified within {TIMEOUT_S:.0f} s; the save may still succeed",
            next_step=f"kgorch status {info.name}",
        )
    render.echo(f"{info.name}: a save was requested")
    return 0
