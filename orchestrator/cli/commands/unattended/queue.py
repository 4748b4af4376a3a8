"""kgorch queue [add | drop]"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli import completion
from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, load_plan, open_state
from kgorch.cli.options import json_option, parse_instant, run_argument
from kgorch.cli.usage import Group
from kgorch.core.codes import REMOTE_OPEN, ResumeState
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from kgorch.admission.requests import StartRequest
    from kgorch.admission.resolve_run import NoSession
    from kgorch.db.rows import RunInfo


@click.group("queue", cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> int:
    """List the runs that wait to be started: when each is due, and why it waits.

    Of a run at another place: when it is looked at next. Of a Slurm job: its state, and when Slurm expects to start it.

    \b
    Example:
      kgorch queue --json
    """
    if ctx.invoked_subcommand:
        return 0
    from kgorch.db import queue
    from kgorch.report import remote_view, slurm_view
    from kgorch.report.json_fields import stamp

    _, _, engine = open_state()
    jobs = slurm_view.queue_entries(engine)
    in_jobs = {(item["run"], item["run_number"]) for item in jobs}
    entries = [
        {
            "run": entry.run,
            "run_number": entry.number,
            "state": entry.resume.state,
            "due_at": stamp(entry.resume.due_at),
            "priority": entry.resume.priority,
            "reason": entry.resume.reason,
            "why": entry.resume.why,
            "failed_starts": entry.resume.failed_starts,
            "last_error": entry.resume.last_error or None,
            "ranks": entry.resume.ranks,
            "share": entry.resume.share,
        }
        for entry in queue.entries(engine)
        if (entry.run, entry.number) not in in_jobs
    ]
    entries += [*remote_view.queue_entries(engine), *jobs]
    if as_json:
        render.as_json(entries)
        return 0
    if not entries:
        render.echo("the queue is empty")
        return 0
    rows = [
        [
            str(item["run"]),
            _unknown_time(item) if item["due_at"] is None else render.clock(str(item["due_at"])),
            str(item["state"]),
            str(item["priority"]),
            str(item["failed_starts"]),
            render.printable(f"{item['why']}{'; ' + str(item['last_error']) if item['last_error'] else ''}"),
        ]
        for item in entries
    ]
    render.table(["run", "due", "state", "priority", "failed starts", "why"], rows)
    return 0


def _unknown_time(item: dict[str, Any]) -> str:
    return "on request" if item["state"] == ResumeState.DUE else ""


@command.command("add")
@click.argument("what", metavar="RUN|PLAN", shell_complete=completion.runs_and_plans)
@click.option(
    "--at",
    metavar="TIME",
    callback=parse_instant,
    help="When it is due: 18:30 (the next one), or 2026-11-22T03:00+01:00; default: now.",
)
@click.option("--continue", "required", is_flag=True, help="For a PLAN: only continue a run, as in kgorch start.")
@click.option(
    "--accept-plan", is_flag=True, help="For a PLAN: trust the settings of a run in a source, as in kgorch start."
)
@click.option(
    "--priority",
    metavar="N",
    type=click.IntRange(-100, 100),
    help="For a RUN: instead of the plan's session.priority; the highest starts first.",
)
def add(what: str, at: datetime | None, required: bool, accept_plan: bool, priority: int | None) -> int:
    """Put a RUN into the queue; or the run of a PLAN, which need not exist yet.

    \b
    Example:
      kgorch queue add surface-demo --at 18:30
    """
    due_at = at or datetime.now(UTC)
    if what.endswith(".toml"):
        from kgorch.admission.requests import Consent, StartRequest

        plan = Path(what)
        request = StartRequest(load_plan(plan)[1], plan, consent=Consent(plan=accept_plan), required=required)
        if priority is not None:
            raise click.UsageError("--priority is for a RUN; a plan has session.priority")
        return add_plan(request, due_at=due_at)
    if required or accept_plan:
        raise click.UsageError(f"{what} is a run of this machine: --continue and --accept-plan need a PLAN.toml")
    from kgorch.admission import queue_entry

    _, home, engine = open_state()
    run = find_run(engine, what)
    return _print_entry(home, run, queue_entry.enqueue_known(engine, run, due_at=due_at, priority=priority), due_at)


@command.command("drop")
@run_argument
def drop(run: str | None) -> int:
    """Take RUN out of the queue: the daemon does not start it any more, `kgorch resume` does.

    \b
    Example:
      kgorch queue drop surface-demo
    """
    from kgorch.db import queue, remote

    _, _, engine = open_state()
    info = find_run(engine, run)
    newest = remote.newest(engine, info.id)
    if newest and newest.state in REMOTE_OPEN:
        raise KgorchError(
            f"{info.name} continues at {newest.place}", next_step=f"kgorch stop {info.name}", error_code="KG702"
        )
    if queue.unschedule(engine, info.id):
        render.echo(
            f"{info.name} is out of the queue\nnext: kgorch resume {info.name}    (starts it, whenever you want)"
        )
    elif (row := queue.pending_resume(engine, info.id)) and row.state == ResumeState.CLAIMED:
        render.echo(f"the daemon is starting {info.name} just now; nothing changed\nnext: kgorch stop {info.name}")
    else:
        render.echo(f"{info.name} has no scheduled resume; nothing changed")
    return 0


def add_plan(request: StartRequest, *, due_at: datetime | None = None, as_json: bool = False) -> int:
    """Put the run of a plan into the queue, as `kgorch queue add PLAN` and `kgorch start --queue` do."""
    from kgorch.admission import queue_entry, resolve_run
    from kgorch.admission.requests import LocalState
    from kgorch.cli.display.import_progress import ImportProgress

    profile, home, engine = open_state()
    due_at = due_at or datetime.now(UTC)
    with ImportProgress() as watcher:
        result = queue_entry.enqueue(LocalState(engine, home, profile), request, due_at=due_at, watcher=watcher)
    run, nothing = (result.run, result) if isinstance(result, resolve_run.NoSession) else (result, None)
    if as_json:
        from kgorch.report import run_view
        from kgorch.scheduler import daemon_api

        daemon_api.wake(home)
        render.as_json(run_view.of_run(engine, run))
        return 0
    return _print_entry(home, run, nothing, due_at)


def _print_entry(home: Path, run: RunInfo, nothing: NoSession | None, due_at: datetime) -> int:
    """Wake the daemon, so that it does not find the entry only at its next poll, and print when the run is due."""
    from kgorch.scheduler import daemon_api

    if nothing:
        render.echo(f"{run.name} is {nothing.why}; nothing was queued")
        return 0
    is_alive = daemon_api.wake(home)
    when = "now" if due_at <= datetime.now(UTC) else f"at {render.clock(due_at.isoformat())}"
    render.echo(
        f"{run.name} is queued: due {when}" + ("" if is_alive else "; no daemon is running that would start it")
    )
    render.echo(f"next: {'kgorch status ' + run.name + ' --watch' if is_alive else 'kgorch daemon'}")
    return 0
