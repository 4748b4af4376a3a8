"""The machine before the GPU is blamed: tests that need no GPU, with all of them hidden."""

from __future__ import annotations

from gpu import delegate
from gpu.step import Probes, Report

probes = Probes()


@probes(limit_s=185)
def tests_with_hidden_gpus(report: Report) -> None:
    delegate.run_tests(report, ["snapshots/test_snapshots.py", "worker/memory/test_ladder.py"], sees_gpu=False)
