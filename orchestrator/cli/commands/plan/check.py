"""kgorch check"""

from __future__ import annotations

from pathlib import Path

import click

from kgorch.cli import plan_check
from kgorch.cli.display import check_tables, render
from kgorch.cli.options import json_option, plan_argument, set_option
from kgorch.core.codes import Fit
from kgorch.errors import ExitCode


def _parse_memory(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> int | None:
    if typed is None:
        return None
    from kgorch.core.memory.memory_fit import CONTEXT
    from kgorch.plan import parse_size_bytes

    try:
        count = int(parse_size_bytes(typed))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if count <= CONTEXT:
        raise click.BadParameter(
            f"{count} bytes are less than the CUDA context needs ({render.size(CONTEXT)}); for example 15GiB"
        )
    return count


@click.command("check")
@plan_argument
@set_option
@click.option(
    "--device-memory",
    metavar="SIZE",
    callback=_parse_memory,
    help="Memory of each GPU of the machine that will train: 15GiB (default: of this one).",
)
@click.option(
    "--on",
    "machine",
    metavar="MACHINE",
    help="Estimate PLAN for another machine (t4, t4x2, p100) without training steps.",
)
@click.option(
    "--assume",
    "assumptions",
    multiple=True,
    metavar="[STAGE.]NAME=VALUE",
    help="With --on: a value to assume: epoch=35m, evaluation=7m, samples=1000, compute=0.3.",
)
@click.option("--no-probe", is_flag=True, help="Look at the machine only; train no steps.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report to this file.")
@json_option
def command(
    plan: Path, overrides: tuple[str, ...], device_memory: int | None, machine: str | None, assumptions: tuple[str, ...],
    no_probe: bool, html: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """Test whether PLAN runs on this machine and fits in memory, and estimate its time, before GPU hours are spent.

    Checks the machine, then trains a few steps of each stage in separate processes, measures memory with several
    microbatches, and forecasts the sessions. No run is changed. A small plan takes a minute.

    Exit codes: 0 it fits, perhaps with other settings than the plan's; 20 it does not run or does not fit; 2 a mistake in
    the plan.

    \b
    Example:
      kgorch check plan.toml --device-memory 15GiB --set session.wall=9h
      kgorch check plan.toml --on t4x2 --assume samples=1000
    """
    if machine and (device_memory or no_probe):
        raise click.UsageError("--on includes the memory of its machine: leave out --device-memory and --no-probe")
    if assumptions and not machine:
        raise click.UsageError("--assume needs --on MACHINE")
    if html:
        check_tables.check_writable(html)
    if machine:
        result = plan_check.estimate_on(plan, overrides, machine, assumptions)
    else:
        result = plan_check.measure(plan, overrides, device_memory, probes=not no_probe)
    if html:
        check_tables.write_html(html, result)
    if as_json:
        render.as_json(result)
    else:
        for table in check_tables.tables(result):
            render.echo(f"\n{table.title}")
            render.table(table.head, table.rows)
        render.echo(f"\n{render.words(result['verdict'])}: {result['why']}")
        if html:
            render.echo(f"wrote {html}", err=True)
    return int(ExitCode.FAILED) if result["verdict"] in (Fit.DOES_NOT_FIT, Fit.DOES_NOT_RUN) else 0
