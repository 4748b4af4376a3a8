"""The GPU figures of `kgorch status` against the driver's own, and which processes have a CUDA context."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from harness import Kgorch, processes_of, wait_until

from gpu import training
from gpu.step import Probes, Report

probes = Probes()
ASK = """
import json, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(int(__import__("sys").argv[1]))
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
print(json.dumps({"mem_used": memory.used, "mem_total": memory.total, "processes": len(processes),
                  "pids": [process.pid for process in processes]}))
"""
SLACK_BYTES = 64 << 20


def driver_says(env: Mapping[str, str], index: int) -> dict[str, Any]:
    """What NVML says of a GPU, asked by a process of its own."""
    process = subprocess.run(
        [sys.executable, "-c", ASK, str(index)], env=dict(env), capture_output=True, text=True, timeout=30, check=True
    )
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


@probes(limit_s=85, quick=False)
def status_against_the_driver(report: Report) -> None:
    """While a run trains, memory and processes are those of the driver, and only the rank has a CUDA context."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    index = int(first) if first.isdigit() else 0
    args = {"epochs": 100_000, "pause": 0.05}
    kgorch, plan = training.make_run(report, args, name="seen")
    if not report.is_on_gpu:
        if shutil.which("cc") is None:
            report.skip("figures of status", "a rehearsal needs a C compiler, for a driver of its own")
            return
        from driver import build

        kgorch.extra_env |= build(report.folder).env | {"CUDA_VISIBLE_DEVICES": "0"}
    supervisor = kgorch.background("start", plan)
    kgorch.wait_for_step(3, within_s=60)
    wait_until(lambda: f"gpu{index}.mem_used" in _figures(kgorch), within_s=30, what="figures of a GPU")
    now = driver_says(kgorch.env(), index)
    values = _figures_with(kgorch, f"gpu{index}.processes", now["processes"], within_s=15)
    for name in ("mem_used", "mem_total"):
        ours, theirs = values[f"gpu{index}.{name}"], now[name]
        is_near = abs(ours - theirs) <= SLACK_BYTES
        report.check(f"{name} of status", f"{ours / 2**20:.0f} MiB", f"{theirs / 2**20:.0f} MiB by NVML", ok=is_near)
    report.check("compute processes of status", values.get(f"gpu{index}.processes"), now["processes"])
    _see_contexts(report, kgorch, now)
    _see_nvidia_smi(report, index, now)
    kgorch("stop")
    report.check("exit status", training.wait_for_end(supervisor, 40), 10)


def _figures(kgorch: Kgorch) -> dict[str, float]:
    """The telemetry of status."""
    return (kgorch.try_status().get("telemetry") or {}).get("values", {})


def _figures_with(kgorch: Kgorch, key: str, value: float, *, within_s: float) -> dict[str, float]:
    """The telemetry once this key has this value, else the newest: processes are sampled every ten seconds."""
    until = time.monotonic() + within_s
    while (values := _figures(kgorch)).get(key) != value and time.monotonic() < until:
        time.sleep(0.5)
    return values


def _see_contexts(report: Report, kgorch: Kgorch, now: Mapping[str, Any]) -> None:
    """A context costs hundreds of MiB of the GPU: only the rank may have one."""
    names = {pid: name for name, pid in kgorch.pids().items()}
    names[kgorch.status()["session"]["supervisor"]["pid"]] = "supervisor"
    ours = {process.pid: names.get(process.pid, "another") for process in processes_of(kgorch.home)}
    if report.on_gpu("processes of the run with a CUDA context", "what the rank tells of its allocator"):
        found = sorted(ours[pid] for pid in now["pids"] if pid in ours)
        if found:
            report.check("processes of the run with a CUDA context", found, ["rank0"])
        else:
            report.skip("processes of the run with a CUDA context", "the driver lists none here, as in a container")
        values = kgorch.status()["telemetry"]["values"]
        report.check("what the rank tells of its allocator", values.get("rank0.alloc", 0) > 0)


def _see_nvidia_smi(report: Report, index: int, now: Mapping[str, Any]) -> None:
    """Note its answer beside NVML's, if the command is installed."""
    command = shutil.which("nvidia-smi")
    if not report.on_gpu("memory by nvidia-smi") or command is None:
        return
    command_line = [command, f"--id={index}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    process = subprocess.run(command_line, capture_output=True, text=True, timeout=30)
    report.note("memory by nvidia-smi", f"{process.stdout.strip()} MiB; NVML: {now['mem_used'] / 2**20:.0f} MiB")
