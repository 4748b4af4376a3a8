"""kgorch slurm session: what the batch script of a run calls."""

from __future__ import annotations

import click

from kgorch.cli.lookup import find_run, open_state


@click.command("session", hidden=True)
@click.argument("run")
def command(run: str) -> int:
    """Run sessions of RUN in this Slurm job, and have the job run again until the run is finished."""
    from kgorch.scheduler import slurm_job

    _, _, engine = open_state()
    return slurm_job.run_sessions(engine, find_run(engine, run))
