"""kgorch explain"""

from __future__ import annotations

import re
import shutil
import textwrap

import click

from kgorch.cli import error_help, template
from kgorch.cli.completion import keys_and_codes
from kgorch.cli.display import render
from kgorch.errors import NotFound, nearest


@click.command("explain")
@click.argument("key", required=False, metavar="[KEY|CODE]", shell_complete=keys_and_codes)
def command(key: str | None) -> int:
    """Explain a key of the plan, or the code of an error; without KEY, list all keys.

    \b
    Example:
      kgorch explain checkpoint.keep
      kgorch explain KG203
      kgorch explain codes       list the codes of all errors
    """
    if key is None:
        for name in _all_keys():
            render.echo(name)
        render.echo("next: kgorch explain KEY, or kgorch init --print for all of them", err=True)
        render.echo("next: kgorch explain codes    (lists the codes of errors)", err=True)
        return 0
    if key.lower() == "codes":
        for code, topic in error_help.topics().items():
            render.echo(f"{code}  {topic.title}")
        return 0
    if re.fullmatch(r"\[?kg-?\d{1,9}\]?", key, re.IGNORECASE):
        _print_topic("KG" + re.sub(r"\D", "", key))
        return 0
    for number, name in enumerate(_matches(key.strip("[]").strip("."))):
        if number:
            render.echo()
        _print(name)
    return 0


def _print_topic(code: str) -> None:
    """Print the text of an error code. Raises: NotFound."""
    topics = error_help.topics()
    if code not in topics:
        near = sorted(topics, key=lambda other: abs(int(other[2:]) - int(code[2:])))[:3]
        raise NotFound(
            f"there is no error code {code}",
            *(f"{other}  {topics[other].title}" for other in near),
            next_step="kgorch explain codes    (lists them)",
            error_code="KG108",
        )
    render.echo(f"{code} {topics[code].title}\n\n{topics[code].text}")


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
    raise NotFound(
        f"a plan has no key {key[:200]!r}{near}", next_step="kgorch explain    (lists the keys)", error_code="KG101"
    )


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
