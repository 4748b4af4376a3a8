"""kgorch stop"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import run_argument
from kgorch.core.codes import OVER, REMOTE_OPEN, ResumeState
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kgorch.db.rows import RunInfo, SlurmJobInfo

JOB_POLL_S = 2.0
"""Seconds between two questions to Slurm while a job ends."""


@click.command("stop")
@run_argument
@click.option("--wait/--no-wait", default=True, help="Return when the session is over (default), or at once.")
def command(run: str | None, wait: bool) -> int:
    """Save a checkpoint of RUN, then end its session; `kgorch resume` continues it later.

    Of a run at another place no further session is pushed; whether the place ends the present one, it says. A Slurm job that
    waits is cancelled, one that runs on another node saves and ends.

    \b
    Example:
      kgorch stop surface-demo
    """
    from kgorch.admission import live_requests
    from kgorch.db import remote, slurm_jobs

    _, home, engine = open_state()
    info = find_run(engine, run)
    newest = remote.newest(engine, info.id)
    if newest and newest.state in REMOTE_OPEN:
        return _stop_elsewhere(engine, home, info, newest.place)
    if job := slurm_jobs.open_job(engine, info.id):
        return _stop_job(engine, info, job, wait=wait)
    answer = live_requests.request_stop(engine, info)
    if answer is None:
        render.echo(f"{info.name} is not running")
        _print_queue_entry(engine, info)
        return 0
    if wait:
        return _wait(engine, info)
    render.echo(f"{info.name}: {answer}")
    return 0


def _stop_elsewhere(engine: Engine, home: Path, run: RunInfo, place_name: str) -> int:
    from kgorch.cli.display import remote_rows
    from kgorch.cli.remote_errors import place_errors
    from kgorch.remote import remote_run
    from kgorch.remote.places.registry import open_place
    from kgorch.report import remote_view
    from kgorch.system import process_protection

    process_protection.protect()
    place = open_place(place_name, home)
    try:
        with place_errors(place_name):
            row, told = remote_run.stop_after_this(engine, run, place.stop)
    finally:
        place.close()
    render.echo(
        f"{run.name}: session {row.number} is {remote_rows.sentence(remote_view.session(row))}; none follows it"
    )
    if told:
        render.echo(render.printable(told))
    render.echo("next: kgorch remote start PLAN, to continue it")
    return 0


def _stop_job(engine: Engine, run: RunInfo, job: SlurmJobInfo, *, wait: bool) -> int:
    """Cancel the run's Slurm job if it waits; if it runs, have its session save and end. Raises: KgorchError."""
    import time

    from kgorch.db import sessions
    from kgorch.slurm import jobs

    job, text = jobs.stop(engine, job)
    render.echo(f"{run.name}: {text}")
    while wait and job.ended_at is None:
        time.sleep(JOB_POLL_S)
        job = jobs.newest_row(engine, job)
    if job.ended_at:
        last = sessions.last(engine, run.id)
        if last and last.phase in OVER:
            render.echo(f"{run.name}: {render.words(last.phase)} at step {last.step}")
        render.echo("next: kgorch slurm submit PLAN, to continue it")
    return 0


def _wait(engine: Engine, run: RunInfo) -> int:
    """Until no supervisor has the session; prints how it ended. Raises: KgorchError: the supervisor died before."""
    import time

    from kgorch.db import sessions
    from kgorch.report import run_view
    from kgorch.supervisor import ending_files

    while (last := sessions.last(engine, run.id)) and run_view.is_supervised(engine, last):
        time.sleep(0.1)
    if last and last.phase not in OVER:
        # a supervisor that cannot write the database at its end leaves a file instead
        ending = ending_files.read(Path(run.folder), last.number)
        if not ending:
            raise KgorchError(
                f"the supervisor of {run.name} died before it stopped", next_step=f"kgorch status {run.name}"
            )
        render.echo(
            f"{run.name}: {render.words(ending['phase'])}; the database could not be written, the next start records it"
        )
        return 0
    render.echo(f"{run.name}: {render.words(last.phase) if last else 'over'} at step {last.step if last else 0}")
    return 0


def _print_queue_entry(engine: Engine, run: RunInfo) -> None:
    """A daemon starts a queued run by itself, so to stop it for good it must leave the queue."""
    from kgorch.db import queue

    row = queue.pending_resume(engine, run.id)
    if row and row.state == ResumeState.CLAIMED:
        render.echo(f"the daemon is starting it just now\nnext: kgorch stop {run.name}")
    elif row and row.due_at:
        render.echo(f"it is queued: a daemon starts it at {render.clock(row.due_at.isoformat())}")
        render.echo(f"next: kgorch queue drop {run.name}")
