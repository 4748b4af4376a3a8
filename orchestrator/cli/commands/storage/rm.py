"""kgorch rm"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli import completion
from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from kgorch.admission.removal import Removal


@click.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=completion.runs)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--checkpoints", is_flag=True, help="Also remove checkpoints in the plan's checkpoint.dir.")
@json_option
def command(runs: tuple[str, ...], dry_run: bool, yes: bool, checkpoints: bool, as_json: bool) -> int:
    """Remove each RUN with its checkpoints, outputs, logs and history; its used quota hours stay counted.

    RUN is a name, for the newest run of that name, or NAME/NUMBER. A run that trains is refused. The plan, the files of the
    training, copies in a mirror and sessions at another place are not removed.

    \b
    Example:
      kgorch rm surface-demo --dry-run
      kgorch rm surface-demo/1 surface-demo/2 --yes
    """
    from kgorch.admission import removal

    _, home, engine = open_state()
    by_id = {run.id: run for run in (find_run(engine, name) for name in runs)}  # a run may be named twice
    with contextlib.ExitStack() as locks:
        # held from before the sizes are shown until the last file is deleted: no session may start in between
        if not dry_run:
            locks.enter_context(removal.hold_locks(engine, home, list(by_id.values())))
        removals = [removal.describe(engine, home, one) for one in by_id.values()]
        if not as_json:
            for item in removals:
                _print(item, checkpoints=checkpoints)
        if dry_run:
            if as_json:
                render.as_json([_view(item, checkpoints=checkpoints, removed=False) for item in removals])
            else:
                render.echo("nothing was removed (--dry-run)")
            return 0
        _confirm(runs, yes=yes, as_json=as_json)
        undeleted = []
        for item in removals:
            undeleted += removal.remove(engine, home, item, checkpoints=checkpoints)
    if as_json:
        render.as_json([_view(item, checkpoints=checkpoints, removed=True) for item in removals])
    else:
        freed = sum(item.folder_bytes + (item.checkpoints_bytes if checkpoints else 0) for item in removals)
        render.echo(f"removed {len(removals)} run{'s' if len(removals) > 1 else ''}, {render.size(freed)}")
    if undeleted:
        raise KgorchError(
            "the runs were removed, but some of their files could not be deleted",
            *[str(path) for path in undeleted],
            next_step="delete them as a user who may; kgorch does not use them any more",
        )
    return 0


def _print(item: Removal, *, checkpoints: bool) -> None:
    run = item.run
    where = f"{item.folder}, {render.size(item.folder_bytes)}" if item.folder else "its folder does not exist"
    render.echo(render.printable(f"{run.name}/{run.number}  {run.state}, {where}"))
    if item.is_queued:
        render.echo("  is removed from the queue")
    for url in item.remote:
        render.echo(render.printable(f"  stays there: {url}"))
    if item.checkpoints:
        action = "removed, too" if checkpoints else "not removed; --checkpoints removes them"
        text = f"  checkpoints in {item.checkpoints}, {render.size(item.checkpoints_bytes)}: {action}"
        render.echo(render.printable(text))


def _confirm(names: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Raises: KgorchError without a terminal to ask on; click.exceptions.Exit when the user says no."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise KgorchError(
            "removing cannot be undone, and there is no terminal to ask for confirmation",
            next_step=f"kgorch rm {' '.join(names)} --yes",
        )
    if not click.confirm("Remove this? It cannot be undone"):
        render.echo("nothing was removed")
        raise click.exceptions.Exit(0)


def _view(item: Removal, *, checkpoints: bool, removed: bool) -> dict[str, Any]:
    return {
        "run": item.run.name,
        "run_number": item.run.number,
        "state": item.run.state,
        "folder": str(item.folder) if item.folder else None,
        "bytes": item.folder_bytes,
        "checkpoints": {
            "path": str(item.checkpoints),
            "bytes": item.checkpoints_bytes,
            "removed": removed and checkpoints,
        }
        if item.checkpoints
        else None,
        "queued": item.is_queued,
        "remote": list(item.remote),
        "removed": removed,
    }
