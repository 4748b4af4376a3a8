"""kgorch prometheus"""

from __future__ import annotations

import time
from pathlib import Path

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import open_state

MIN_EVERY_S = 1.0


@click.command("prometheus")
@click.option(
    "--serve", "port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve http://127.0.0.1:PORT/metrics."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve at.")
@click.option(
    "--textfile",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.prom",
    help="Write a file for node_exporter's textfile collector.",
)
@click.option(
    "--every", "every_s", type=click.FloatRange(MIN_EVERY_S), metavar="SECONDS", help="Write the file again and again."
)
def command(port: int | None, host: str, textfile: Path | None, every_s: float | None) -> int:
    """Print the state of runs, quotas, queue and GPUs for Prometheus; with --serve or --textfile, offer it there.

    Reads the database alone, so it works without a daemon and a supervisor. docs/prometheus.md has the metrics, alert rules and
    a Grafana dashboard.

    \b
    Example:
      kgorch prometheus --textfile kgorch.prom
    """
    if port is not None and textfile:
        raise click.UsageError("--serve and --textfile exclude each other: give one of them")
    if every_s and not textfile:
        raise click.UsageError("--every writes a file again: give --textfile, too")
    from kgorch.cli.exposition import Exposition

    _, home, _ = open_state()
    exposition = Exposition(home)
    if port is not None:
        return exposition.serve(host, port, lambda line: render.echo(line, err=True))
    if textfile is None:
        render.echo(exposition.text(), nl=False)
        return 0
    while True:
        exposition.write(textfile)
        if not every_s:
            return 0
        time.sleep(every_s)
