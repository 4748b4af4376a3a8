"""`python -m gpu`: runs the steps one after another, prints a table and writes the results page."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpu import machine as machines
from gpu import page, runner
from gpu.runner import ROOT, Result
from gpu.step import DIFFERS, NOTE, OK, SKIPPED, Check, Step
from gpu.steps import STEPS, NoSuchStep, select

LOGS = ROOT / "build" / "gpu"
PAGE = ROOT / "docs" / "gpu-results.md"
STYLES = {OK: "green", DIFFERS: "bold red", SKIPPED: "dim", NOTE: "dim"}

out, err = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "lists", is_flag=True, help="Print the steps and what they look for; run none.")
@click.option("--cpu", is_flag=True, help="Rehearse on the CPU, as far as it can go. Writes no page.")
@click.option(
    "--minutes", type=float, default=50.0, show_default=True, help="A step whose limit exceeds what is left is skipped."
)
@click.option(
    "--results", type=click.Path(path_type=Path), default=PAGE, help="The results page. [default: docs/gpu-results.md]"
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path),
    default=LOGS,
    help="Folder for the output of the steps. [default: build/gpu]",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all checks to this file as well.")
def main(
    names: tuple[str, ...], lists: bool, cpu: bool, minutes: float, results: Path, logs: Path, json_path: Path | None
) -> None:
    """Run the checks that need a GPU: all steps, or those that NAME selects.

    NAME is a step ("memory"), one probe of a step ("basics.pinned_image"), or the beginning of several steps ("two-gpus").

    Exit status 1 when a result differs from what was expected. Without a GPU no step runs, and the exit status is 0.

    Example:
      PYTHONPATH=tests python -m gpu basics ranks --minutes 15
    """
    try:
        selection = select(names)
    except NoSuchStep as error:
        known = ", ".join(step.name for step in STEPS)
        raise click.UsageError(f"there is no step {error}\nexpected one of: {known}") from None
    if lists:
        _show_list([step for step, _ in selection])
        return
    began_s = time.monotonic()
    machine = {"gpus": []} if cpu else machines.ask() | {"date": datetime.now(UTC).strftime("%Y-%m-%d")}
    gpus = len(machine["gpus"])
    if not cpu and not gpus:
        sys.exit(_without_gpu(machine, [step for step, _ in selection]))
    if not cpu:
        err.print(f"{page.title_of(machine)}: {page.facts_of(machine)}", markup=False)
        if machine.get("missing"):
            err.print(
                f"missing packages: {', '.join(machine['missing'])}; steps that need them will differ", markup=False
            )
    run: list[Result] = []
    for step, probes in selection:
        left_s = 60 * minutes - (time.monotonic() - began_s)
        result = _run(step, probes, gpus=gpus, left_s=left_s, logs=logs, cpu=cpu)
        run.append(result)
        _show_differences(result)
        if not cpu and not result.skipped and not probes:  # the page holds whole steps
            _write(results, page.update(results.read_text() if results.exists() else "", machine, run))
        if json_path:
            _write(
                json_path, json.dumps({"machine": machine, "steps": [item.as_dict() for item in run]}, indent=1) + "\n"
            )
    _show_table(run)
    _summarize(run, cpu=cpu, took_s=time.monotonic() - began_s)
    sys.exit(1 if any(result.differing for result in run) else 0)


def _run(step: Step, probes: Sequence[str], *, gpus: int, left_s: float, logs: Path, cpu: bool) -> Result:
    if not cpu and step.gpus > gpus:
        return Result(step, skipped=f"needs {step.gpus} GPUs, there is {gpus}")
    if left_s < step.limit_s:
        return Result(step, skipped=f"may take {step.limit_s:.0f} s, and {max(left_s, 0):.0f} s are left (--minutes)")
    err.print(f"{step.name}: {step.looks_for} (at most {step.limit_s:.0f} s)", style="dim", markup=False)
    return runner.run(step, probes, device="cpu" if cpu else "cuda", gpus=gpus, logs=logs)


def _without_gpu(machine: Mapping[str, Any], steps: Sequence[Step]) -> int:
    """Print the steps that did not run. Returns the exit status: 1 where there is a GPU that PyTorch cannot use."""
    for step in steps:
        click.echo(f"skipped {step.name}: {step.looks_for}")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    names_of_driver = [] if is_hidden else machine.get("driver_gpus", [])
    if names_of_driver:
        why = (
            machine.get("error")
            or f"PyTorch {machine.get('torch')} (CUDA {machine.get('cuda') or 'none'}) cannot use it"
        )
        click.echo(f"the driver shows {', '.join(names_of_driver)}, and {why}")
    elif machine.get("error"):
        click.echo(f"PyTorch cannot be asked: {machine['error']}")
    click.echo(f"no GPU: {len(steps)} steps skipped")
    return 1 if names_of_driver else 0


def _show_list(steps: Sequence[Step]) -> None:
    if not out.is_terminal:
        for step in steps:
            click.echo(f"{step.name}\t{step.gpus} GPU{'s' * (step.gpus > 1)}\t{step.limit_s:.0f} s\t{step.looks_for}")
        return
    table = Table("step", "GPUs", "at most", "looks for")
    for step in steps:
        table.add_row(step.name, str(step.gpus), f"{step.limit_s:.0f} s", escape(step.looks_for))
    out.print(table)


def _show_differences(result: Result) -> None:
    """Print the checks that differ as soon as their step has ended."""
    if result.skipped:
        err.print(f"{result.step.name} skipped: {result.skipped}", markup=False)
        return
    err.print(f"{result.step.name}: {page.verdict_of(result).replace('**', '')}, {result.took_s:.0f} s", markup=False)
    for check in result.differing:
        err.print(f"  {check.probe}: {check.check}: expected {check.expected}, found {check.found}", markup=False)
    if result.differing:
        err.print(f"  see {_short(Path(result.log))}", markup=False)


def _show_table(results: Sequence[Result]) -> None:
    if not out.is_terminal:
        for result in results:
            if result.skipped:
                click.echo(f"{result.step.name}\tskipped\t{result.skipped}")
            for check in result.checks:
                click.echo("\t".join(_cells(check)))
        return
    table = Table("step", "check", "expected", "found", "")
    for result in results:
        if result.skipped:
            table.add_row(result.step.name, "", "", escape(result.skipped), "skipped", style="dim")
        for check in result.checks:
            table.add_row(*map(escape, _cells(check)), style=STYLES[check.verdict] if check.verdict != OK else "")
        table.add_section()
    out.print(table)


def _cells(check: Check) -> tuple[str, ...]:
    return check.step, f"{check.probe}: {check.check}", check.expected, " ".join(check.found.split()), check.verdict


def _summarize(results: Sequence[Result], *, cpu: bool, took_s: float) -> None:
    checks = [check for result in results for check in result.checks]
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in (OK, DIFFERS, SKIPPED)}
    not_run = [result.step.name for result in results if result.skipped]
    summary = f"{counts[OK]} checks as expected, {counts[DIFFERS]} differ"
    if cpu:
        click.echo(f"rehearsal on the CPU: {summary}, {counts[SKIPPED]} not looked at; {took_s:.0f} s")
        return
    click.echo(f"{summary}, {counts[SKIPPED]} not looked at; {took_s / 60:.1f} min")
    if not_run:
        click.echo(f"{len(not_run)} steps skipped: {', '.join(not_run)}")


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _write(path: Path, text: str) -> None:
    """Replace the file in one operation: the run may be cut short at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


if __name__ == "__main__":
    main()
