"""kgorch init"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from orchestrator.errors import KgorchError


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default="plan.toml")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def command(path: Path, force: bool) -> int:
    """Write a plan with every key explained, to be edited.

    \b
    Example:
      kgorch init && kgorch start plan.toml
    """
    if path.exists() and not force:
        raise KgorchError(f"{path} is there already", next_step=f"kgorch init {path} --force writes over it")
    try:
        path.write_text(resources.files("orchestrator.cli").joinpath("template.toml").read_text())
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error)) from None
    click.echo(f"{path} is written; edit its stages, then: kgorch start {path}")
    return 0
