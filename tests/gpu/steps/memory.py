"""Out-of-memory errors in real trainings on one rank: the rungs, the bits, and the memory that is allocated afterwards."""

from __future__ import annotations

from typing import Any

from gpu import training
from gpu.step import Probes, Report
from gpu.training import Attempt

probes = Probes()
LADDER = ["microbatch/2", "activation_checkpointing"]


def compare(report: Report, check: str, attempt: Attempt, reference: Attempt) -> None:
    """The same losses step by step and the same final state, byte for byte."""
    compare_steps(report, check, training.steps_of(attempt), training.steps_of(reference))
    compare_states(report, check, attempt, reference)


def compare_steps(
    report: Report, check: str, steps: list[tuple[int, str, str]], expected: list[tuple[int, str, str]]
) -> None:
    """The same steps, each with the same microbatch and loss."""
    differing = [a[0] for a, b in zip(steps, expected, strict=False) if a != b]
    same_number = len(steps) == len(expected) > 0
    report.check(f"{check}: number of steps", len(steps), len(expected), ok=same_number)
    report.check(f"{check}: steps whose loss differs", differing, [])


def compare_states(report: Report, check: str, attempt: Attempt, reference: Attempt) -> None:
    """The same tensors in the final checkpoint, byte for byte."""
    mine, other = attempt.weights, reference.weights
    names = [name for name in mine if mine[name] != other.get(name)]
    report.check(
        f"{check}: tensors of the final state that differ",
        f"{len(names)} of {len(mine)} {names[:3]}",
        f"0 of {len(other)} []",
    )


def compare_with_reference(
    report: Report, name: str, args: dict[str, Any], *, count: int = 1, ladder: list[str] | None = None
) -> Attempt | None:
    """A run that lacks memory, and one that takes the same microbatches from the same steps without ever lacking any."""
    ladder = ladder or LADDER[:1]
    attempt = training.train(report, name, args, count=count, ladder=ladder, health={"nan": ["skip"]})
    if not training.see_that_it_ended(report, attempt, f"{name}: the run ends"):
        return None
    lacking = ("at", "fits", "where", "rank", "shrinks", "squeeze", "until")
    harmless = {key: value for key, value in args.items() if key not in lacking}
    schedule = training.schedule_of(attempt)
    options: dict[str, Any] = {"ladder": ladder, "schedule": schedule, "health": {"nan": ["skip"]}}
    reference = training.train(report, f"{name}-reference", harmless, count=count, **options)
    if training.see_that_it_ended(report, reference, f"{name}: the reference ends"):
        compare(report, name, attempt, reference)
    return attempt


def size(report: Report) -> dict[str, Any]:
    """A step that takes some hundred MiB on a GPU, and nothing on a CPU."""
    return {"width": 32, "side": 64, "layers": 16, "batch": 16} if report.is_on_gpu else {"batch": 8}


@probes(limit_s=80)
def impossible_allocation(report: Report) -> None:
    """A backward that asks for more memory than there is: half the microbatch, and the bits of a run that used it from there."""
    for amp in ("fp16", "off") if report.is_on_gpu else ("fp16",):
        args = {**size(report), "at": 3, "fits": size(report)["batch"] // 2, "amp": amp}
        attempt = compare_with_reference(report, f"backward-{amp}", args)
        if attempt:
            rungs = [change["settings"]["microbatch"] for change in training.schedule_of(attempt)]
            report.check(f"microbatches taken, {amp}", rungs, [size(report)["batch"] // 2])


@probes(limit_s=110)
def real_limit(report: Report) -> None:
    """The allocator is limited to a part of what a step takes, so that PyTorch's own operations and cuDNN lack memory."""
    if not report.on_gpu("rungs taken under a real limit", "bits under a real limit", "refusals that cuDNN swallowed"):
        return
    for squeeze in (0.7, 0.35):
        args: dict[str, Any] = {
            **size(report),
            "epochs": 4,
            "at": 3,
            "squeeze": squeeze,
            "amp": "fp16",
            "norm": "group",
        }
        attempt = compare_with_reference(report, f"limited-{squeeze}", args)
        if attempt:
            rungs = [(change["step"], change["settings"]["microbatch"]) for change in training.schedule_of(attempt)]
            report.check(f"rungs taken under {squeeze} of a step's memory", rungs, "at least one", ok=bool(rungs))
            report.note(
                f"refusals of the allocator, swallowed ones too ({squeeze})", training.facts_of(attempt).get("ooms")
            )


@probes(limit_s=60)
def many_rungs(report: Report) -> None:
    """Many rungs, each after a failed step: none may leak memory."""
    count = 20 if report.is_on_gpu else 4
    ladder = [f"microbatch={samples}" for samples in range(count, 0, -1)]
    args: dict[str, Any] = {"batch": count + 1, "samples": 8 * (count + 1), "epochs": 5, "norm": "group", "at": 4}
    args |= {"fits": count, "shrinks": True, "until": 4 + count} | (
        {"width": 16, "side": 48} if report.is_on_gpu else {}
    )
    attempt = training.train(report, "rungs", args, ladder=ladder)
    if not training.see_that_it_ended(report, attempt, f"a run with {count} rungs ends"):
        return
    rungs = [change["settings"]["microbatch"] for change in training.schedule_of(attempt)]
    report.check("rungs", f"{len(rungs)}, down to {rungs[-1] if rungs else None}", f"{count}, down to 1")
    if report.on_gpu(f"MiB allocated between steps after {count} rungs", "MiB reserved after them"):
        memory = training.memory_of(attempt)
        before, after = memory[3], memory[-1]
        report.at_most(f"MiB allocated between steps after {count} rungs", (after[0] - before[0]) / 2**20, 1.0, "more")
        report.at_most("MiB reserved after them", (after[1] - before[1]) / 2**20, 64.0, "more")


@probes(limit_s=60, quick=False)
def dropped_activations(report: Report) -> None:
    """With BatchNorm activation checkpointing is the first rung. It changes no bit."""
    args: dict[str, Any] = {**size(report), "amp": "fp16"}
    options: dict[str, Any] = {"ladder": LADDER}
    attempt = training.train(report, "fell", args | {"at": 3, "kept": True}, **options)
    plain = training.train(report, "never", args, **options)
    if training.see_that_it_ended(report, attempt, "a run that drops its activations at step 3 ends"):
        compare(report, "activations dropped at step 3", attempt, plain)
