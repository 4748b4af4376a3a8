"""Rank 0 validates alone, with the other one in an all-reduce."""

from __future__ import annotations

from gpu import training
from gpu.step import Probes, Report

probes = Probes()
A_DAY_S = 86400.0


@probes(limit_s=140, quick=False)
def validation_on_rank_0(report: Report) -> None:
    """NCCL's watchdog must not end the run: its time-out is longer than any validation."""
    seconds = 40 if report.is_on_gpu else 1
    attempt = training.train(report, "alone", {"validate": seconds, "epochs": 3}, count=2)
    training.see_that_it_ended(report, attempt, f"a run in which rank 0 validates for {seconds} s ends")
    facts = training.facts_of(attempt)
    if "timeout_s" in facts:
        report.at_least("time-out of collectives", facts["timeout_s"], A_DAY_S, "s")
    else:
        report.skip("time-out of collectives", "this PyTorch does not tell")
