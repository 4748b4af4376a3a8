"""What saves and steps cost: the blocking part of a large snapshot, the time between snapshots, a step's overhead."""

from __future__ import annotations

import statistics

import psutil

from gpu import training
from gpu.step import Probes, Report

probes = Probes()
STATE_MIB = 3000
OVERHEAD = 1.4
"""Time that a step of some 4 ms may take under kgorch, of PyTorch's own. An H100's machine took 1.23 and 1.28 (0.9 and 1.5 ms)."""


@probes(limit_s=80)
def large_state(report: Report) -> None:
    """The blocking part of a snapshot of gigabytes takes no longer than a copy to pinned memory."""
    mebibytes = min(STATE_MIB, psutil.virtual_memory().available // (5 << 20)) if report.is_on_gpu else 32
    args = {"pad_mb": mebibytes, "seconds": 15 if report.is_on_gpu else 3, "copies": True}
    attempt = training.train(report, "large", args, program="costs.py", deterministic="off", snapshot_s=1.0)
    if not training.see_that_it_ended(report, attempt, f"a training with {mebibytes} MiB of state ends"):
        return
    facts = training.facts_of(attempt)
    report.at_least("snapshots", len(facts["snapshots"]), 1)
    if facts["snapshots"]:
        blocking_s = min(snapshot[1] for snapshot in facts["snapshots"])
        speed, plain = facts["state_bytes"] / blocking_s / 1e9, facts["copy_bytes_s"] / 1e9
        report.note(
            "blocking part", f"{blocking_s:.3f} s, {speed:.1f} GB/s; a plain copy to pinned memory {plain:.1f} GB/s"
        )
        if report.on_gpu("speed of the blocking part, of that of a plain copy"):
            report.at_least("speed of the blocking part, of that of a plain copy", speed / plain, 0.8)


@probes(limit_s=60)
def snapshot_interval(report: Report) -> None:
    """The host is several steps of 30 ms ahead of its device. Waiting for those is no cost of a snapshot."""
    args = {"pad_mb": 100 if report.is_on_gpu else 8, "seconds": 25 if report.is_on_gpu else 3, "work": 0.03}
    attempt = training.train(report, "interval", args, program="costs.py", deterministic="off", snapshot_s=1.0)
    if not training.see_that_it_ended(report, attempt, "a training with 100 MiB of state ends"):
        return
    snapshots = training.facts_of(attempt)["snapshots"]
    report.note(
        "snapshots: after, blocking, next after (s)", [[round(item, 3) for item in snapshot] for snapshot in snapshots]
    )
    name = "median of the seconds to the next snapshot"  # one snapshot that the machine holds up puts the next one off
    if report.on_gpu(name):
        report.at_most(name, statistics.median(item[2] for item in snapshots) if snapshots else None, 10.0)
    else:
        report.at_least("snapshots", len(snapshots), 1)


@probes(limit_s=60, quick=False)  # the program of basics.waits
def overhead(report: Report) -> None:
    """A step under kgorch against PyTorch's own, in one process."""
    args = {"steps": 600 if report.is_on_gpu else 20, "width": 256, "depth": 8}
    attempt = training.train(
        report,
        "overhead",
        args,
        program="costs.py",
        deterministic="off",
        ladder=["microbatch/2"],
        health={"nan": ["skip"]},
    )
    if not training.see_that_it_ended(report, attempt, "the training ends"):
        return
    facts = training.facts_of(attempt)
    for name in ("plain_s", "kgorch_s", "plain_loop_s", "kgorch_loop_s"):
        report.note(name, f"{facts[name] * 1e3:.2f} ms")
    name = "time of a step, of that in PyTorch's own loop"
    if report.on_gpu(name):
        report.at_most(name, facts["kgorch_loop_s"] / facts["plain_loop_s"], OVERHEAD, "of it")


@probes(limit_s=60, quick=False)
def own_python(report: Report) -> None:
    """In which of its functions kgorch spends a step, as cProfile counts it: the profile makes each call slower."""
    args = {"steps": 600 if report.is_on_gpu else 20, "width": 256, "depth": 8, "profile": True}
    options = {"deterministic": "off", "ladder": ["microbatch/2"], "health": {"nan": ["skip"]}}
    attempt = training.train(report, "profile", args, program="costs.py", **options)
    if not training.see_that_it_ended(report, attempt, "the profiled training ends"):
        return
    spent = training.facts_of(attempt)["spent_us"]
    report.at_least("functions of kgorch in a step", len(spent), 20)
    report.note("microseconds in all of them", round(sum(item[1] for item in spent)))
    report.note("the longest", "; ".join(f"{name} {us:.0f}" for name, us in spent[:25]))
