"""kgorch queue [add | drop]"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli import completion, render
from orchestrator.cli.common import as_instant, find_run, json_option, load_plan, run_argument, state
from orchestrator.cli.usage import Group
from orchestrator.core.codes import ResumeState

if TYPE_CHECKING:
    from db.records import RunInfo
    from orchestrator.admission.requests import StartRequest
    from orchestrator.admission.resolve_run import Nothing


@click.group("queue", cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> int:
    """The runs that wait: when each goes on, and why it waits.

    \b
    Example:
      kgorch queue --json
    """
    if ctx.invoked_subcommand:
        return 0
    from db import queue
    from orchestrator.report.run_view import stamp

    _, _, engine = state()
    found = [
        {
            "run": entry.run,
            "run_number": entry.number,
            "state": entry.resume.state,
            "due_at": stamp(entry.resume.due_at),
            "priority": entry.resume.priority,
            "reason": entry.resume.reason,
            "why": entry.resume.why,
            "tries": entry.resume.tries,
            "last_error": entry.resume.last_error or None,
            "ranks": entry.resume.ranks,
            "share": entry.resume.share,
        }
        for entry in queue.entries(engine)
    ]
    if as_json:
        render.as_json(found)
        return 0
    if not found:
        render.echo("nothing waits")
        return 0
    rows = [
        [
            str(item["run"]),
            "when asked" if item["due_at"] is None else render.clock(str(item["due_at"])),
            str(item["state"]),
            str(item["priority"]),
            str(item["tries"]),
            render.printable(f"{item['why']}{'; ' + str(item['last_error']) if item['last_error'] else ''}"),
        ]
        for item in found
    ]
    render.table(["run", "due", "state", "priority", "tries", "why"], rows)
    return 0


@command.command("add")
@click.argument("what", metavar="RUN|PLAN", shell_complete=completion.runs_and_plans)
@click.option(
    "--at",
    metavar="TIME",
    callback=as_instant,
    help="When it goes on: 18:30 (the next one), or 2026-11-22T03:00+01:00; default: now.",
)
@click.option("--continue", "required", is_flag=True, help="Of a plan: only go on, as in kgorch start.")
@click.option(
    "--accept-plan", is_flag=True, help="Of a plan: trust what a run found in a source says, as in kgorch start."
)
def add(what: str, at: datetime | None, required: bool, accept_plan: bool) -> int:
    """Put a run into the queue, by its name, or by its plan where it is to begin.

    \b
    Example:
      kgorch queue add surface-demo --at 18:30
    """
    due_at = at or datetime.now(UTC)
    if what.endswith(".toml"):
        from orchestrator.admission.requests import Consent, StartRequest

        plan = Path(what)
        request = StartRequest(load_plan(plan)[1], plan, consent=Consent(plan=accept_plan), required=required)
        return add_plan(request, due_at=due_at)
    if required or accept_plan:
        raise click.UsageError(f"{what} is a run of this machine: --continue and --accept-plan are for a PLAN.toml")
    from orchestrator.admission import queue_entry

    _, home, engine = state()
    run = find_run(engine, what)
    return _say(home, run, queue_entry.enqueue_known(engine, run, due_at=due_at), due_at)


@command.command("drop")
@run_argument
def drop(run: str | None) -> int:
    """RUN goes on when a person asks, and not by itself.

    \b
    Example:
      kgorch queue drop surface-demo
    """
    from db import queue

    _, _, engine = state()
    found = find_run(engine, run)
    if queue.drop(engine, found.id):
        render.echo(f"{found.name} goes on when you say so: kgorch resume {found.name}")
    elif (row := queue.open_resume(engine, found.id)) and row.state == ResumeState.CLAIMED:
        render.echo(f"{found.name} is being begun just now; nothing was changed\nnext: kgorch stop {found.name}")
    else:
        render.echo(f"{found.name} does not wait for an hour; nothing was changed")
    return 0


def add_plan(request: StartRequest, *, due_at: datetime | None = None, as_json: bool = False) -> int:
    from orchestrator.admission import queue_entry, resolve_run
    from orchestrator.admission.requests import LocalState
    from orchestrator.cli.foreground import Copying

    profile, home, engine = state()
    due_at = due_at or datetime.now(UTC)
    with Copying() as watcher:
        found = queue_entry.enqueue(LocalState(engine, home, profile), request, due_at=due_at, watcher=watcher)
    run, nothing = (found.run, found) if isinstance(found, resolve_run.Nothing) else (found, None)
    if as_json:
        from orchestrator.report import run_view
        from orchestrator.scheduler import daemon_api

        daemon_api.wake(home)
        render.as_json(run_view.of_run(engine, run))
        return 0
    return _say(home, run, nothing, due_at)


def _say(home: Path, run: RunInfo, nothing: Nothing | None, due_at: datetime) -> int:
    from orchestrator.scheduler import daemon_api

    if nothing:
        render.echo(f"{run.name} is {nothing.why}; nothing was queued")
        return 0
    lives = daemon_api.wake(home)
    when = "now" if due_at <= datetime.now(UTC) else f"at {render.clock(due_at.isoformat())}"
    render.echo(f"{run.name} is queued: due {when}" + ("" if lives else "; no daemon lives that would begin it"))
    render.echo(f"next: {'kgorch status ' + run.name + ' --watch' if lives else 'kgorch daemon'}")
    return 0
