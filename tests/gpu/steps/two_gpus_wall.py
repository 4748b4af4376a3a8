"""The time limit of a session on two GPUs."""

from __future__ import annotations

from datetime import datetime

from gpu import training
from gpu.step import Probes, Report

probes = Probes()


@probes(limit_s=110, quick=False)
def saved_and_gone_by_the_wall(report: Report) -> None:
    """Both ranks stop at the same step, save, leave the process group, and have ended by the wall."""
    before, wall_s = training.gpu_memory_used(), 50 if report.is_on_gpu else 32
    kgorch, plan = training.make_run(
        report, {"epochs": 100_000, "pause": 0.02}, count=2, wall=f"{wall_s}s", margin="5s"
    )
    code = training.wait_for_end(kgorch.background("start", plan), report.left_s - 10)
    status = kgorch.status()
    report.check("exit status", code, 10)
    end, wall = (datetime.fromisoformat(status["session"][key]).timestamp() for key in ("ended_at", "wall_at"))
    report.at_most("the session's end after its wall", end - wall, 0.0)
    checkpoint_step = (status["checkpoint"] or {}).get("step")
    report.check("the step that is saved", checkpoint_step, status["step"])
    training.see_memory_given_back(report, before)
