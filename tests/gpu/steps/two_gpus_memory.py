"""One of two GPUs lacks memory, again and again."""

from __future__ import annotations

from typing import Any

from gpu import training
from gpu.step import Probes, Report
from gpu.steps.memory import compare_with_reference

probes = Probes()


@probes(limit_s=190, quick=False)
def one_gpu_lacks_memory(report: Report) -> None:
    """In forward, in the midst of the backward, with unused parameters: no rank waits for ever, and the bits are equal."""
    cases: dict[str, dict[str, Any]] = {
        "backward": {"where": "backward"},
        "forward": {"where": "forward"},
        "unused": {"where": "backward", "unused": True},
    }
    for name, args in cases.items():
        if report.is_on_gpu or name == "forward":
            compare_with_reference(
                report, name, {"at": 2, "rank": 1, "fits": 2, "norm": "group", "amp": "fp16", **args}, count=2
            )


@probes(limit_s=100, quick=False)
def fifty_times(report: Report) -> None:
    """A rung after each failed step on rank 1, the bits of a run that took them without a failure."""
    count = 50 if report.is_on_gpu else 4
    ladder = [f"microbatch={samples}" for samples in range(count, 0, -1)]
    args = {"batch": 2 * (count + 1), "samples": 2 * (count + 1), "epochs": count + 6, "norm": "group", "rank": 1}
    args |= {"at": 2, "fits": count, "shrinks": True, "until": 2 + count, "unused": True}
    attempt = compare_with_reference(report, f"{count} times", args, count=2, ladder=ladder)
    if attempt:
        rungs = [change["settings"]["microbatch"] for change in training.schedule_of(attempt)]
        report.check("failures survived", len(rungs), count)
