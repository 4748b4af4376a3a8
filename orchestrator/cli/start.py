"""kgorch start"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, load_plan, plan_argument, set_option, state, until_option
from orchestrator.cli.foreground import Copying, report_nothing, run_session
from orchestrator.cli.progress import progress_option
from orchestrator.errors import ExitCode, KgorchError


@click.command("start")
@plan_argument
@set_option
@click.option("--fresh", is_flag=True, help="Begin a new run, also when one of this name is not finished.")
@click.option(
    "--extend", is_flag=True, help="Train a finished run longer, by a plan with more to do, from its final checkpoint."
)
@click.option("--continue", "required", is_flag=True, help="Only go on: an error where there is no state of the run.")
@click.option("--run", "run_id", metavar="RUN_ID", help="Which run, where the sources hold several of this name.")
@click.option("--accept-changes", is_flag=True, help="Go on also by a plan whose changes would be refused.")
@click.option(
    "--accept-plan",
    is_flag=True,
    help="Trust settings and arguments that a run keeps which is found in a source: they decide what runs.",
)
@click.option("--detach", is_flag=True, help="Supervise from the background; return once training is under way.")
@click.option("--queue", "queued", is_flag=True, help="Begin no session: put the run into the daemon's queue.")
@until_option
@progress_option
@json_option
def command(
    plan: Path,
    overrides: tuple[str, ...],
    fresh: bool,
    extend: bool,
    required: bool,
    run_id: str | None,
    accept_changes: bool,
    accept_plan: bool,
    detach: bool,
    queued: bool,
    until: datetime | None,
    progress: str,
    as_json: bool,
) -> int:
    """Begin the run of PLAN (plan.toml, if left out), or go on with it where it was saved: here, or in the sources that
    the plan names. A value by --set stays with the run.

    Trains until the run is finished or the session's wall is near; then everything is saved, verified, and a resume is
    queued. Training that still runs without a supervisor is taken over. Ctrl-C saves and stops.

    Exit codes: 0 finished, 10 session over and a resume queued, 11 the same for want of quota, 20 failed, 2 a mistake
    in plan or options.

    \b
    Example:
      kgorch start --set session.wall=30m --set stage.train.args.epochs=3
    """
    from orchestrator.admission import resolve_run, session_start
    from orchestrator.admission.requests import Consent, LocalState, StartRequest
    from orchestrator.system import process_protection

    consent = Consent(changes=accept_changes, plan=accept_plan, extend=extend)
    if fresh and extend:
        raise click.UsageError("--fresh begins a new run, --extend goes on with a finished one: give one of them")
    if fresh and run_id:
        raise click.UsageError("--fresh begins a new run, --run goes on with one: give one of them")
    if fresh and required:
        raise click.UsageError("--fresh begins a new run, --continue never does: give one of them")
    if queued and (until or detach):
        raise click.UsageError("--queue begins no session: --until and --detach are of one, leave them out")
    loaded, text = load_plan(plan, overrides)
    request = StartRequest(text, plan, overrides, fresh, run_id, consent, required)
    if queued:
        from orchestrator.cli.queue import add_plan

        return add_plan(request, as_json=as_json)
    if detach:
        options = [*(["--fresh"] if fresh else []), *(["--run", run_id] if run_id else [])]
        options += ["--continue"] if required else []
        options += ["--accept-changes"] if accept_changes else []
        options += ["--accept-plan"] if accept_plan else []
        options += ["--extend"] if extend else []
        options += ["--until", until.isoformat()] if until else []
        return _detach(plan, loaded.name, overrides, options, as_json=as_json)
    process_protection.protect()
    profile, home, engine = state()
    with Copying() as watcher:
        opened = session_start.start(LocalState(engine, home, profile), request, watcher=watcher, until=until)
    if isinstance(opened, resolve_run.Nothing):
        return report_nothing(engine, opened, as_json=as_json)
    return run_session(engine, opened, as_json=as_json, progress=progress)


def _detach(plan: Path, name: str, overrides: tuple[str, ...], options: list[str], *, as_json: bool) -> int:
    """The same command in a session of its own; its words go into the state folder."""
    _, home, _ = state()
    log = home / "supervisor.log"
    command = [sys.executable, "-m", "orchestrator.cli", "start", str(plan.absolute())]
    command += [*options, "--progress", "none"]  # what happens goes into the log; how far it is, status tells
    for override in overrides:
        command += ["--set", override]
    ready, told = os.pipe()
    with open(log, "ab") as file:
        file_start = file.tell()
        child = subprocess.Popen(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=(told,),
            env={**os.environ, "KGORCH_READY_FD": str(told)},
        )
    os.close(told)
    with open(ready, "rb") as pipe:
        word = pipe.read()  # "ready" once a session is open; nothing when the child ended before
    if not word:
        deadline = time.monotonic() + 10
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        said = log.read_bytes()[file_start:].decode(errors="replace").strip()
        if child.returncode not in (0, None, ExitCode.QUOTA_SPENT):
            raise KgorchError(said.removeprefix("error: ") or f"the supervisor ended with {child.returncode}")
        if not as_json:
            render.echo(said)
            return child.returncode or 0
    if as_json:
        from orchestrator.cli.status import print_status

        print_status(name, as_json=True)
    else:
        render.echo(f"supervising from the background as pid {child.pid}; its words go to {log}")
        render.echo("next: kgorch status --watch, kgorch logs -f, kgorch stop")
    return child.returncode or 0
