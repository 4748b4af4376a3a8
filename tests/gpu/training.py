"""Starts the trainings of programs/, as ranks without a supervisor or by `kgorch start`, and reads their logs and records."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ranks
from harness import Kgorch
from ranks import Attempt

from gpu.step import Report
from kgorch.checkpoint.folder import readable_checkpoints

PROGRAMS = Path(__file__).parent / "programs"
STEP = re.compile(r"step (\d+) microbatch (\w+) loss (\S+)")


def train(
    report: Report, name: str, args: Mapping[str, Any], *, count: int = 1, program: str = "train.py", **options: Any
) -> Attempt:
    """Run a program of this package on `count` ranks to its end, without a supervisor.

    Operations are deterministic by default: on a GPU PyTorch is told so (`deterministic = "warn"`). A CPU does not need that, and
    PyTorch would import its compiler, 4 s a rank.

    Args:
        options: of the launch (LaunchSpec), and `timeout_s`.
    """
    options = {"deterministic": "warn" if report.is_on_gpu else "off"} | options
    timeout_s = options.pop("timeout_s", max(report.left_s - 10.0, 10.0))
    return ranks.run(report.folder / name, str(PROGRAMS / program), count, dict(args), timeout_s=timeout_s, **options)


def see_that_it_ended(report: Report, attempt: Attempt, check: str) -> bool:
    """Check that all ranks ended with status 0. If not, print the ends of their logs."""
    well = attempt.codes == [0] * len(attempt.codes)
    report.check(check, error_of(attempt) if not well else "exit status 0", "exit status 0", ok=well)
    if not well:
        print(attempt.said(), flush=True)
    return well


def error_of(attempt: Attempt) -> str:
    """Exit status and recorded error of each rank."""
    errors = []
    for rank, code in enumerate(attempt.codes):
        record = attempt.folder / f"rank{rank}.status.json"
        error = json.loads(record.read_text()).get("error") if record.exists() else None
        errors.append(
            f"rank {rank}: {code} " + (f"{error['type']}: {error['message'][:200]}" if error else "no record")
        )
    return "; ".join(errors)


def steps_of(attempt: Attempt, rank: int = 0) -> list[tuple[int, str, str]]:
    """(step, microbatch, loss) of each step; microbatch and loss as text."""
    return [(int(m[1]), m[2], m[3]) for line in attempt.lines(rank) if (m := STEP.match(line))]


def facts_of(attempt: Attempt, rank: int = 0) -> dict[str, Any]:
    """The lines "facts {…}" of a rank's log, merged."""
    return facts_in("\n".join(attempt.lines(rank)))


def facts_in(log: str) -> dict[str, Any]:
    """The lines "facts {…}" of a log, merged."""
    result: dict[str, Any] = {}
    for line in log.splitlines():
        if line.startswith("facts "):
            result |= json.loads(line.removeprefix("facts "))
    return result


def memory_of(attempt: Attempt, rank: int = 0) -> list[list[int]]:
    """[allocated, reserved] bytes after each step."""
    lines = attempt.lines(rank, starting="memory ")
    return json.loads(lines[-1].removeprefix("memory ")) if lines else []


def checkpoint_of(attempt: Attempt) -> Path:
    """The newest checkpoint."""
    return next(readable_checkpoints(attempt.folder / "checkpoints" / "train"))[0]


def schedule_of(attempt: Attempt) -> list[dict[str, Any]]:
    """The schedule (LaunchSpec.schedule) of a run that uses the microbatches of this one from the same steps on."""
    from kgorch.core.memory.memory_ladder import Settings

    schedule, before = [], "None"
    for step, microbatch, _ in steps_of(attempt):
        if microbatch != before:
            settings = Settings(microbatch=None if microbatch == "None" else int(microbatch))
            schedule.append({"step": step, "settings": settings.as_dict()})
            before = microbatch
    return schedule


def make_run(
    report: Report,
    args: Mapping[str, Any],
    *,
    count: int = 1,
    name: str = "work",
    program: str = "train.py",
    **plan: Any,
) -> tuple[Kgorch, str]:
    """kgorch with a new state folder, and the path of a plan for a program of this package."""
    folder = report.folder / name
    folder.mkdir()
    kgorch = Kgorch(folder, report.folder / f"{name}-home")
    path = kgorch.plan(program, ranks=count, args=dict(args), **plan)
    shutil.copy(PROGRAMS / program, folder)
    return kgorch, str(path)


def wait_for_end(process: subprocess.Popen[str], within_s: float) -> int | None:
    """The exit status; None when it has not ended in time. Its output goes to the log of the step."""
    try:
        output, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        return None
    print(output[-4000:], flush=True)
    return process.returncode


def records_of(attempt_folder: Path) -> dict[int, dict[str, Any]]:
    """rankK.status.json of each rank that wrote one."""
    result = {}
    for path in attempt_folder.glob("rank*.status.json"):
        record = json.loads(path.read_text())
        result[int(record["rank"])] = record
    return result


def gpu_memory_used() -> int | None:
    """Bytes in use on all visible GPUs, by any process, according to NVML; None without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = [int(item) for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.isdigit()]
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in visible]
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    except Exception:  # no driver, or none that tells
        return None


def see_memory_given_back(report: Report, before: int | None, *, slack_bytes: int = 256 << 20) -> None:
    """Check that the GPU memory in use returns to `before` within half a minute."""
    if not report.on_gpu("GPU memory is given back"):
        return
    if before is None:
        report.skip("GPU memory is given back", "NVML does not answer")
        return
    used, until = gpu_memory_used(), time.monotonic() + 30.0
    while used is not None and used > before + slack_bytes and time.monotonic() < until:
        time.sleep(0.5)
        used = gpu_memory_used()
    report.at_most("GPU memory is given back", (used or 0) / 2**20 - before / 2**20, slack_bytes / 2**20, "MiB more")
