"""kgorch metrics"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, run_argument
from kgorch.errors import KgorchError

if TYPE_CHECKING:
    from kgorch.report.metrics import RunMetrics


def _complete_name(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    try:
        from kgorch.report import metrics

        _, _, engine = open_state()
        names = metrics.of_run(engine, find_run(engine, ctx.params.get("run"))).names
        return [name for name in names if name.startswith(typed)]
    except Exception:  # completion never disturbs a shell
        return []


@click.command("metrics")
@run_argument
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one row a step.")
@click.option(
    "--parquet", metavar="FILE", type=click.Path(path_type=Path), help="Write a Parquet file (needs kgorch[parquet])."
)
@click.option("--plot", is_flag=True, help="Plot the metrics in the terminal (needs kgorch[plot]).")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="METRIC",
    shell_complete=_complete_name,
    help="Only this metric; may be repeated.",
)
@click.option("--stage", metavar="STAGE", help="Only this stage.")
@click.option(
    "--x", "axis", type=click.Choice(("step", "epoch", "hours")), default="step", show_default=True,
    help="The x axis of --plot.",
)  # fmt: skip
def command(
    run: str | None,
    as_json: bool,
    as_csv: bool,
    parquet: Path | None,
    plot: bool,
    names: tuple[str, ...],
    stage: str | None,
    axis: str,
) -> int:
    """Show the metrics that RUN reported, over all its sessions: the last and the best value of each.

    A value that is reported in a step is averaged over a few seconds; one that is reported between epochs is exact.

    \b
    Example:
      kgorch metrics surface-demo --name loss --csv > loss.csv
      kgorch metrics surface-demo --parquet metrics.parquet
    """
    if as_json + as_csv + plot + (parquet is not None) > 1:
        raise KgorchError("--json, --csv, --parquet and --plot exclude each other", next_step="give one of them")
    from kgorch.report import metrics

    _, _, engine = open_state()
    info = find_run(engine, run)
    curve = metrics.select(info, metrics.of_run(engine, info), names, stage)
    if as_json:
        render.as_json(metrics.as_json(info, curve))
    elif as_csv:
        _print_csv(curve)
    elif parquet:
        from kgorch.report import metrics_file

        rows = metrics_file.write_parquet(parquet, info, curve)
        render.echo(f"{parquet}: {rows} rows", err=True)
    elif plot:
        from kgorch.cli.display import plot as drawing

        drawing.draw(curve, axis)
    else:
        _print_table(curve)
    return 0


def _print_csv(curve: RunMetrics) -> None:
    import csv

    from kgorch.report import metrics

    head, rows = metrics.as_rows(curve)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([render.printable(str(name)) for name in head])
    writer.writerows(rows)


def _print_table(curve: RunMetrics) -> None:
    from kgorch.report import metrics

    entries = metrics.table(curve)
    if not entries:
        how = "session.report(loss=loss), accelerator.log() or the log of a Trainer; of other programs, stage.foreign.metrics"
        render.echo(f"no metrics were reported. What reports them: {how}", err=True)
    rows = [
        [
            item["stage"],
            item["name"],
            _number(item["last"]),
            str(item["last_step"]),
            *((_number(item["best"]), str(item["best_step"]), item["mode"]) if item["is_judged"] else ("", "", "")),
            str(item["values"]),
        ]
        for item in entries
    ]
    render.table(["stage", "metric", "last", "at step", "best", "at step", "best is", "values"], rows)
    if render.is_terminal(sys.stdout) and any(point.steps for _, point in curve.points()):
        render.echo("values of steps are means over some seconds; --json tells over how many steps each is", err=True)


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
