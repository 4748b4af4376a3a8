"""Ranks that fail or hang while their GPU is busy: the record, the end of all processes, the memory, and the next attempt."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import Kgorch, wait_until

from gpu import delegate, training
from gpu.step import Probes, Report

probes = Probes()
END_S = 10.0
"""Seconds from an exception to the end of all processes: 5 for the ranks (launch/failed_attempt.py), and torchrun's own end."""


def first_end(kgorch: Kgorch, within_s: float) -> Path:
    """The folder of the first attempt, once all its processes have ended."""
    end: Path = wait_until(
        lambda: next(iter(sorted(kgorch.home.glob("runs/*/*/attempts/1.1/exit.json"))), None),
        within_s=within_s,
        what="the end of the first attempt",
    )
    return end.parent


def seconds_to_end(folder: Path, mark: Path) -> float:
    """From the exception to the end of the last process of the attempt."""
    end = datetime.fromisoformat(json.loads((folder / "exit.json").read_text())["at"]).timestamp()
    return end - mark.stat().st_mtime


def see_failure(report: Report, *, count: int, rank: int) -> None:
    """A rank queues minutes of work on its GPU and raises: its record, the end of all within seconds, the next attempt."""
    name, mark, before = (
        f"{count} ranks" if count > 1 else "one rank",
        report.folder / f"mark{count}",
        training.gpu_memory_used(),
    )
    args = {
        "epochs": 8,
        "pause": 0.02,
        "fail": 6,
        "rank": rank,
        "once": str(report.folder / f"once{count}"),
        "mark": str(mark),
    }
    kgorch, plan = training.make_run(report, args, count=count, name=f"failing{count}", every="600s")
    supervisor = kgorch.background("start", plan)
    folder = first_end(kgorch, report.left_s / 2)
    report.at_most(f"from the exception to the end of all processes, {name}", seconds_to_end(folder, mark), END_S)
    records = training.records_of(folder)
    error = (records.get(max(rank, 0)) or {}).get("error", {})
    report.check(f"the failed rank's record, {name}", error.get("type", "none"), "ValueError")
    if count > 1:
        report.note(
            f"the other ranks' records, {name}", {r: (c.get("error") or {}).get("type") for r, c in records.items()}
        )
    code = training.wait_for_end(supervisor, report.left_s / 2)
    report.check(f"the next attempt finishes the run, {name}", code, 0)
    outcomes = [attempt["outcome"] for attempt in kgorch.history()[0]["attempts"]]
    report.check(f"attempts, {name}", outcomes, ["crashed", "finished"])
    training.see_memory_given_back(report, before)


@probes(limit_s=80, quick=False)
def exception_with_a_busy_device(report: Report) -> None:
    see_failure(report, count=1, rank=-1)


@probes(limit_s=90, quick=False)
def exception_on_one_of_two(report: Report) -> None:
    if report.on_gpu("exception on rank 1 of two that share the GPU"):
        see_failure(report, count=2, rank=1)


@probes(limit_s=90, quick=False)
def hang_in_the_device(report: Report) -> None:
    """A rank waits for a kernel that does not end, where no stop and no signal reach it. The session ends by its wall."""
    wall_s = 45 if report.is_on_gpu else 30
    before, mark = training.gpu_memory_used(), report.folder / "mark"
    args: dict[str, Any] = {"epochs": 1000, "pause": 0.25, "hang": 24, "mark": str(mark)}
    kgorch, plan = training.make_run(report, args, name="hanging", every="600s", wall=f"{wall_s}s", margin="6s")
    supervisor = kgorch.background("start", plan)
    wait_until(mark.exists, within_s=wall_s - 6, what="the hang")
    kgorch.background("stop")  # the rank cannot see it: its main thread waits in CUDA
    code = training.wait_for_end(supervisor, report.left_s - 10)
    status = kgorch.status()
    report.check("exit status at the wall", code, 10)
    end, wall = (datetime.fromisoformat(status["session"][key]).timestamp() for key in ("ended_at", "wall_at"))
    report.at_most("the session's end after its wall", end - wall, 0.0)
    report.check("a checkpoint is there", bool(status["checkpoint"]))
    report.note("why", status["why"])
    training.see_memory_given_back(report, before)


@probes(limit_s=100, quick=False)
def hang_that_is_found(report: Report) -> None:
    """The same without a stop: the hang is detected, stacks are kept, and the next attempt finishes the run."""
    if not report.on_gpu(
        "a hang in the device is found", "its stacks name the waiting line", "the next attempt finishes"
    ):
        return
    args = {"epochs": 4, "hang": 6, "once": str(report.folder / "once")}
    extra = '[health]\nhang = { step = "6s" }'
    kgorch, plan = training.make_run(report, args, name="found", every="600s", extra=extra)
    began_s = time.monotonic()
    code = training.wait_for_end(kgorch.background("start", plan), report.left_s - 5)
    attempts = kgorch.history()[0]["attempts"]
    report.check("a hang in the device is found", [attempt["outcome"] for attempt in attempts], ["hung", "finished"])
    report.check(
        "its stacks name the waiting line", attempts[0]["cause"], "train.py", ok="train.py" in str(attempts[0]["cause"])
    )
    report.check("the next attempt finishes", code, 0)
    report.note("seconds in all", f"{time.monotonic() - began_s:.0f}")


@probes(limit_s=200)
def tests_with_the_gpu(report: Report) -> None:
    """Those whose programs train on the rank's device; the others put their model on the CPU."""
    delegate.run_tests(
        report,
        [
            "snapshots/test_keeper.py",
            "sessions/test_sessions.py::test_a_session_is_saved_on_request_stopped_and_gone_on_with",
            "sessions/test_sessions.py::test_the_wall_is_met_with_a_verified_save_and_the_next_start_goes_on",
            "sessions/test_sessions.py::test_without_a_supervisor_the_ranks_save_before_the_wall_by_themselves",
            "sessions/test_sessions.py::test_a_sigterm_to_the_launcher_saves_and_suspends_also_with_loading_processes",
            "sessions/test_failures.py::test_what_is_killed_is_launched_again_and_leaves_no_orphan",
            "sessions/test_failures.py::test_training_left_over_from_a_session_that_is_over_is_ended_before_the_next_begins",
        ],
        marks="not slow",
    )
