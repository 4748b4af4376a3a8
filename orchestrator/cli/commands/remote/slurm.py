"""kgorch slurm submit"""

from __future__ import annotations

import click

from kgorch.cli.commands.remote import slurm_session, slurm_submit
from kgorch.cli.usage import Group


@click.group("slurm", cls=Group)
def command() -> None:
    """Run the sessions of a plan as jobs of a Slurm cluster, one after the other until the run is finished.

    The state folder must be on a file system that login and compute nodes share. status, logs, queue, history and stop work on
    the login node.

    \b
    Example:
      kgorch slurm submit plan.toml --gpus 4 --time 9h --dry-run
    """


for verb in (slurm_submit.command, slurm_session.command):
    command.add_command(verb)
