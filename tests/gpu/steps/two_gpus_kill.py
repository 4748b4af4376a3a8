"""SIGKILL of a rank, of torchrun, and of everything, in a training on two GPUs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
from harness import Kgorch, wait_until

from gpu import training
from gpu.step import Probes, Report

probes = Probes()
NEXT_STEP_S = 45.0
"""To a new launch's next step: torchrun, PyTorch, CUDA and NCCL take some 15 s to start."""


@probes(limit_s=290, quick=False)
def kills(report: Report) -> None:
    before, files = training.gpu_memory_used(), _nccl_files()
    kgorch, plan = training.make_run(report, {"epochs": 100_000, "pause": 0.05, "tells": True}, count=2, every="600s")
    supervisor = kgorch.background("start", plan)
    kgorch.wait_for_step(20, within_s=90)
    for victim in ("rank1", "torchrun", "everything") if report.is_on_gpu else ("rank1",):
        with report.guard(f"seconds to the next step after SIGKILL of {victim}", f"at most {NEXT_STEP_S:g} s"):
            step, attempt, began_s = kgorch.status()["step"], kgorch.attempt().name, time.monotonic()
            if victim == "everything":
                pids = list(kgorch.pids().values())
                kgorch.kill_everything()
                wait_until(lambda pids=pids: not any(map(psutil.pid_exists, pids)), within_s=30, what="the end of all")
                supervisor = kgorch.background("start", plan)
            else:
                os.kill(kgorch.pids()[victim], signal.SIGKILL)
            steps_lost = wait_until(
                lambda attempt=attempt, step=step: _trains_again(kgorch, attempt, step),
                within_s=2 * NEXT_STEP_S,
                what="a step of the next attempt",
            )
            report.at_most(
                f"seconds to the next step after SIGKILL of {victim}", time.monotonic() - began_s, NEXT_STEP_S
            )
            report.note(f"steps lost after SIGKILL of {victim}", steps_lost)
    kgorch("stop")
    report.check("exit status after a stop", training.wait_for_end(supervisor, 60), 10)
    training.see_memory_given_back(report, before)
    report.note("files of NCCL left in /dev/shm", sorted(_nccl_files() - files))


def _trains_again(kgorch: Kgorch, attempt: str, step: int) -> str:
    """How many steps were lost, once an attempt after this one has trained; empty before."""
    log = kgorch.attempt() / "rank0.log"
    if log.parent.name == attempt or not log.exists():
        return ""
    first = re.search(r"^at step (\d+)$", log.read_text(), re.MULTILINE)
    return f"{max(step - int(first[1]), 0)} of {step}" if first else ""


def _nccl_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("nccl-*")}
