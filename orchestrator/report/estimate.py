"""A plan on a machine that is not here (`kgorch check --on`): what its probe saw without computing, what is assumed of the machine
and of the data, and from both what report/check.py lays out as for any other probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from orchestrator.core.machines import COMMUNICATION, CONTEXT, MACHINES, WORKSPACES, Assumed, Machine
from orchestrator.launch.verdicts import FAIL, PASS, Line
from orchestrator.plan import Plan
from orchestrator.platforms.profile import Profile
from orchestrator.preflight.assumptions import ALL
from orchestrator.preflight.stage_probe import Probed
from orchestrator.report.run_view import View


def lines(plan: Plan, profile: Profile, machine: Machine) -> Iterator[Line]:
    """What the plan asks of the machine, as far as that is known of it."""
    wanted = plan.session.gpus or 1
    fits = wanted <= machine.gpus
    do = "" if fits else "take the plan for this machine, or --set session.gpus=1"
    yield Line("gpus", PASS if fits else FAIL, f"{machine.gpus} x {machine.gpu}; the plan needs {wanted}", do)
    wall_s = plan.session.wall or profile.wall_s
    yield Line("platform", PASS, f"{profile.name}; sessions of {timedelta(seconds=wall_s) if wall_s else 'any length'}")


def completed(one: Probed, machine: Machine, assumed: Assumed) -> Probed:
    """A probe's findings with the times that it could not measure."""
    found = dict(one.found)
    if not found.get("trials"):
        return one
    seen, ranks = found["estimate"], one.ranks
    together = found["share"] * ranks
    samples, validation = assumed.samples or seen["samples"], assumed.validation or seen["validation"]
    batches = max(1, samples // together)
    step_s = found["trials"][0]["step_s"]
    reading = min(ranks * max(1, found["num_workers"]), machine.cores)
    wait_s = max(0.0, together * seen["sample_s"] / reading - step_s)
    model_s = batches * (step_s + wait_s)
    scored_s = validation * max(seen["forward_s"], seen["sample_s"] * ranks / reading) / ranks
    if assumed.epoch is not None:
        step_s, wait_s = assumed.epoch / batches, 0.0
    first_s = (assumed.first_epoch or 0.0) / batches
    found |= {
        "device_total": machine.memory_bytes,
        "reserved": machine.reserved_bytes,
        "loops": [{**loop, "batches": batches} for loop in found["loops"]],
        "warm": {"step_s": step_s, "wait_s": wait_s},
        "cold": {"first_step_s": step_s, "wait_s": max(wait_s, first_s - step_s)},
        "evaluation_s": scored_s if assumed.evaluation is None else assumed.evaluation,
        "save_s": found["state_bytes"] / assumed.disk,
        "estimate": seen
        | {"samples": samples, "validation": validation, "model_epoch_s": model_s, "model_evaluation_s": scored_s},
    }
    return one._replace(found=found)


def stage_view(one: Probed, machine: Machine, assumed: Assumed) -> View:
    """Beside the tables of every check: the model's own figures, and what somebody's measured epoch makes of them."""
    seen = one.found["estimate"]
    epoch_s = sum(one.found["warm"].values()) * one.found["loops"][0]["batches"]
    flops = (seen["flops_half"] + seen["flops_full"]) * seen["samples"]
    peak = machine.half if seen["flops_half"] > seen["flops_full"] else machine.full
    return {
        "weights": seen["weights"],
        "samples": seen["samples"],
        "validation": seen["validation"],
        "flops_a_sample": seen["flops_half"] + seen["flops_full"],
        "half_share": seen["flops_half"] / max(1.0, seen["flops_half"] + seen["flops_full"]),
        "sample_s": seen["sample_s"],
        "optimizer_s": seen["optimizer_s"],
        "reduce_s": seen["reduce_s"],
        "model_epoch_s": seen["model_epoch_s"],
        "model_evaluation_s": seen["model_evaluation_s"],
        "epoch_s": epoch_s,
        "told_epoch": assumed.epoch is not None,
        "utilisation": flops / (epoch_s * peak * machine.gpus) if epoch_s else 0.0,
        "read_values": seen["read_values"],
    }


def assumptions(name: str, profile: Profile, by_stage: Mapping[str, Assumed], probed: Sequence[Probed]) -> list[View]:
    """All that is not computed from the script: what, how much, and from where."""
    machine, assumed = MACHINES[name], by_stage[ALL]
    mib = 1 << 20
    rows = [
        ("machine", f"{machine.gpus} x {machine.gpu}", machine.sources),
        ("of it for CUDA's context and kernels", f"{CONTEXT // mib} MiB", "orchestrator/core/memory_fit.py, CONTEXT"),
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
    for one in probed:
        own, stage = by_stage[one.stage.name], one.stage.name
        for field in ("samples", "validation"):
            if getattr(own, field) is not None:
                rows.append((f"{stage}: {field}", str(getattr(own, field)), "told: the real data set's"))
        for field in ("epoch", "first_epoch", "evaluation"):
            if (value := getattr(own, field)) is not None:
                rows.append(
                    (
                        f"{stage}: {field.replace('_', ' ')}",
                        str(timedelta(seconds=value)),
                        "told, in place of the model's",
                    )
                )
        if own.first_epoch is None:
            rows.append(
                (
                    f"{stage}: first epoch",
                    "as the others",
                    "nobody has told what a cold disk costs: --assume first_epoch=",
                )
            )
        if own.evaluation is None:
            rows.append(
                (f"{stage}: evaluation", "one forward a sample that is scored", "assumed: --assume evaluation=")
            )
        if one.found["estimate"]["read_values"]:
            rows.append((f"{stage}: its forward looks at values", "taken for 1", "no value is computed in an estimate"))
    return [{"what": what, "value": value, "source": source} for what, value, source in rows]


def _platform(profile: Profile, machine: Machine) -> str:
    wall = f"{profile.wall_s / 3600:g} h" if profile.wall_s else "no limit"
    quota = f"{profile.quota_hours:g} h" if profile.quota_hours else "none"
    return f"{wall}, {quota}, {profile.factor if machine.gpus > 1 else 1:g}"
