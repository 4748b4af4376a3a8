"""Runs one step in a process of its own, and kills everything that it started when its time is over."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.child import SLOWER_CPU
from gpu.processes import VARIABLE, end_all
from gpu.step import DIFFERS, SKIPPED, Check, Step, read_checks

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a step.

    Attributes:
        at: the date.
        skipped: why it did not run; empty when it did.
        log: path of the output of its processes.
    """

    step: Step
    checks: Sequence[Check] = ()
    took_s: float = 0.0
    at: str = ""
    skipped: str = ""
    log: str = ""

    @property
    def differing(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == DIFFERS]

    @property
    def not_looked_at(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == SKIPPED]

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step.name,
            "looks_for": self.step.looks_for,
            "skipped": self.skipped,
            "took_s": round(self.took_s, 1),
            "at": self.at,
            "checks": [check.as_dict() for check in self.checks],
        }


def run(
    step: Step, probes: Sequence[str] = (), *, device: str, gpus: int, logs: Path, limit_s: float | None = None
) -> Result:
    """Run the probes (all, if none is named) and return their checks; a step that had to be killed has one more, that differs."""
    limit_s = limit_s or step.limit_s * (1.0 if device == "cuda" else SLOWER_CPU)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{step.name}.log"
    token = secrets.token_hex(8)
    began_s, at = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="kgorch-gpu-") as folder, open(log, "wb") as output:
        out = Path(folder, "checks")
        command = [sys.executable, "-m", "gpu.child", step.name, step.module, str(out), device, str(gpus), str(limit_s)]
        process = subprocess.Popen(
            [*command, *probes],
            cwd=ROOT,
            env=environment(step, token, device=device),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ending = ""
        try:
            if process.wait(limit_s) != 0:
                ending = f"ended with status {process.returncode}, see {log}"
        except subprocess.TimeoutExpired:
            ending = f"did not end within {limit_s:.0f} s"
        finally:
            process.kill()
            end_all(token)
            process.wait()
        checks = read_checks(out)
    if ending:
        checks.append(Check(step.name, "", "ends", f"by itself, within {limit_s:.0f} s", ending, DIFFERS))
    if not checks:
        checks.append(Check(step.name, "", "writes checks", "some", f"none, see {log}", DIFFERS))
    return Result(step, tuple(checks), time.monotonic() - began_s, at, log=str(log))


def environment(step: Step, token: str, *, device: str, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A step sees only as many GPUs as it needs: ranks that are meant to share a GPU would each take their own."""
    paths = [str(TESTS), str(ROOT), environ.get("PYTHONPATH", "")]
    visible = [item for item in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
    visible = visible or [str(number) for number in range(step.gpus)]
    return {
        **environ,
        VARIABLE: token,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order, so that both number the GPUs alike
        "CUDA_VISIBLE_DEVICES": ",".join(visible[: step.gpus]) if device == "cuda" else "",
    }
