"""kgorch report"""

from __future__ import annotations

from pathlib import Path

import click

from kgorch.cli.display import render
from kgorch.cli.lookup import find_run, open_state
from kgorch.cli.options import json_option, output_option, run_argument
from kgorch.errors import KgorchError


@click.command("report")
@run_argument
@output_option("report.html")
@click.option("--md", "as_markdown", is_flag=True, help="Print Markdown, for a pull request.")
@json_option
def command(run: str | None, output: Path | None, as_markdown: bool, as_json: bool) -> int:
    """Write a report of RUN (default: the newest run): what was trained, its curves, sessions and problems.

    The report is one HTML file that needs no network and no script; it prints as PDF. It can be written at any time, with or
    without a supervisor.

    \b
    Example:
      kgorch report surface-demo -o report.html
    """
    if as_markdown and as_json:
        raise KgorchError("--md and --json exclude each other", next_step="give one of them")
    from kgorch.report import run_report

    _, _, engine = open_state()
    info = find_run(engine, run)
    report = run_report.of_run(engine, info)
    if as_json:
        render.as_json(report, output)
        return 0
    from kgorch.cli.pages import report_page

    if as_markdown and output is None:
        render.echo(report_page.markdown(report), nl=False)
        return 0
    page = report_page.markdown(report) if as_markdown else report_page.html(report)
    render.write_file(output or Path(f"{info.name}-report.html"), page)
    return 0
