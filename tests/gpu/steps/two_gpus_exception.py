"""An exception on one GPU while the other waits in an all-reduce."""

from __future__ import annotations

from gpu.step import Probes, Report
from gpu.steps.failures import see_failure

probes = Probes()


@probes(limit_s=110, quick=False)
def exception_on_rank_1(report: Report) -> None:
    """Rank 0 waits for its peer in its GPU's queue, where no signal reaches it."""
    see_failure(report, count=2, rank=1)
