"""kgorch metrics"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from orchestrator.cli import render
from orchestrator.cli.common import find_run, json_option, run_argument, state
from orchestrator.errors import KgorchError, NotFound, nearest

if TYPE_CHECKING:
    from db.records import RunInfo
    from orchestrator.report.metrics import Curve


def _complete_name(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    try:
        from orchestrator.report import metrics

        _, _, engine = state()
        names = metrics.of_run(engine, find_run(engine, ctx.params.get("run"))).names
        return [name for name in names if name.startswith(typed)]
    except Exception:  # completion never disturbs a shell
        return []


@click.command("metrics")
@run_argument
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one row a step.")
@click.option("--plot", is_flag=True, help="Draw the metrics with letters (needs kgorch[plot]).")
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
    help="What --plot draws over.",
)  # fmt: skip
def command(
    run: str | None, as_json: bool, as_csv: bool, plot: bool, names: tuple[str, ...], stage: str | None, axis: str
) -> int:
    """What RUN has reported, over all its sessions: the last and the best value of each metric.

    Values that a step reports are averaged over a few seconds. Values that are reported between two epochs are exact.

    \b
    Example:
      kgorch metrics surface-demo --name loss --csv > loss.csv
    """
    if as_json + as_csv + plot > 1:
        raise KgorchError("--json, --csv and --plot exclude each other", next_step="give one of them")
    from orchestrator.report import metrics

    _, _, engine = state()
    found_run = find_run(engine, run)
    found = _chosen(found_run, metrics.of_run(engine, found_run), names, stage)
    if as_json:
        render.as_json(metrics.as_json(found_run, found))
    elif as_csv:
        _print_csv(found)
    elif plot:
        from orchestrator.cli import plot as drawing

        drawing.draw(found, axis)
    else:
        _print_table(found)
    return 0


def _chosen(run: RunInfo, found: Curve, names: tuple[str, ...], stage: str | None) -> Curve:
    """Raises: NotFound for a stage or a metric that the run does not have."""
    if stage is not None and stage not in found.stages:
        known = list(found.stages)
        raise NotFound(
            f"{run.name} has no metrics of a stage {stage!r}{nearest(stage, known)}", *_known("stages", known)
        )
    of_stage = found.only(stage=stage)
    for name in names:
        if name not in of_stage.names:
            raise NotFound(
                f"{run.name} has no metric {name!r}{nearest(name, of_stage.names)}",
                *_known("reported were", of_stage.names),
            )
    return of_stage.only(names=names)


def _known(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(names[:20])}{' and more' if len(names) > 20 else ''}" if names else f"{what}: none"]


def _print_csv(found: Curve) -> None:
    import csv

    from orchestrator.report import metrics

    head, rows = metrics.as_rows(found)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([render.printable(str(name)) for name in head])
    writer.writerows(rows)


def _print_table(found: Curve) -> None:
    from orchestrator.report import metrics

    entries = metrics.table(found)
    if not entries and render.is_terminal(sys.stdout):
        render.echo("nothing was reported yet: session.report(loss=loss) in the training script does", err=True)
    rows = [
        [
            item["stage"],
            item["name"],
            _shown(item["last"]),
            str(item["last_step"]),
            _shown(item["best"]),
            str(item["best_step"]),
            item["mode"],
            str(item["values"]),
        ]
        for item in entries
    ]
    render.table(["stage", "metric", "last", "at step", "best", "at step", "best is", "values"], rows)


def _shown(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
