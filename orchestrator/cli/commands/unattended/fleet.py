"""kgorch fleet"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state
from kgorch.cli.options import json_option

if TYPE_CHECKING:
    from kgorch.report.json_fields import View

NO_FLEET = "this machine belongs to no fleet: its database is the SQLite file of its state folder\nnext: docs/fleet.md"


@click.command("fleet")
@json_option
def command(as_json: bool) -> int:
    """List the machines that share this one's database: their GPUs, and who runs what.

    Machines share a PostgreSQL where KGORCH_DATABASE, or [fleet] of the configuration, names one. A machine is "not seen" when
    neither its daemon nor a supervisor there has written for a lease (fleet.lease, five minutes by default).

    \b
    Example:
      kgorch fleet
    """
    from kgorch.report import fleet_view

    _, _, engine = open_state()
    view = fleet_view.view(engine)
    if as_json:
        render.as_json(view)
        return 0
    if view is None:
        render.echo(NO_FLEET)
        return 0
    render.echo(f"{view['database']}: {view['due']} due of {view['waiting']} in the queue")
    rows = [
        [
            str(machine["name"]) + (" (this one)" if machine["name"] == view["machine"] else ""),
            "alive" if machine["alive"] else f"not seen, last {render.ago(machine['seen_at'])}",
            render.printable(_gpus(machine["gpus"])),
            render.printable(", ".join(_session(session) for session in machine["sessions"]) or "nothing"),
        ]
        for machine in view["machines"]
    ]
    render.table(["machine", "state", "GPUs", "runs"], rows)
    return 0


def _gpus(models: list[str]) -> str:
    return ", ".join(f"{models.count(model)} × {model}" for model in dict.fromkeys(models)) or "none"


def _session(session: View) -> str:
    text = f"{session['run']} ({session['stage'] or session['phase']} {session['step']}/{session['steps_total']})"
    return text if session["leased"] else f"{text}, not heard of"
