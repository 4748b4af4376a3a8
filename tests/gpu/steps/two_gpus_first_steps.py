"""Any training on two GPUs."""

from __future__ import annotations

from gpu import training
from gpu.step import Probes, Report

probes = Probes()


@probes(limit_s=110, quick=False)
def first_steps(report: Report) -> None:
    """Two ranks train to the end, over NCCL, and the drain protocol can count."""
    kgorch, plan = training.make_run(
        report, {"epochs": 4, "amp": "fp16"}, count=2, extra='[memory]\nladder = ["microbatch/2"]'
    )
    process = kgorch("start", plan, code=None, timeout_s=report.left_s - 5)
    report.check("exit status", process.returncode, 0)
    print(process.stdout[-3000:], process.stderr[-3000:], kgorch.logs() if process.returncode else "", flush=True)
    for rank in (0, 1):
        facts = training.facts_in((kgorch.attempt() / f"rank{rank}.log").read_text())
        report.check(f"the drain protocol on rank {rank}", facts.get("way"), "drain")
        report.note(f"sequence number of the backend on rank {rank}", facts.get("sequence"))
        if report.on_gpu(f"backend of rank {rank}", f"device of rank {rank}"):
            report.check(f"backend of rank {rank}", facts.get("backend"), "ProcessGroupNCCL")
            report.check(f"device of rank {rank}", facts.get("device"), f"cuda:{rank}")
    report.check("steps", kgorch.status()["step"], 24)
