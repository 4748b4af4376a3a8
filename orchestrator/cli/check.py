"""kgorch check"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from orchestrator.cli import render
from orchestrator.cli.common import json_option, load_plan, plan_argument, set_option, state
from orchestrator.core.codes import Fit
from orchestrator.errors import ExitCode, KgorchError

if TYPE_CHECKING:
    from orchestrator.plan import StageSection

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
    from orchestrator.core.memory_fit import CONTEXT
    from orchestrator.plan import parse_size_bytes

    try:
        told = int(parse_size_bytes(typed))
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
@click.option(
    "--on",
    "machine",
    metavar="MACHINE",
    help="Estimate PLAN for a machine that is not here (t4, t4x2, p100), computing nothing.",
)
@click.option(
    "--assume",
    "assumed",
    multiple=True,
    metavar="[STAGE.]NAME=VALUE",
    help="With --on: what nobody can know here, as epoch=35m, evaluation=7m, samples=1000, compute=0.3.",
)
@click.option("--no-probe", is_flag=True, help="Look at the machine only; take no steps.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the report there, too.")
@json_option
def command(
    plan: Path, overrides: tuple[str, ...], device_memory: int | None, machine: str | None, assumed: tuple[str, ...],
    no_probe: bool, html: Path | None, as_json: bool,
) -> int:  # fmt: skip
    """What PLAN will take, before an hour is spent: does it run here, does it fit, how long will it last.

    Looks at the machine, then takes a few real steps of each stage in processes of their own, weighs them with several
    microbatches, and lays the rest into sessions. Nothing of a run is touched; a minute for a small plan.

    Exit codes: 0 it fits, perhaps with other settings than the plan's; 20 it does not run or fit; 2 a mistake in the
    plan.

    \b
    Example:
      kgorch check plan.toml --device-memory 15GiB --set session.wall=9h
      kgorch check plan.toml --on t4x2 --assume samples=1000
    """
    if machine and (device_memory or no_probe):
        raise click.UsageError("--on brings a machine's memory with it: leave out --device-memory and --no-probe")
    if assumed and not machine:
        raise click.UsageError("--assume is for an estimate: give --on MACHINE, too")
    if html:
        _see_that_there_is_room_for(html)
    if machine:
        found = _estimated(plan, overrides, machine, assumed)
    else:
        found = _found(plan, overrides, device_memory, probes=not no_probe)
    if html:
        _write_html(html, found)
    if as_json:
        render.as_json(found)
    else:
        for section in sections(found):
            render.echo(f"\n{section.title}")
            render.table(section.head, section.rows)
        render.echo(f"\n{render.words(found['verdict'])}: {found['why']}")
        if html:
            render.echo(f"written: {html}", err=True)
    return int(ExitCode.FAILED) if found["verdict"] in (Fit.DOES_NOT_FIT, Fit.DOES_NOT_RUN) else 0


def _found(path: Path, overrides: tuple[str, ...], device_memory: int | None, *, probes: bool) -> dict[str, Any]:
    from orchestrator.hardware import gpu_locks
    from orchestrator.launch.verdicts import FAIL
    from orchestrator.plan import user_config
    from orchestrator.preflight import machine_checks, stage_probe
    from orchestrator.report import check
    from orchestrator.system import host_memory

    said, _ = load_plan(path, overrides)
    path = path.absolute()
    detected, home, engine = state()
    plan = user_config.apply_to_plan(said, user_config.load())
    profile = user_config.resolve_platform(plan.platform, detected)
    lines, reached = machine_checks.lines(
        engine, home, profile, plan, path.parent, elsewhere=device_memory is not None, overrides=overrides
    )
    probed, failed = list[stage_probe.Probed](), ""
    free = host_memory.free_bytes()
    if probes and not any(line.verdict == FAIL for line in lines):
        wants = gpu_locks.resource_request(plan)
        try:
            claim = gpu_locks.acquire(home, _Who(f"{plan.name} (check)", ""), wants)
        except gpu_locks.GpusUnavailable as error:
            then = "wait until they are free (kgorch queue); or, without taking steps, kgorch check --no-probe"
            raise gpu_locks.GpusUnavailable(error.what, *error.facts, next_step=then) from None
        try:
            with stage_probe.folder_in(home) as root:
                stages = [stage for stage in plan.stage if stage.quick_test_of is None]  # the others are part of these
                if device_memory and plan.session.gpus:
                    stages = [_as_on(plan.session.gpus, stage) for stage in stages]
                for number, stage in enumerate(stages, 1):
                    render.echo(f"probing stage {stage.name} ({number} of {len(stages)})", err=True)
                    try:
                        limit = _limit_of_a_rank(free, stage.ranks, device_memory)
                        probed.append(
                            stage_probe.probe(plan, stage, path.parent, root, memory=limit, patience_s=PATIENCE_S)
                        )
                    except stage_probe.ProbeFailed as error:
                        failed = "; ".join((error.what, *error.facts))
                        break
        finally:
            claim.release()
    checkpoints = path.parent / plan.checkpoint.dir if plan.checkpoint.dir else home
    found = check.of(
        engine, plan, profile, lines, probed, failed, free=free, disk_free=machine_checks.disk_free(checkpoints),
        cores=len(os.sched_getaffinity(0)), device_memory=device_memory,
        reached=reached,
    )  # fmt: skip
    if probed and not failed:
        try:
            check.keep(home, plan, found)
        except OSError as error:
            render.echo(f"kgorch history will not know of this check: {error}", err=True)
    return found


def _estimated(path: Path, overrides: tuple[str, ...], name: str, said: tuple[str, ...]) -> dict[str, Any]:
    """As _found, of a machine that is not here: its GPUs are hidden from the probe, which computes nothing."""
    from orchestrator.core.machines import rates
    from orchestrator.launch import verdicts
    from orchestrator.plan import user_config
    from orchestrator.platforms.detect import BY_NAME
    from orchestrator.preflight import assumptions, stage_probe
    from orchestrator.report import check, estimate

    machine = assumptions.machine_of(name)
    plan, _ = load_plan(path, overrides)
    path = path.absolute()
    stages = [  # values do not count in an estimate, so the files of weights need not be here
        _as_on(machine.gpus, stage).model_copy(update={"weights": None}) for stage in plan.stage if stage.quick_test_of is None
    ]  # fmt: skip
    by_stage = assumptions.parsed(said, [stage.name for stage in stages])
    _, home, engine = state()
    plan = user_config.apply_to_plan(plan, user_config.load())
    profile = user_config.resolve_platform(plan.platform, BY_NAME[machine.platform])
    lines, probed, failed = list(estimate.lines(plan, profile, machine)), list[stage_probe.Probed](), ""
    if not any(line.verdict == verdicts.FAIL for line in lines):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with stage_probe.folder_in(home) as root:
            for number, stage in enumerate(stages, 1):
                render.echo(f"looking at stage {stage.name} ({number} of {len(stages)})", err=True)
                gpu = rates(machine, by_stage[stage.name])
                try:
                    one = stage_probe.probe(plan, stage, path.parent, root, memory=None, patience_s=PATIENCE_S, gpu=gpu)
                except stage_probe.ProbeFailed as error:
                    if not any(one.found.get("trials") for one in probed):
                        failed = "; ".join((error.what, *error.facts))
                        break
                    lines.append(
                        verdicts.Line(f"stage {stage.name}", verdicts.WARN, "; ".join((error.what, *error.facts)))
                    )
                    continue
                probed.append(one)
    trained = [one for one in probed if one.found.get("trials")]
    stated = [estimate.completed(one, machine, by_stage[one.stage.name]) for one in trained]
    modelled = [estimate.completed(one, machine, by_stage[one.stage.name].by_model) for one in trained]
    lines += [
        verdicts.Line(
            f"stage {stage.name}", verdicts.WARN, "brings no batch to session.backward(): its time is not in the estimate",
            "" if by_stage[assumptions.ALL].besides else "--assume besides=…, its hours",
        )
        for stage in stages if trained and stage.name not in [one.stage.name for one in trained]
    ]  # fmt: skip
    if probed and not trained and not failed:
        failed = "no stage brings a batch to session.backward(), so there is nothing to estimate"

    def laid_out(probes: list[stage_probe.Probed]) -> dict[str, Any]:
        return check.of(
            engine, plan, profile, lines, probes, failed, free=machine.ram_bytes, disk_free=profile.disk_bytes, cores=machine.cores,
            device_memory=None, reached=None, on=(machine.gpu, machine.gpus), besides_s=by_stage[assumptions.ALL].besides,
        )  # fmt: skip

    found = laid_out(stated)
    for one, view in zip(stated, found["stages"], strict=True):
        view["estimate"] = estimate.stage_view(one, machine, by_stage[one.stage.name])
    return found | {
        "on": name,
        "forecast_by_model": laid_out(modelled)["forecast"],
        "assumptions": estimate.assumptions(name, profile, by_stage, stated),
    }


def _as_on(gpus: int, stage: StageSection) -> StageSection:
    """With the ranks that it has on another machine with so many."""
    return stage.model_copy(update={"ranks": gpus}) if stage.ranks == "auto" else stage


def _limit_of_a_rank(free: int, ranks: int | str, told: int | None) -> int | None:
    """Of what a rank may hold while it is probed. What a device has it says itself; a host gives no more than it has, whatever
    the device that is meant has.
    """
    from orchestrator.hardware import devices

    if devices.visible_gpu_count():
        return told
    return min(free // devices.rank_count(ranks), told or free)


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
    if found.get("on"):
        yield Section(
            "The estimate",
            [
                "stage",
                "weights",
                "samples",
                "GFLOP each",
                "an epoch by the model",
                "an epoch told",
                "of the GPUs' peak",
            ],
            list(_estimates(found["stages"])),
        )
    if found["forecast"]:
        yield Section("Foretold", ["", ""], list(_foretold(found["forecast"])))
    if found.get("forecast_by_model") and any(stage["estimate"]["told_epoch"] for stage in found["stages"]):
        yield Section("Foretold by the model alone", ["", ""], list(_foretold(found["forecast_by_model"])))
    if found.get("on"):
        yield Section(f"Assumed of {found['on']}", ["what", "value", "from"], _assumptions(found["assumptions"]))


_PARTS = ("weights", "gradients", "optimizer", "buckets", "batch", "activations", "rest", "peak")


def _memory(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        memory = stage["memory"]
        largest = f"{memory['largest_microbatch']} of {memory['share']}"
        yield [
            stage["name"], render.size(memory["held"]), render.size(memory["limit"]), render.words(memory["verdict"]),
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


def _estimates(stages: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    for stage in stages:
        seen = stage["estimate"]
        told = render.duration(seen["epoch_s"]) if seen["told_epoch"] else "–"
        yield [
            stage["name"], f"{seen['weights']:,}", f"{seen['samples']:,}", f"{seen['flops_a_sample'] / 1e9:.1f}",
            render.duration(seen["model_epoch_s"]), told, f"{seen['utilisation']:.1%}",
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


def _assumptions(rows: Iterable[dict[str, str]]) -> list[list[str]]:
    return [[row["what"], row["value"], row["source"]] for row in rows]


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
    console.print(f"{render.words(found['verdict'])}: {found['why']}", style="bold", markup=False)
    for section in sections(found):
        made = Table(*section.head, title=section.title, box=box.SIMPLE_HEAD, title_justify="left", header_style="bold")
        for row in section.rows:
            made.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(made)
    try:
        path.write_text(console.export_html(), encoding="utf-8")
    except OSError as error:
        raise KgorchError(f"{path} cannot be written", str(error)) from None
