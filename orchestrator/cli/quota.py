"""kgorch quota"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, state
from orchestrator.cli.usage import Group
from orchestrator.errors import NotFound, nearest

if TYPE_CHECKING:
    from sqlalchemy import Engine

WIDTH = 40
USED, RESERVED, FREE = "█", "▒", "░"


class _Quota(Group):
    """`kgorch quota POOL` shows that pool; a pool cannot be named `set`."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["set"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "--json":
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group("quota", cls=_Quota, invoke_without_command=True, subcommand_metavar="[POOL] [--json] | set …")
@click.pass_context
def command(ctx: click.Context) -> int | None:
    """The accelerator hours of each pool: used, reserved, left, when there are more, what the runs still need.

    Sessions are charged as they run, against the hours of their plan's [quota], else of the platform.

    \b
    Example:
      kgorch quota
      kgorch quota set --used 12.5h
    """
    return ctx.invoke(show) if ctx.invoked_subcommand is None else None


@command.command("show", hidden=True)
@click.argument("pool", required=False)
@json_option
def show(pool: str | None = None, as_json: bool = False) -> int:
    """The hours of POOL, or of all.

    \b
    Example:
      kgorch quota kaggle --json
    """
    from orchestrator.report import quota_view

    profile, _, engine = state()
    known = _known(engine, pool) if pool else None
    found = [item for item in quota_view.everyone(engine) if known in (None, item["pool"])]
    if as_json:
        render.as_json(found)
    elif not found:
        render.echo("no hours are counted yet: no session has run whose plan has [quota] hours")
        if profile.quota_hours:
            counted = f"{render.duration(3600 * profile.quota_hours)} are counted here by themselves ({profile.name})"
            render.echo(f"{counted}, and only while a session has an accelerator")
    else:
        _print(found)
    return 0


@command.command("set")
@click.option(
    "--used", required=True, metavar="DURATION", help='What was used of this window, as "12.5h" or "12h 30m".'
)
@click.option("--pool", metavar="POOL", help="Which pool; needed where there are several.")
@json_option
def correct(used: str, pool: str | None, as_json: bool) -> int:
    """Correct the ledger: what was really used of this window, as the platform's own page says.

    Runs that wait for hours are looked at again.

    \b
    Example:
      kgorch quota set --used 12.5h
    """
    from orchestrator.limits import quota_pools
    from orchestrator.plan import parse_duration_s
    from orchestrator.report import quota_view

    try:
        told_s = float(parse_duration_s(used))
    except ValueError as error:
        raise click.BadParameter(f"{error}; found {used!r}", param_hint="--used") from None
    _, _, engine = state()
    name = _known(engine, pool)
    made = quota_pools.correct(engine, name, told_s)
    found = next(item for item in quota_view.everyone(engine) if item["pool"] == name)
    if as_json:
        render.as_json(found | made)
        return 0
    render.echo(f"{name}: {render.duration(told_s)} used; the charges had said {render.duration(made['computed_s'])}")
    _print([found])
    if made["resumed"]:
        render.echo(f"{made['resumed']} that waited for hours may go on now\nnext: kgorch resume")
    return 0


def _known(engine: Engine, pool: str | None) -> str:
    """Raises: NotFound."""
    from db import charges

    known = charges.pools(engine)
    if pool in known:
        return str(pool)
    if pool is None and len(known) == 1:
        return known[0]
    names = f"pools: {', '.join(known) or 'none; one is there once a session has run under its quota'}"
    if pool is None:
        raise NotFound("which pool?", names, next_step="kgorch quota set --used 12.5h --pool POOL")
    raise NotFound(f"there is no pool {pool!r}{nearest(pool, known)}", names)


def _print(found: list[dict[str, Any]]) -> None:
    for item in found:
        render.echo(f"{item['pool']:<12} {_bar(item)}{render.quota(item)}")
        for line in _details(item):
            render.echo(f"{'':<12} {line}")


def _bar(item: dict[str, Any]) -> str:
    """Only on a terminal: a pipe wants words."""
    if item["hours"] is None or not render.is_terminal(sys.stdout):
        return ""
    per_s = WIDTH / (3600 * item["hours"])
    used = min(WIDTH, round(item["used_s"] * per_s))
    reserved = min(WIDTH - used, round(item["reserve_s"] * per_s))
    return f"{USED * used}{FREE * (WIDTH - used - reserved)}{RESERVED * reserved}  "


def _details(item: dict[str, Any]) -> list[str]:
    needs, lines = item["needs"], []
    if item["hours"] is not None:
        reserve = f", {render.duration(item['reserve_s'])} kept in reserve" if item["reserve_s"] else ""
        lines.append(f"{render.duration(item['used_s'])} used{reserve}, {_resets(item)}")
    lines += [f"spent by {one['run']}, session {one['number']}, {one['factor']:g}-fold" for one in item["sessions"]]
    if needs["runs"]:
        rest = needs["runs"] - needs["known"]
        unknown = f", and {rest} of which it is not known yet" if rest else ""
        still = (
            f"{needs['known']} run(s) still need {render.duration(needs['still_s'])}"
            if needs["known"]
            else "still needed: not known"
        )
        lines.append(f"{still}{unknown if needs['known'] else ''}")
    return lines


def _resets(item: dict[str, Any]) -> str:
    if item["resets_at"]:
        return f"renewed at {render.clock(item['resets_at'])} local time ({item['resets']})"
    return "not renewed" if item["resets"] == "never" else f"renewed as use leaves the window ({item['resets']})"
