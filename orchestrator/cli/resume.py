"""kgorch resume"""

from __future__ import annotations

from datetime import datetime

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, run_argument, state, until_option
from orchestrator.cli.foreground import Copying, report_nothing, run_session
from orchestrator.cli.progress import progress_option


@click.command("resume")
@run_argument
@click.option(
    "--accept-plan", is_flag=True, help="Trust the plan of a run that is found in a source: it decides what runs."
)
@click.option("--claimed", hidden=True, help="The daemon's claim of the run's place in the queue.")
@until_option
@progress_option
@json_option
def command(
    run: str | None, accept_plan: bool, claimed: str | None, until: datetime | None, progress: str, as_json: bool
) -> int:
    """Go on with RUN, or with the newest run that is not finished, by the plan that it keeps.

    A RUN that is not known here is looked for where the platform puts the state of earlier sessions.
    With nothing to do it says so and exits 0.

    \b
    Example:
      kgorch resume surface-demo
    """
    from orchestrator.admission import resolve_run, session_start
    from orchestrator.admission.requests import Consent, LocalState
    from orchestrator.system import process_protection

    process_protection.protect()
    profile, home, engine = state()
    with Copying() as watcher:
        if run and claimed:
            from orchestrator.scheduler import claimed_resume

            opened = claimed_resume.resume(engine, home, profile, run, claimed, watcher)
        else:
            opened = session_start.resume(
                LocalState(engine, home, profile), run, watcher=watcher, until=until, consent=Consent(plan=accept_plan)
            )
    if opened is None:
        render.echo("null" if as_json else "there is no run to go on with")
        return 0
    if isinstance(opened, resolve_run.Nothing):
        return report_nothing(engine, opened, as_json=as_json)
    return run_session(engine, opened, as_json=as_json, progress=progress)
