"""kgorch help"""

from __future__ import annotations

import click

from kgorch.cli.display import render
from kgorch.cli.usage import UnknownVerb


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
    """Show what VERB does and its options, as `kgorch VERB --help` does; without VERB, list all verbs.

    \b
    Example:
      kgorch help checkpoints export
    """
    level = ctx.find_root()
    for word in verb:
        group = level.command if isinstance(level.command, click.Group) else None
        child = group.get_command(level, word) if group else None
        if child is None:
            raise UnknownVerb(word, group.list_commands(level) if group else [], level)
        level = click.Context(child, info_name=word, parent=level)
    render.echo(level.get_help())
    return 0
