"""kgorch start"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click

from orchestrator.cli.common import json_option, state
from orchestrator.cli.session import Copying, report_nothing, run_session
from orchestrator.errors import KgorchError


@click.command("start")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value of the plan; kept with the run. Stages by name: stage.train.args.epochs=3.",
)
@click.option("--fresh", is_flag=True, help="Begin a new run, also when one of this name is not finished.")
@click.option("--run", "run_id", metavar="RUN_ID", help="Which run, where the sources hold several of this name.")
@click.option("--detach", is_flag=True, help="Supervise from the background; return once training is under way.")
@click.option("--queue", "queued", is_flag=True, help="Begin no session: put the run into the daemon's queue.")
@json_option
def command(
    plan: Path,
    overrides: tuple[str, ...],
    fresh: bool,
    run_id: str | None,
    detach: bool,
    queued: bool,
    as_json: bool,
) -> int:
    """Begin the run of a plan, or go on with it where it was saved: here, or in the sources that the plan names.

    Trains until the run is finished or the session's wall is near; then everything is saved, verified, and a resume is
    queued. Training that still runs without a supervisor is taken over. Ctrl-C saves and stops.

    \b
    Exit codes: 0 finished, 10 session over and a resume queued, 20 failed, 2 a mistake in plan or options.

    \b
    Example:
      kgorch start plan.toml --set session.wall=30m --set stage.train.args.epochs=3
    """
    from orchestrator.plan import load
    from orchestrator.runtime import opening

    if fresh and run_id:
        raise click.UsageError("--fresh begins a new run, --run goes on with one: give one of them")
    loaded, text = load(plan, overrides)
    if queued:
        from orchestrator.cli.queue import add_plan

        return add_plan(plan, text, overrides, fresh=fresh, run_id=run_id, as_json=as_json)
    if detach:
        return _detach(plan, loaded.name, overrides, fresh=fresh, run_id=run_id, as_json=as_json)
    profile, home, engine = state()
    with Copying() as watcher:
        opened = opening.start(
            engine, home, profile, text, plan, overrides, fresh=fresh, run_id=run_id, watcher=watcher
        )
    if isinstance(opened, opening.Nothing):
        return report_nothing(engine, opened, as_json=as_json)
    return run_session(engine, opened, as_json=as_json)


def _detach(
    plan: Path, name: str, overrides: tuple[str, ...], *, fresh: bool, run_id: str | None, as_json: bool
) -> int:
    """The same command in a session of its own; its words go into the state folder."""
    _, home, _ = state()
    log = home / "supervisor.log"
    command = [sys.executable, "-m", "orchestrator.cli", "start", str(plan.absolute())]
    command += [*(["--fresh"] if fresh else []), *(["--run", run_id] if run_id else [])]
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
        if child.returncode:
            raise KgorchError(said.removeprefix("error: ") or f"the supervisor ended with {child.returncode}")
        if not as_json:
            click.echo(said)
            return 0
    if as_json:
        from orchestrator.cli.status import print_status

        print_status(name, as_json=True)
    else:
        click.echo(f"supervising from the background as pid {child.pid}; its words go to {log}")
        click.echo("next: kgorch status --watch, kgorch logs -f, kgorch stop")
    return 0
