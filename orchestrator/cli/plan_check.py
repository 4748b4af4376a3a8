"""What `kgorch check` does: look at the machine, train a few steps of each stage, and forecast the run from them.

It is in the command line because it brings together preflight, which may not import report, and report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kgorch.cli.display import render
from kgorch.cli.lookup import load_plan, open_state

if TYPE_CHECKING:
    from kgorch.launch.verdicts import CheckLine
    from kgorch.plan import Plan, StageSection
    from kgorch.preflight.stage_probe import StageProbe

PROBE_TIMEOUT_S = 1800.0
"""For the few steps of a stage: a plan for large GPUs may be checked on a CPU."""


class ProbeOwner(NamedTuple):
    """What the GPU locks show of a probe, as they show the run of a session."""

    name: str
    id: str


def measure(path: Path, overrides: tuple[str, ...], device_memory: int | None, *, probes: bool) -> dict[str, Any]:
    """Check the plan on this machine.

    Args:
        device_memory: bytes of each GPU of the machine that will train; None: of this one.
        probes: train a few steps of each stage; else look at the machine only.
    Returns: the fields of `kgorch check --json` (docs/check.md).
    """
    from kgorch.admission.requests import LocalState
    from kgorch.launch.verdicts import FAIL
    from kgorch.plan import user_config
    from kgorch.preflight import machine_checks, overwritten_files, stage_probe
    from kgorch.report import check
    from kgorch.system import host_memory

    file_plan, _ = load_plan(path, overrides)
    path = path.absolute()
    detected, home, engine = open_state()
    plan = user_config.apply_to_plan(file_plan, user_config.load())
    profile = user_config.resolve_platform(plan.platform, detected)
    lines, reached = machine_checks.lines(
        LocalState(engine, home, profile), plan, path.parent, elsewhere=device_memory is not None, overrides=overrides
    )
    free = host_memory.free_bytes()
    probed, failed = list[stage_probe.StageProbe](), ""
    environ: Mapping[str, str] = os.environ
    if probes and not any(line.verdict == FAIL for line in lines):
        before = overwritten_files.PlanFolder(path.parent, home)
        probed, failed, environ = _probe_here(plan, path.parent, home, free, device_memory)
        lines += before.lines()
    checkpoints = path.parent / plan.checkpoint.dir if plan.checkpoint.dir else home
    target = check.CheckTarget(
        profile,
        free_bytes=free,
        disk_bytes=machine_checks.disk_free(checkpoints),
        cores=len(os.sched_getaffinity(0)),
        device_memory=device_memory,
        environ=environ,
    )
    result = check.report(engine, plan, target, check.Findings(lines, probed, failed), reached)
    if probed and not failed:
        try:
            check.keep(home, plan, path.parent, result)
        except OSError as error:
            render.echo(f"note: kgorch history will not show this check, it could not be stored: {error}", err=True)
    return result


def estimate_on(path: Path, overrides: tuple[str, ...], name: str, assumed: tuple[str, ...]) -> dict[str, Any]:
    """Check the plan for another machine. GPUs of this one are hidden from the probe, which computes nothing.

    Args:
        name: of the machine (core/forecast/machines.py).
        assumed: `[STAGE.]NAME=VALUE` of each --assume.
    Returns: as `measure`, with `on`, `forecast_by_model` and `assumptions`.
    """
    from kgorch.core.forecast.machines import rates
    from kgorch.launch import verdicts
    from kgorch.plan import user_config
    from kgorch.platforms.detect import BY_NAME
    from kgorch.preflight import assumptions, stage_probe
    from kgorch.report import check, estimate

    machine = assumptions.machine_of(name)
    plan, _ = load_plan(path, overrides)
    path = path.absolute()
    stages = [  # an estimate does not read the weights, so their files need not exist here
        _with_ranks(stage, machine.gpus).model_copy(update={"weights": None}) for stage in plan.stage if stage.quick_test_of is None
    ]  # fmt: skip
    by_stage = assumptions.parse_all(assumed, [stage.name for stage in stages])
    _, home, engine = open_state()
    plan = user_config.apply_to_plan(plan, user_config.load())
    profile = user_config.resolve_platform(plan.platform, BY_NAME[machine.platform])
    lines, probed, failed = list(estimate.lines(plan, profile, machine)), list[stage_probe.StageProbe](), ""
    if not any(line.verdict == verdicts.FAIL for line in lines):
        gpus = {stage.name: rates(machine, by_stage[stage.name]) for stage in stages}
        with stage_probe.probe_folder(home) as root:
            probed, warnings, failed = _probe_without_gpu(plan, stages, path.parent, root, gpus)
        lines += warnings
    trained = [one for one in probed if one.measurements.get("trials")]
    adjusted = [estimate.complete(one, machine, by_stage[one.stage.name]) for one in trained]
    by_model = [estimate.complete(one, machine, by_stage[one.stage.name].by_model) for one in trained]
    lines += [
        verdicts.CheckLine(
            f"stage {stage.name}", verdicts.WARN, "never calls session.backward(), so its time is not in the estimate",
            "" if by_stage[assumptions.ALL].besides else "--assume besides=…, its hours",
        )
        for stage in stages if trained and stage.name not in [one.stage.name for one in trained]
    ]  # fmt: skip
    if probed and not trained and not failed:
        failed = "no stage calls session.backward(), so there is nothing to estimate"

    target = check.CheckTarget(
        profile,
        free_bytes=machine.ram_bytes,
        disk_bytes=profile.disk_bytes,
        cores=machine.cores,
        gpus=(machine.gpu, machine.gpus),
    )

    def result_of(probes: list[stage_probe.StageProbe]) -> dict[str, Any]:
        findings = check.Findings(lines, probes, failed, by_stage[assumptions.ALL].besides)
        return check.report(engine, plan, target, findings, None)

    result = result_of(adjusted)
    for one, view in zip(adjusted, result["stages"], strict=True):
        view["estimate"] = estimate.stage_view(one, machine, by_stage[one.stage.name])
    return result | {
        "on": name,
        "forecast_by_model": result_of(by_model)["forecast"],
        "assumptions": estimate.assumptions(name, profile, by_stage, adjusted),
    }


def _probe_here(
    plan: Plan, folder: Path, home: Path, free_bytes: int, device_memory: int | None
) -> tuple[list[StageProbe], str, Mapping[str, str]]:
    """Train a few steps of each stage on this machine's GPUs.

    Returns: the probes, why the next one failed, or nothing, and the variables in which the GPUs that were probed are visible.

    Raises: GpusUnavailable: another session has them.
    """
    from kgorch.hardware import gpu_locks
    from kgorch.preflight import stage_probe

    try:
        locks = gpu_locks.acquire(home, ProbeOwner(f"{plan.name} (check)", ""), gpu_locks.resource_request(plan))
    except gpu_locks.GpusUnavailable as error:
        next_step = (
            "wait until they are free (kgorch queue lists who waits); or kgorch check --no-probe, which needs none"
        )
        raise gpu_locks.GpusUnavailable(error.what, *error.facts, next_step=next_step) from None
    probed: list[StageProbe] = []
    try:
        with stage_probe.probe_folder(home) as root:
            site = stage_probe.ProbeSite(plan, folder, root, locks)
            stages = [stage for stage in plan.stage if stage.quick_test_of is None]  # those are parts of other stages
            if device_memory and plan.session.gpus:
                stages = [_with_ranks(stage, plan.session.gpus) for stage in stages]
            for number, stage in enumerate(stages, 1):
                render.echo(f"probing stage {stage.name} ({number} of {len(stages)})", err=True)
                limit = _rank_limit(free_bytes, stage.ranks, device_memory, locks.environ)
                limits = stage_probe.ProbeLimits(memory=limit)
                probe = stage_probe.probe(site, stage, limits, patience_s=PROBE_TIMEOUT_S)
                probed.append(probe)
    except stage_probe.ProbeFailed as error:
        # the stages before it still have their figures
        return probed, "; ".join((error.what, *error.facts)), locks.environ
    finally:
        locks.release()
    return probed, "", locks.environ


def _probe_without_gpu(
    plan: Plan, stages: Sequence[StageSection], folder: Path, root: Path, gpus: Mapping[str, Any]
) -> tuple[list[StageProbe], list[CheckLine], str]:
    """Run each stage without computing.

    Args:
        gpus: stage → the assumed speed of the GPU.
    Returns: the probes, warnings, and why the check failed, or nothing. A stage that fails after another one was measured is a
        warning: the estimate lacks its time, and says so.
    """
    from kgorch.hardware.gpu_locks import VISIBLE, GpuLocks
    from kgorch.launch import verdicts
    from kgorch.preflight import stage_probe

    no_gpus = GpuLocks(variables={VISIBLE: ""})
    site = stage_probe.ProbeSite(plan, folder, root, no_gpus)
    probed: list[StageProbe] = []
    warnings: list[CheckLine] = []
    for number, stage in enumerate(stages, 1):
        render.echo(f"estimating stage {stage.name} ({number} of {len(stages)})", err=True)
        gpu = gpus[stage.name]
        try:
            limits = stage_probe.ProbeLimits(gpu=gpu)
            probe = stage_probe.probe(site, stage, limits, patience_s=PROBE_TIMEOUT_S)
        except stage_probe.ProbeFailed as error:
            why = "; ".join((error.what, *error.facts))
            if not any(one.measurements.get("trials") for one in probed):
                return probed, warnings, why
            warnings.append(verdicts.CheckLine(f"stage {stage.name}", verdicts.WARN, why))
            continue
        probed.append(probe)
    return probed, warnings, ""


def _with_ranks(stage: StageSection, gpus: int) -> StageSection:
    """The stage with the ranks that `ranks = "auto"` means on a machine with so many GPUs."""
    return stage.model_copy(update={"ranks": gpus}) if stage.ranks == "auto" else stage


def _rank_limit(free: int, ranks: int | str, device_memory: int | None, environ: Mapping[str, str]) -> int | None:
    """Bytes that a rank may use while it is probed; None for what its GPU has.

    A probe on the CPU may not use more than a share of the free host memory, however much the GPU that is meant has.
    """
    from kgorch.hardware import devices

    if devices.visible_gpu_count(environ):
        return device_memory
    return min(free // devices.rank_count(ranks, environ), device_memory or free)
