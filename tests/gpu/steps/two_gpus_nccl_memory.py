"""NCCL's own buffers do not fit."""

from __future__ import annotations

from gpu import training
from gpu.step import Probes, Report

probes = Probes()
LEFT_MIB = 50


@probes(limit_s=110, quick=False)
def first_all_reduce_on_a_full_gpu(report: Report) -> None:
    """With 50 MiB left NCCL manages, or the attempt ends soon with a record that says that memory ran out."""
    kgorch, plan = training.make_run(report, {"leave_mb": LEFT_MIB, "rank": 1, "epochs": 1}, count=2)
    supervisor = kgorch.background("start", plan)
    code = training.wait_for_end(supervisor, report.left_s - 10)
    records = {rank: record.get("error") or {} for rank, record in training.records_of(kgorch.attempt()).items()}
    texts = {
        rank: f"{error.get('type')}: {error.get('message', '')[:150]}, memory {error.get('memory')!r}"
        for rank, error in records.items()
    }
    is_known = any(error.get("memory") == "device" for error in records.values())
    report.check(
        "how the run ended", f"{code}, {texts}", "0, or a record of a lack of memory", ok=code == 0 or is_known
    )
