"""kgorch slurm session: what the batch script of a run calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kgorch.cli.lookup import find_run, open_state

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.command("session", hidden=True)
@click.argument("run")
def command(run: str) -> int:
    """Run sessions of RUN in this Slurm job, and have the job run again until the run is finished."""
    from kgorch.scheduler import slurm_job

    engine = _open_when_reachable()
    return slurm_job.run_sessions(engine, find_run(engine, run))


def _open_when_reachable() -> Engine:
    """The database. Waits for a fleet's server: a job that ended without it is started again by nobody."""
    from kgorch.db.postgres import ServerAway
    from kgorch.scheduler import slurm_job

    until_s = time.monotonic() + slurm_job.CONTROLLER_AWAY_S
    while True:
        try:
            return open_state()[2]
        except ServerAway as error:
            if time.monotonic() >= until_s:
                raise
            slurm_job.say(f"{'; '.join((error.what, *error.facts))}; it is tried again")
            time.sleep(slurm_job.CONTROLLER_POLL_S)
