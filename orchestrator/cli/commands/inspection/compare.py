"""kgorch compare"""

from __future__ import annotations

from pathlib import Path

import click

from kgorch.cli import completion
from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, output_option
from kgorch.errors import KgorchError


@click.command("compare")
@click.argument("names", nargs=-1, required=True, metavar="RUN RUN...", shell_complete=completion.runs)
@output_option("a page with the curves of all runs in common charts")
@json_option
def command(names: tuple[str, ...], output: Path | None, as_json: bool) -> int:
    """Compare runs: results, the differences of their plans, and with -o their curves. RUN is a name, or NAME/NUMBER.

    \b
    Example:
      kgorch compare surface-demo/1 surface-demo -o comparison.html
    """
    from kgorch.report import run_comparison

    if len(names) < 2 or len(names) > run_comparison.MAX_RUNS:
        raise KgorchError(
            f"expected 2 to {run_comparison.MAX_RUNS} runs, found {len(names)}",
            next_step="kgorch status --all lists them",
        )
    _, _, engine = open_state()
    comparison = run_comparison.of_runs(engine, [find_run(engine, name) for name in names])
    if as_json:
        render.as_json(comparison, output)
        return 0
    from kgorch.cli.pages import comparison_page

    if output:
        render.write_file(output, comparison_page.html(comparison))
    else:
        render.table(*comparison_page.rows(comparison))
    return 0
