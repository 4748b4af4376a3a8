"""kgorch version"""

from __future__ import annotations

import platform
from importlib import metadata

import click

from orchestrator import __version__
from orchestrator.cli import render
from orchestrator.cli.common import json_option


@click.command("version")
@json_option
def command(as_json: bool) -> int:
    """Which kgorch, Python and PyTorch these are: what a report of a bug should name.

    \b
    Example:
      kgorch version
    """
    found = {"kgorch": __version__, "python": platform.python_version(), "torch": _installed("torch")}
    if as_json:
        render.as_json(found)
    else:
        for name, version in found.items():
            render.echo(f"{name:<7} {version or 'not installed'}")
    return 0


def _installed(package: str) -> str | None:
    """Its version as the package tells it; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
