"""Estimate of a plan for a machine that is not here (`kgorch check --on`).

The probe counts operations and bytes without computing anything. With what is assumed of the machine and the data, they make the
figures that a probe on the machine would measure; report/check.py then treats them like any other probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from kgorch.core.forecast.machines import COMMUNICATION, CONTEXT, MACHINES, WORKSPACES, Assumptions, MachineSpec
from kgorch.launch.verdicts import FAIL, PASS, CheckLine
from kgorch.plan import Plan
from kgorch.platforms.profile import Profile
from kgorch.preflight.assumptions import ALL
from kgorch.preflight.stage_probe import StageProbe
from kgorch.report.json_fields import View


def lines(plan: Plan, profile: Profile, machine: MachineSpec) -> Iterator[CheckLine]:
    """What the plan requires of the machine, as far as the machine is known."""
    needed = plan.session.gpus or 1
    is_enough = needed <= machine.gpus
    do = "" if is_enough else "use the plan for this machine, or --set session.gpus=1"
    yield CheckLine("gpus", PASS if is_enough else FAIL, f"{machine.gpus} x {machine.gpu}; the plan needs {needed}", do)
    wall_s = plan.session.wall or profile.wall_s
    yield CheckLine(
        "platform", PASS, f"{profile.name}; sessions of {timedelta(seconds=wall_s) if wall_s else 'any length'}"
    )


def complete(probe: StageProbe, machine: MachineSpec, assumed: Assumptions) -> StageProbe:
    """A probe's figures, completed by the times that it could not measure."""
    figures = dict(probe.measurements)
    if not figures.get("trials"):
        return probe
    estimate, ranks = figures["estimate"], probe.ranks
    batch = figures["share"] * ranks
    samples, validation = assumed.samples or estimate["samples"], assumed.validation or estimate["validation"]
    batches = max(1, samples // batch)
    step_s = figures["trials"][0]["step_s"]
    # Loading workers read while the GPU computes: a step waits only for what they do not manage meanwhile.
    readers = min(ranks * max(1, figures["num_workers"]), machine.cores)
    wait_s = max(0.0, batch * estimate["sample_s"] / readers - step_s)
    model_epoch_s = batches * (step_s + wait_s)
    model_evaluation_s = validation * max(estimate["forward_s"], estimate["sample_s"] * ranks / readers) / ranks
    if assumed.epoch is not None:
        step_s, wait_s = assumed.epoch / batches, 0.0
    first_s = (assumed.first_epoch or 0.0) / batches
    figures |= {
        "device_total": machine.memory_bytes,
        "reserved": machine.reserved_bytes,
        "loops": [{**loop, "batches": batches} for loop in figures["loops"]],
        "warm": {"step_s": step_s, "wait_s": wait_s},
        "cold": {"first_step_s": step_s, "wait_s": max(wait_s, first_s - step_s)},
        "evaluation_s": model_evaluation_s if assumed.evaluation is None else assumed.evaluation,
        "save_s": figures["state_bytes"] / assumed.disk,
        "estimate": estimate
        | {
            "samples": samples,
            "validation": validation,
            "model_epoch_s": model_epoch_s,
            "model_evaluation_s": model_evaluation_s,
        },
    }
    return probe._replace(measurements=figures)


def stage_view(probe: StageProbe, machine: MachineSpec, assumed: Assumptions) -> View:
    """Figures of the estimate of a stage; `utilisation` is the share of the GPUs' peak that the epoch's time implies.

    An epoch's time may be one that the user measured (--assume epoch=): its utilisation shows whether it is plausible.
    """
    estimate = probe.measurements["estimate"]
    epoch_s = sum(probe.measurements["warm"].values()) * probe.measurements["loops"][0]["batches"]
    flops = (estimate["flops_half"] + estimate["flops_full"]) * estimate["samples"]
    peak = machine.half if estimate["flops_half"] > estimate["flops_full"] else machine.full
    return {
        "weights": estimate["weights"],
        "samples": estimate["samples"],
        "validation": estimate["validation"],
        "flops_a_sample": estimate["flops_half"] + estimate["flops_full"],
        "half_share": estimate["flops_half"] / max(1.0, estimate["flops_half"] + estimate["flops_full"]),
        "sample_s": estimate["sample_s"],
        "optimizer_s": estimate["optimizer_s"],
        "reduce_s": estimate["reduce_s"],
        "model_epoch_s": estimate["model_epoch_s"],
        "model_evaluation_s": estimate["model_evaluation_s"],
        "epoch_s": epoch_s,
        "told_epoch": assumed.epoch is not None,
        "utilisation": flops / (epoch_s * peak * machine.gpus) if epoch_s else 0.0,
        "read_values": estimate["read_values"],
    }


def assumptions(
    name: str, profile: Profile, by_stage: Mapping[str, Assumptions], probes: Sequence[StageProbe]
) -> list[View]:
    """Everything that was not computed from the script: what it is, its value, and its source."""
    machine, assumed = MACHINES[name], by_stage[ALL]
    mib = 1 << 20
    rows = [
        ("machine", f"{machine.gpus} x {machine.gpu}", machine.sources),
        ("of it for CUDA's context and kernels", f"{CONTEXT // mib} MiB", "kgorch/core/memory/memory_fit.py, CONTEXT"),
        ("… for cuDNN's and cuBLAS's workspaces, and what the allocator cannot join", f"{WORKSPACES // mib} MiB", "assumed"),
        *([("… for NCCL", f"{COMMUNICATION // mib} MiB", "assumed")] if machine.gpus > 1 else []),
        ("share of the operations a second that a training reaches", f"{assumed.compute:g}", "assumed: --assume compute="),
        ("share of the bytes a second", f"{assumed.memory:g}", "assumed: --assume memory="),
        ("to launch one operation", f"{assumed.launch * 1e6:g} µs", "assumed: --assume launch="),
        ("between two GPUs, beside no computation", f"{machine.bus_bytes_s / 1e9:g} GB/s", "assumed, over host memory"),
        ("disk for checkpoints", f"{assumed.disk / 1e6:g} MB/s", "assumed: --assume disk="),
        ("cores that read samples", str(machine.cores), "of the machine; a sample's seconds are those of this machine's cores"),
        ("mixed precision", "as the script has it on CUDA", "session.autocast is on, with CUDA's list of operations"),
        ("session, quota, its factor", _platform(profile, machine), profile.sources_of_figures),
    ]  # fmt: skip
    for probe in probes:
        own, stage = by_stage[probe.stage.name], probe.stage.name
        for field in ("samples", "validation"):
            if getattr(own, field) is not None:
                rows.append((f"{stage}: {field}", str(getattr(own, field)), "given by --assume: of the real data set"))
        for field in ("epoch", "first_epoch", "evaluation"):
            if (value := getattr(own, field)) is not None:
                what = f"{stage}: {field.replace('_', ' ')}"
                rows.append((what, str(timedelta(seconds=value)), "given by --assume, in place of the model's"))
        if own.first_epoch is None:
            source = "the cost of a cold disk is not known: --assume first_epoch="
            rows.append((f"{stage}: first epoch", "as the others", source))
        if own.evaluation is None:
            value = "one forward pass for each sample"
            rows.append((f"{stage}: evaluation", value, "assumed: --assume evaluation="))
        if probe.measurements["estimate"]["read_values"]:
            rows.append(
                (f"{stage}: its forward pass reads values", "assumed to be 1", "an estimate computes no values")
            )
    return [{"what": what, "value": value, "source": source} for what, value, source in rows]


def _platform(profile: Profile, machine: MachineSpec) -> str:
    wall = f"{profile.wall_s / 3600:g} h" if profile.wall_s else "no limit"
    quota = f"{profile.quota_hours:g} h" if profile.quota_hours else "none"
    return f"{wall}, {quota}, {profile.factor if machine.gpus > 1 else 1:g}"
