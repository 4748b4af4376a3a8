"""kgorch remote visit: what the daemon starts for a run that is due."""

from __future__ import annotations

import click

from kgorch.cli.lookup import open_state


@click.command("visit", hidden=True)
@click.argument("run_id")
def command(run_id: str) -> int:
    """Do what is due for a run at another place, and end."""
    from kgorch.db import runs
    from kgorch.errors import NotFound
    from kgorch.remote import remote_run
    from kgorch.remote.places.registry import open_place
    from kgorch.system import process_protection

    process_protection.protect()
    _, home, engine = open_state()
    run = runs.by_id(engine, run_id)
    if run is None:
        raise NotFound(f"there is no run {run_id!r:.80}")
    found = remote_run.load(run)
    place = open_place(found.settings.place, home)
    try:
        remote_run.visit(engine, found, place)
    finally:
        place.close()
    return 0
