"""kgorch slurm session: what the batch script of a run calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kgorch.cli.lookup import find_run, open_state

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo


@click.command("session", hidden=True)
@click.argument("run")
def command(run: str) -> int:
    """Run sessions of RUN in this Slurm job, and have the job run again until the run is finished."""
    from kgorch.scheduler import slurm_job

    def find() -> tuple[Engine, RunInfo]:
        engine = open_state()[2]
        return engine, find_run(engine, run)

    return slurm_job.run_sessions(*slurm_job.when_database_answers(find))
