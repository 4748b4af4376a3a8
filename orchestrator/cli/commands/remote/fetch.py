"""kgorch remote fetch"""

from __future__ import annotations

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument


@click.command("fetch")
@run_argument
@click.option("--all", "everything", is_flag=True, help="All files of the session's output.")
@click.option("--accept-plan", is_flag=True, help="Trust arguments that the memory ladder has changed there.")
@json_option
def command(run: str | None, everything: bool, accept_plan: bool, as_json: bool) -> int:
    """Fetch what RUN has reached at its place: the newest and the best checkpoint, its outputs and its history.

    What comes is verified and imported, so that kgorch checkpoints, history and export work here, and kgorch start continues
    the run on this machine.

    \b
    Example:
      kgorch remote fetch surface-demo
    """
    from kgorch.admission.requests import Consent, LocalState
    from kgorch.cli.display.import_progress import ImportProgress
    from kgorch.cli.remote_errors import place_errors
    from kgorch.remote import fetch, remote_run
    from kgorch.remote.places.registry import open_place
    from kgorch.system import process_protection

    process_protection.protect()
    profile, home, engine = open_state()
    found = remote_run.load(find_run(engine, run))
    place = open_place(found.settings.place, home)
    state = LocalState(engine, home, profile)
    try:
        with place_errors(place.name), ImportProgress() as watcher:
            result = fetch.fetch(state, found, place, watcher, Consent(plan=accept_plan), everything=everything)
    finally:
        place.close()
    row = result.session
    if as_json:
        step = {"stage": row.stage, "step": row.reached_step}
        render.as_json(
            {"run": found.run.name, "session": row.number, "folder": str(result.folder), "files": result.files} | step
        )
        return 0
    name = found.run.name
    render.echo(f"{name}: step {row.reached_step} of {row.stage} is here; {result.files} files in {result.folder}")
    render.echo(f"next: kgorch checkpoints export {name} model.safetensors")
    return 0
