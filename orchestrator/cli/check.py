"""kgorch check"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, load_plan, plan_argument, set_option, state
from orchestrator.errors import ExitCode, KgorchError

if TYPE_CHECKING:
    from orchestrator.plan import Stage

PATIENCE_S = 1800.0
"""For the few steps of a stage; a plan for large GPUs may be checked on a CPU."""


class _Who(NamedTuple):
    """Whose the GPUs are while they are probed."""

    name: str
    id: str


class Section(NamedTuple):
    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_bytes(ctx: click.Context, parameter: click.Parameter, typed: str | None) -> int | None:
    if typed is None:
        return None
    from orchestrator.core.fit import CONTEXT
    from orchestrator.plan import size

    try:
        told = int(size(typed))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if told <= CONTEXT:
        raise click.BadParameter(
            f"{told} bytes are less than CUDA itself takes ({render.size(CONTEXT)}); for example 15GiB"
        )
    return told


@click.command("check")
@plan_argument
@set_option
@click.option(
    "--device-memory",
    metavar="SIZE",
    callback=as_bytes,
    help="Of each GPU of the machine that is meant: 15GiB. Default: this one's.",
)
@click.option("--no-probe", is_flag=True, help="Look at the machine only; take no steps.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report there, too.")
@json_option
def command(
    plan: Path, overrides: tuple[str, ...], device_memory: int | None, no_probe: bool, html: Path | None, as_json: bool
) -> int:  # fmt: skip
    """What PLAN will take, before an hour is spent: does it run here, does it fit, how long will it last.

    Looks at the machine, then takes a few real steps of each stage in processes of their own, weighs them with several
    microbatches, and lays the rest into sessions. Nothing of a run is touched; a minute for a small plan.

    Exit codes: 0 it fits, perhaps with other settings than the plan's; 20 it does not run or fit; 2 a mistake in the
    plan.

    \b
    Example:
      kgorch check plan.toml --device-memory 15GiB --set session.wall=9h
    """
    if html:
        _see_that_there_is_room_for(html)
    found = _found(plan, overrides, device_memory, probes=not no_probe)
    if html:
        _write_html(html, found)
    if as_json:
        render.as_json(found)
    else:
        for section in sections(found):
            render.echo(f"\n{section.title}")
            render.table(section.head, section.rows)
        render.echo(f"\n{found['verdict']}: {found['why']}")
        if html:
            render.echo(f"written: {html}", err=True)
    return int(ExitCode.FAILED) if found["verdict"].startswith("does not") else 0


def _found(path: Path, overrides: tuple[str, ...], device_memory: int | None, *, probes: bool) -> dict[str, Any]:
    from orchestrator import config
    from orchestrator.report import check
    from orchestrator.runtime import claims, memory, preflight, probing
    from orchestrator.runtime.verdicts import FAIL

    said, _ = load_plan(path, overrides)
    path = path.absolute()
    detected, home, engine = state()
    plan = config.applied(said, config.load())
    profile = config.platform(plan.platform, detected)
    lines, reached = preflight.lines(
        engine, home, profile, plan, path.parent, elsewhere=device_memory is not None, overrides=overrides
    )
    probed, failed = list[probing.Probed](), ""
    free = memory.free_bytes()
    if probes and not any(line.verdict == FAIL for line in lines):
        wants = claims.wants(plan)
        try:
            claim = claims.take(home, _Who(f"{plan.name} (check)", ""), wants)
        except claims.DevicesHeld as error:
            then = "wait until they are free (kgorch queue); or, without taking steps, kgorch check --no-probe"
            raise claims.DevicesHeld(error.what, *error.facts, next_step=then) from None
        try:
            with probing.folder_in(home) as root:
                stages = [stage for stage in plan.stage if stage.quick_test_of is None]  # the others are part of these
                if device_memory and plan.session.gpus:
                    stages = [_as_on(plan.session.gpus, stage) for stage in stages]
                for number, stage in enumerate(stages, 1):
                    render.echo(f"probing stage {stage.name} ({number} of {len(stages)})", err=True)
                    try:
                        limit = _limit_of_a_rank(free, stage.ranks, device_memory)
                        probed.append(
                            probing.probe(plan, stage, path.parent, root, memory=limit, patience_s=PATIENCE_S)
                        )
                    except probing.ProbeFailed as error:
                        failed = "; ".join((error.what, *error.facts))
                        break
        finally:
            claim.release()
    checkpoints = path.parent / plan.checkpoint.dir if plan.checkpoint.dir else home
    found = check.of(
        engine, plan, profile, lines, probed, failed, free=free, disk_free=preflight.disk_free(checkpoints),
        cores=len(os.sched_getaffinity(0)), device_memory=device_memory,
        reached=reached,
    )  # fmt: skip
    if probed and not failed:
        try:
            check.keep(home, plan, found)
        except OSError as error:
            render.echo(f"kgorch history will not know of this check: {error}", err=True)
    return found


def _as_on(gpus: int, stage: Stage) -> Stage:
    """With the ranks that it has on another machine with so many."""
    return stage.model_copy(update={"ranks": gpus}) if stage.ranks == "auto" else stage


def _limit_of_a_rank(free: int, ranks: int | str, told: int | None) -> int | None:
    """Of what a rank may hold while it is probed. What a device has it says itself; a host gives no more than it has, whatever
    the device that is meant has.
    """
    from orchestrator.runtime import devices

    if devices.visible_gpus():
        return told
    return min(free // devices.ranks_for(ranks), told or free)


# What is shown


def sections(found: dict[str, Any]) -> Iterator[Section]:
    yield Section(
        "Machine", ["", "what", "found", "to do"],
        [[line["verdict"], line["name"], line["said"], line["do"]] for line in found["preflight"]],
    )  # fmt: skip
    weighed = [stage for stage in found["stages"] if stage["memory"]]
    if weighed:
        yield Section(
            "Memory of a rank",
            ["stage", "as planned", "limit", "verdict", "with", "largest microbatch"],
            list(_memory(weighed)),
        )
        yield Section("What it holds", ["stage", *_PARTS], [[stage["name"], *_parts(stage)] for stage in weighed])
        yield Section("Tried", ["stage", "microbatch", "activations", "held", "a step"], list(_trials(weighed)))
        yield Section(
            "Time",
            ["stage", "epochs", "first step", "an epoch", "first epoch", "of it waiting", "samples/s", "in all"],
            list(_times(weighed)),
        )
    if found["forecast"]:
        yield Section("Foretold", ["", ""], list(_foretold(found["forecast"])))


_PARTS = ("weights", "gradients", "optimizer", "buckets", "batch", "activations", "rest", "peak")


def _memory(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        memory = stage["memory"]
        largest = f"{memory['largest_microbatch']} of {memory['share']}"
        yield [
            stage["name"], render.size(memory["held"]), render.size(memory["limit"]), memory["verdict"],
            ", ".join(memory["settings"]) or "–", largest,
        ]  # fmt: skip


def _parts(stage: dict[str, Any]) -> list[str]:
    return [render.size(stage["memory"]["parts"].get(name)) for name in _PARTS]


def _trials(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        for trial in sorted(stage["memory"]["trials"], key=lambda trial: (trial["checkpointing"], trial["microbatch"])):
            held = "did not fit" if trial["ran_out"] else render.size(trial["held"])
            kept = "dropped" if trial["checkpointing"] else "kept"
            yield [stage["name"], str(trial["microbatch"]), kept, held, render.duration(trial["step_s"])]


def _times(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        time = stage["time"]
        yield [
            stage["name"], str(time["epochs"]), render.duration(time["startup_s"]), render.duration(time["epoch_s"]),
            render.duration(time["first_epoch_s"]), f"{time['wait_share']:.0%}", f"{time['samples_per_s']:.1f}",
            render.duration(time["training_s"]),
        ]  # fmt: skip


def _foretold(ahead: dict[str, Any]) -> Iterator[list[str]]:
    if at := ahead["goes_on_from"]:
        yield ["goes on from", f"stage {at['stage']}, step {at['step']}"]
    yield ["training", render.duration(ahead["training_s"])]
    wall = f" of {render.duration(ahead['wall_s'])}" if ahead["wall_s"] else ""
    if ahead["sessions"] is not None:
        yield ["sessions", f"{ahead['sessions']}{wall}"]
    if ahead["epochs_a_session"] is not None:
        yield ["epochs a session", f"{ahead['epochs_a_session']:.1f}"]
    if ahead["quota_s"] is not None:
        yield ["of the quota", render.duration(ahead["quota_s"])]
    if ahead["end_at"]:
        yield ["begun now, done", render.span(ahead)]
    yield ["checkpoints", render.size(ahead["disk_bytes"])]


def _see_that_there_is_room_for(path: Path) -> None:
    """Before minutes are spent. Raises: KgorchError."""
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error), next_step="name another file for --html") from None
    if not was_there:
        path.unlink()


def _write_html(path: Path, found: dict[str, Any]) -> None:
    """Raises: KgorchError."""
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(record=True, file=io.StringIO(), width=140)
    console.print(f"kgorch check: {found['plan']}, {found['at']}", style="bold")
    console.print(f"{found['verdict']}: {found['why']}", style="bold", markup=False)
    for section in sections(found):
        made = Table(*section.head, title=section.title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold")
        for row in section.rows:
            made.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(made)
    try:
        path.write_text(console.export_html(), encoding="utf-8")
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error)) from None
