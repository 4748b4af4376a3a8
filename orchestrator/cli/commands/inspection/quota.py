"""kgorch quota"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state
from kgorch.cli.options import json_option
from kgorch.cli.usage import Group
from kgorch.errors import NotFound, nearest

if TYPE_CHECKING:
    from sqlalchemy import Engine

WIDTH = 40
USED, RESERVED, FREE = "█", "▒", "░"


class QuotaGroup(Group):
    """`kgorch quota POOL` shows that pool; so a pool cannot be named `set`."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        # click would take the name of a pool for an unknown verb
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["set"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] == "--json":
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group("quota", cls=QuotaGroup, invoke_without_command=True, subcommand_metavar="[POOL] [--json] | set …")
@click.pass_context
def command(ctx: click.Context) -> int | None:
    """Show the accelerator hours of each pool: used, reserved, left, the next renewal, and what the runs still need.

    A session is charged while it runs, to the [quota] of its plan, else to the quota of the platform.

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
    """Show the hours of POOL (default: of all pools).

    \b
    Example:
      kgorch quota kaggle --json
    """
    from kgorch.report import quota_view

    profile, _, engine = open_state()
    name = _pool_name(engine, pool) if pool else None
    pools = [item for item in quota_view.all_pools(engine) if name in (None, item["pool"])]
    if as_json:
        render.as_json(pools)
    elif not pools:
        render.echo("no hours are counted yet: no session has run whose plan has [quota] hours")
        if profile.quota_hours:
            hours = render.duration(3600 * profile.quota_hours)
            render.echo(
                f"the platform's quota of {hours} ({profile.name}) is counted while a session has an accelerator"
            )
    else:
        _print(pools)
    return 0


@command.command("set")
@click.option(
    "--used", required=True, metavar="DURATION", help='Hours used since the last renewal: "12.5h" or "12h 30m".'
)
@click.option("--pool", metavar="POOL", help="Which pool; required if there are several.")
@json_option
def correct(used: str, pool: str | None, as_json: bool) -> int:
    """Correct the hours used since the last renewal to what the platform's own page shows.

    If hours are left now, the runs that wait for the quota become due.

    \b
    Example:
      kgorch quota set --used 12.5h
    """
    from kgorch.core.durations import parse_duration_s
    from kgorch.limits import quota_pools
    from kgorch.report import quota_view

    try:
        used_s = float(parse_duration_s(used))
    except ValueError as error:
        raise click.BadParameter(f"{error}; found {used!r}", param_hint="--used") from None
    _, _, engine = open_state()
    name = _pool_name(engine, pool)
    correction = quota_pools.correct(engine, name, used_s)
    view = next(item for item in quota_view.all_pools(engine) if item["pool"] == name)
    if as_json:
        render.as_json(view | correction)
        return 0
    computed = render.duration(correction["computed_s"])
    render.echo(f"{name}: {render.duration(used_s)} used; the charges had added up to {computed}")
    _print([view])
    if correction["resumed"]:
        render.echo(f"{correction['resumed']} runs that waited for the quota are due now\nnext: kgorch resume")
    return 0


def _pool_name(engine: Engine, pool: str | None) -> str:
    """The pool that was named, or the only one. Raises: NotFound."""
    from kgorch.db import charges

    pools = charges.pool_names(engine)
    if pool in pools:
        return str(pool)
    if pool is None and len(pools) == 1:
        return pools[0]
    names = f"pools: {', '.join(pools) or 'none; the first session under a quota creates its pool'}"
    if pool is None:
        raise NotFound(
            "there are several pools, and none was named",
            names,
            next_step="kgorch quota set --used 12.5h --pool POOL",
            error_code="KG302",
        )
    raise NotFound(
        f"there is no pool {pool!r}{nearest(pool, pools)}", names, next_step="kgorch quota", error_code="KG302"
    )


def _print(pools: list[dict[str, Any]]) -> None:
    for item in pools:
        render.echo(f"{item['pool']:<12} {_bar(item)}{render.quota(item)}")
        for line in _details(item):
            render.echo(f"{'':<12} {line}")


def _bar(item: dict[str, Any]) -> str:
    """Used, free and reserved hours as a bar, on a terminal only: a program that reads a pipe wants the figures."""
    if item["hours"] is None or not render.is_terminal(sys.stdout):
        return ""
    per_s = WIDTH / (3600 * item["hours"])
    used = min(WIDTH, round(item["used_s"] * per_s))
    reserved = min(WIDTH - used, round(item["reserve_s"] * per_s))
    return f"{USED * used}{FREE * (WIDTH - used - reserved)}{RESERVED * reserved}  "


def _details(item: dict[str, Any]) -> list[str]:
    needs, lines = item["needs"], []
    if item["hours"] is not None:
        reserve = f", {render.duration(item['reserve_s'])} reserved" if item["reserve_s"] else ""
        lines.append(f"{render.duration(item['used_s'])} used{reserve}, {_resets(item)}")
    lines += [f"in use by {one['run']}, session {one['number']}, factor {one['factor']:g}" for one in item["sessions"]]
    if needs["runs"]:
        rest = needs["runs"] - needs["known"]
        unknown = f"; the need of {rest} more is not known yet" if rest else ""
        need = f"{needs['known']} run(s) still need {render.duration(needs['still_s'])}"
        lines.append(f"{need}{unknown}" if needs["known"] else "hours still needed: not known yet")
    return lines


def _resets(item: dict[str, Any]) -> str:
    if item["resets_at"]:
        return f"renewed at {render.clock(item['resets_at'])} local time ({item['resets']})"
    return (
        "never renewed"
        if item["resets"] == "never"
        else f"renewed when use leaves the rolling window ({item['resets']})"
    )
