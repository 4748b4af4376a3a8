"""kgorch rm"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import completion, render
from orchestrator.cli.common import find_run, json_option, state
from orchestrator.errors import KgorchError

if TYPE_CHECKING:
    from orchestrator.admission.removal import Removal


@click.command("rm")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=completion.runs)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--checkpoints", is_flag=True, help="Also checkpoints that lie elsewhere (the plan's checkpoint.dir).")
@json_option
def command(runs: tuple[str, ...], dry_run: bool, yes: bool, checkpoints: bool, as_json: bool) -> int:
    """Remove each RUN with its checkpoints, outputs, logs and history; the hours that it has used stay counted.

    RUN is a name, for the newest run of that name, or NAME/NUMBER. A run that is being trained is refused. The plan and the
    training's own files stay, as do copies in a mirror.

    \b
    Example:
      kgorch rm surface-demo --dry-run
      kgorch rm surface-demo/1 surface-demo/2 --yes
    """
    from orchestrator.admission import removal

    _, home, engine = state()
    chosen = {run.id: run for run in (find_run(engine, name) for name in runs)}
    with contextlib.ExitStack() as locks:
        if not dry_run:
            locks.enter_context(removal.locked(engine, home, list(chosen.values())))
        found = [removal.look(engine, home, one) for one in chosen.values()]
        if not as_json:
            for what in found:
                _say(what, checkpoints=checkpoints)
        if dry_run:
            if as_json:
                render.as_json([_view(what, checkpoints=checkpoints, removed=False) for what in found])
            else:
                render.echo("nothing was removed (--dry-run)")
            return 0
        _ask(runs, yes=yes, as_json=as_json)
        left = []
        for what in found:
            left += removal.remove(engine, home, what, checkpoints=checkpoints)
    if as_json:
        render.as_json([_view(what, checkpoints=checkpoints, removed=True) for what in found])
    else:
        freed = sum(what.folder_bytes + (what.checkpoints_bytes if checkpoints else 0) for what in found)
        render.echo(f"removed {len(found)} run{'s' if len(found) > 1 else ''}, {render.size(freed)}")
    if left:
        raise KgorchError(
            "the runs are removed, and some of their files could not be deleted",
            *[str(path) for path in left],
            next_step="delete them as somebody who may; kgorch does not look at them again",
        )
    return 0


def _say(what: Removal, *, checkpoints: bool) -> None:
    run = what.run
    where = f"{what.folder}, {render.size(what.folder_bytes)}" if what.folder else "its folder is gone already"
    render.echo(render.printable(f"{run.name}/{run.number}  {run.state}, {where}"))
    if what.waits:
        render.echo("  leaves the queue")
    if what.checkpoints:
        kept = "go, too" if checkpoints else "stay; --checkpoints removes them"
        text = f"  checkpoints in {what.checkpoints}, {render.size(what.checkpoints_bytes)}: {kept}"
        render.echo(render.printable(text))


def _ask(names: tuple[str, ...], *, yes: bool, as_json: bool) -> None:
    """Raises: KgorchError where nobody can answer, click.Abort for no."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise KgorchError(
            "removing cannot be undone, and nobody is here to be asked", next_step=f"kgorch rm {' '.join(names)} --yes"
        )
    if not click.confirm("Remove this? It cannot be undone"):
        render.echo("nothing was removed")
        raise click.exceptions.Exit(0)


def _view(what: Removal, *, checkpoints: bool, removed: bool) -> dict[str, Any]:
    return {
        "run": what.run.name,
        "run_number": what.run.number,
        "state": what.run.state,
        "folder": str(what.folder) if what.folder else None,
        "bytes": what.folder_bytes,
        "checkpoints": {
            "path": str(what.checkpoints),
            "bytes": what.checkpoints_bytes,
            "removed": removed and checkpoints,
        }
        if what.checkpoints
        else None,
        "queued": what.waits,
        "removed": removed,
    }
