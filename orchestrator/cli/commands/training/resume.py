"""kgorch resume"""

from __future__ import annotations

from datetime import datetime

import click

from kgorch.cli.display import render
from kgorch.cli.display.import_progress import ImportProgress
from kgorch.cli.display.progress import progress_option
from kgorch.cli.foreground import report_nothing, run_session
from kgorch.cli.lookup import open_state
from kgorch.cli.options import json_option, run_argument, until_option
from kgorch.core.codes import RunState


@click.command("resume")
@run_argument
@click.option(
    "--accept-plan", is_flag=True, help="Trust the plan of a run that is found in a source: it decides what code runs."
)
@click.option("--detach", is_flag=True, help="Supervise in the background; return once the session is open.")
@click.option("--claimed", hidden=True, help="The daemon's claim on the queue entry of the run.")
@until_option
@progress_option
@json_option
def command(
    run: str | None,
    accept_plan: bool,
    detach: bool,
    claimed: str | None,
    until: datetime | None,
    progress: str,
    as_json: bool,
) -> int:
    """Continue RUN by its stored plan; without RUN, the newest run that is not finished.

    A RUN that is unknown on this machine is searched for where the platform mounts the state of earlier sessions. If there is
    nothing to do, the verb says so and exits with 0. Ctrl-C saves and stops.

    \b
    Example:
      kgorch resume surface-demo
    """
    if detach:
        return _detach(run, accept_plan=accept_plan, until=until, as_json=as_json)
    from kgorch.launch import standby
    from kgorch.system import process_protection

    process_protection.protect()
    if not claimed:
        standby.prepare()  # its import of PyTorch runs beside ours; a daemon's has imported it, or is not to do so in vain
    from kgorch.admission import resolve_run, session_start
    from kgorch.admission.requests import Consent, LocalState, ResumeRequest

    profile, home, engine = open_state()
    with ImportProgress() as watcher:
        # the daemon has claimed the queue entry for this process, which takes the claim over before it starts anything
        if run and claimed:
            from kgorch.scheduler import claimed_resume

            result = claimed_resume.resume(engine, home, profile, run, claimed, watcher)
        else:
            result = session_start.resume(
                LocalState(engine, home, profile),
                ResumeRequest(run, consent=Consent(plan=accept_plan)),
                watcher=watcher,
                until=until,
            )
    if result is None:
        return _report_none(as_json)
    if isinstance(result, resolve_run.NoSession):
        return report_nothing(engine, result, as_json=as_json)
    return run_session(engine, result, as_json=as_json, progress=progress)


def _detach(run: str | None, *, accept_plan: bool, until: datetime | None, as_json: bool) -> int:
    from kgorch.cli import detached
    from kgorch.db import runs

    if run is None:  # chosen here, so that its status can be shown
        _, _, engine = open_state()
        newest = runs.newest_in_states(engine, (RunState.ACTIVE, RunState.FAILED))
        if newest is None:
            return _report_none(as_json)
        run = newest.name
    words = [*(["--accept-plan"] if accept_plan else []), *(["--until", until.isoformat()] if until else []), "--", run]
    return detached.start(words, run, as_json=as_json, verb="resume")


def _report_none(as_json: bool) -> int:
    render.echo("null" if as_json else "there is no unfinished run to continue")
    return 0
