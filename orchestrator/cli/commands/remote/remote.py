"""kgorch remote check | start | fetch"""

from __future__ import annotations

import click

from kgorch.cli.commands.remote import check, fetch, start, visit
from kgorch.cli.usage import Group


@click.group("remote", cls=Group)
def command() -> None:
    """Run the sessions of a plan at another place, one after the other until the run is finished.

    The plan's [remote] names the place, or --on: kaggle, or local (processes of this machine, to try it without an account).
    status, logs, queue, quota, history, stop and rm know such runs, too.

    \b
    Example:
      kgorch remote check plan.toml --on local
      kgorch remote start plan.toml --on local --foreground
    """


for verb in (check.command, start.command, fetch.command, visit.command):
    command.add_command(verb)
