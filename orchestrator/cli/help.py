"""kgorch help"""

from __future__ import annotations

import click

from orchestrator.cli import render
from orchestrator.cli.usage import UnknownVerb


def _verbs(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    command: click.Command | None = ctx.find_root().command
    for word in ctx.params.get(parameter.name or "") or ():
        command = command.get_command(ctx, word) if isinstance(command, click.Group) else None
    names = command.list_commands(ctx) if isinstance(command, click.Group) else []
    return [name for name in names if name.startswith(typed)]


@click.command("help")
@click.argument("verb", nargs=-1, shell_complete=_verbs)
@click.pass_context
def command(ctx: click.Context, verb: tuple[str, ...]) -> int:
    """What VERB does and which options it takes, as `kgorch VERB --help`; without VERB, all of them.

    \b
    Example:
      kgorch help checkpoints export
    """
    at = ctx.find_root()
    for word in verb:
        known = at.command.list_commands(at) if isinstance(at.command, click.Group) else []
        found = at.command.get_command(at, word) if isinstance(at.command, click.Group) else None
        if found is None:
            raise UnknownVerb(word, known, at)
        at = click.Context(found, info_name=word, parent=at)
    render.echo(at.get_help())
    return 0
