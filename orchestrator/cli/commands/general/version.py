"""kgorch version"""

from __future__ import annotations

import platform
from importlib import metadata

import click

from kgorch import __version__
from kgorch.cli.display import render
from kgorch.cli.options import json_option


@click.command("version")
@json_option
def command(as_json: bool) -> int:
    """Show the versions of kgorch, Python and PyTorch, for a bug report.

    \b
    Example:
      kgorch version
    """
    versions = {"kgorch": __version__, "python": platform.python_version(), "torch": _version("torch")}
    if as_json:
        render.as_json(versions)
    else:
        for name, version in versions.items():
            render.echo(f"{name:<7} {version or 'not installed'}")
    return 0


def _version(package: str) -> str | None:
    """From the metadata of the package: importing torch would take seconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
