"""kgorch slurm submit"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import load_plan, open_state
from kgorch.cli.options import json_option, plan_path, set_option


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """The words of `kgorch slurm submit`; click's names of the options below are the fields.

    Attributes:
        words: PLAN, and the options of sbatch after `--`.
        time_s: --time.
    """

    words: tuple[str, ...]
    nodes: int
    gpus: int
    time_s: float | None
    requeue: bool
    dry_run: bool
    overrides: tuple[str, ...]
    fresh: bool
    accept_changes: bool
    as_json: bool

    @property
    def plan_word(self) -> str | None:
        return self.words[0] if self.words and not self.words[0].startswith("-") else None

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        return self.words[1:] if self.plan_word else self.words


def parse_time_s(_: click.Context, __: click.Parameter, typed: str | None) -> float | None:
    """Raises: click.BadParameter."""
    from kgorch.core.durations import parse_duration_s

    try:
        return None if typed is None else parse_duration_s(typed)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command("submit")
@click.argument("words", nargs=-1, metavar="[PLAN] [-- SBATCH_OPTIONS...]")
@click.option(
    "--nodes", metavar="N", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Nodes of the job."
)
@click.option("--gpus", metavar="N", type=click.IntRange(0, 1024), default=0, help="GPUs on each node; default: none.")
@click.option(
    "--time",
    "time_s",
    metavar="DURATION",
    callback=parse_time_s,
    help="Time limit of each session, such as 9h; default: the partition's.",
)
@click.option(
    "--requeue/--no-requeue",
    default=True,
    help="Continue in further sessions until the run is finished (default), or not.",
)
@click.option("--dry-run", is_flag=True, help="Print the batch script; write and submit nothing.")
@set_option
@click.option("--fresh", is_flag=True, help="Start a new run, even if one of this name is not finished.")
@click.option("--accept-changes", is_flag=True, help="Continue also by a plan whose changes would be refused.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> int:
    """Submit the run of PLAN (default: plan.toml) to Slurm, or go on with it there.

    Writes a batch script into the run's folder and submits it. A session that ends before the run is finished requeues its job,
    or submits a successor where Slurm does not requeue it; so does one that was preempted. kgorch stop and scancel end that.
    What follows -- goes to sbatch, and stands in the script.

    \b
    Example:
      kgorch slurm submit plan.toml --gpus 4 --time 9h --dry-run -- -p gpu
    """
    from kgorch.admission import slurm_submission
    from kgorch.admission.requests import Consent, LocalState, StartRequest
    from kgorch.cli.display.import_progress import ImportProgress
    from kgorch.slurm.batch_script import JobRequest
    from kgorch.system import process_protection

    options = SubmitOptions(**values)
    plan = plan_path(ctx, options.plan_word)
    job = JobRequest(options.nodes, options.gpus, options.time_s, options.requeue, options.sbatch_options)
    job.check()
    _, text = load_plan(plan, options.overrides)
    request = StartRequest(
        text, plan, options.overrides, options.fresh, consent=Consent(changes=options.accept_changes)
    )
    process_protection.protect()
    profile, home, engine = open_state()
    state = LocalState(engine, home, profile)
    if options.dry_run:
        script = slurm_submission.preview(state, request, job)
        if options.as_json:
            render.as_json({"run": None, "job": None, "script": None, "text": script})
        else:
            render.echo(script.rstrip("\n"))
        return 0
    with ImportProgress() as watcher:
        run, row, path = slurm_submission.submit(state, request, job, watcher)
    if options.as_json:
        render.as_json({"run": run.name, "job": row.job, "script": str(path), "text": path.read_text()})
        return 0
    render.echo(f"{run.name} is submitted as Slurm job {row.job}; its script is {path}")
    render.echo(f"next: kgorch status {run.name}")
    return 0
