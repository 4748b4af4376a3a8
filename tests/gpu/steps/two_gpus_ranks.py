"""Two GPUs, one, two again, over NCCL."""

from __future__ import annotations

from gpu import training
from gpu.step import Probes, Report
from gpu.steps.ranks import chain, compare_chain, precisions
from kgorch.checkpoint.folder import read_checkpoint

probes = Probes()


@probes(limit_s=220, quick=False)
def two_one_two(report: Report) -> None:
    for amp in precisions(report):
        args = {"amp": amp}
        parts = chain(report, amp, [2, 1, 2], args)
        whole = training.train(report, f"{amp}-whole", args, count=2, ladder=["microbatch/2"])
        compare_chain(report, f"2 → 1 → 2, {amp}", parts, whole)


@probes(limit_s=75, quick=False)
def sync_batchnorm(report: Report) -> None:
    """Its statistics are those of all ranks: one GPU takes the whole batch instead of playing both."""
    if not report.on_gpu("SyncBatchNorm cannot be divided", "one GPU goes on with it"):
        return
    first = training.train(report, "sync", {"norm": "sync"}, count=2, ladder=["microbatch/2"], stop_at=4)
    if training.see_that_it_ended(report, first, "two GPUs with SyncBatchNorm"):
        report.check("SyncBatchNorm cannot be divided", read_checkpoint(training.checkpoint_of(first)).divisible, False)
        resume = str(training.checkpoint_of(first))
        then = training.train(report, "sync-one", {"norm": "sync"}, ladder=["microbatch/2"], resume=resume)
        training.see_that_it_ended(report, then, "one GPU goes on with it")
