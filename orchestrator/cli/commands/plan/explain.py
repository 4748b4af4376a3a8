"""kgorch explain"""

from __future__ import annotations

import shutil
import textwrap

import click

from kgorch.cli import template
from kgorch.cli.completion import plan_keys
from kgorch.cli.display import render
from kgorch.errors import NotFound, nearest


@click.command("explain")
@click.argument("key", required=False, metavar="[KEY]", shell_complete=plan_keys)
def command(key: str | None) -> int:
    """Explain a key of the plan, with an example; without KEY, list all keys.

    \b
    Example:
      kgorch explain checkpoint.keep
    """
    if key is None:
        for name in _all_keys():
            render.echo(name)
        render.echo("next: kgorch explain KEY, or kgorch init --print for all of them", err=True)
        return 0
    for number, name in enumerate(_matches(key.strip("[]").strip("."))):
        if number:
            render.echo()
        _print(name)
    return 0


def _all_keys() -> list[str]:
    """All keys that a plan may have, dotted."""
    from kgorch.plan import Plan, dotted_keys

    return list(dotted_keys(Plan))


def _matches(key: str) -> list[str]:
    """The key, without the name of a stage in it; or all keys that end in this name. Raises: NotFound."""
    keys = _all_keys()
    parts = key.split(".")
    without_stage = ".".join([parts[0], *parts[2:]]) if parts[0] == "stage" and len(parts) > 2 else key
    for name in (key, without_stage):
        if name in keys:
            return [name]
        # the user chooses the names in these tables, so the table itself is explained
        if any(name.startswith(f"{above}.") for above in ("stage.args", "checkpoint.mirror_options")):
            return [name.partition(".")[0] + "." + name.split(".")[1]]
    if same_end := [name for name in keys if name.split(".")[-1] == key]:
        return same_end
    same_last = [name for name in keys if name.split(".")[-1] == parts[-1]]
    near = f" (did you mean '{same_last[0]}'?)" if same_last else nearest(key, keys)
    raise NotFound(f"a plan has no key {key[:200]!r}{near}", next_step="kgorch explain    (lists the keys)")


def _print(key: str) -> None:
    width = min(shutil.get_terminal_size().columns, 100)
    entries = template.help_for(key)
    render.echo(key)
    for entry in entries:
        if entry.example:
            render.echo(textwrap.fill(entry.example, width, initial_indent="  ", subsequent_indent="    "))
        else:
            render.echo("  [[stage]]" if entry.key == "stage" else f"  [{entry.key}]")
        if entry.text:
            indent = "      " if entry.example else "  "
            render.echo(textwrap.fill(entry.text, width, initial_indent=indent, subsequent_indent=indent))
    inside = [name for name in _all_keys() if name.startswith(f"{key}.")]
    if inside and not any(entry.key in inside for entry in entries):
        names = ", ".join(name.removeprefix(f"{key}.") for name in inside)
        render.echo(textwrap.fill(f"keys in it: {names}", width, initial_indent="  ", subsequent_indent="  "))
