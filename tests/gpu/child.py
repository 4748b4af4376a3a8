"""The process of one step: `python -m gpu.child STEP MODULE OUT DEVICE GPUS LIMIT_S [PROBE …]`, started by runner.py.

It imports PyTorch once and forks a process for each probe, which saves the import in each. CUDA does not survive a fork, so this
process must not initialise it: `torch.cuda.is_available()` is already too much.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from gpu.processes import VARIABLE, end_all
from gpu.step import Probe, Report

MARGIN_S = 10.0
"""Seconds of a step's limit that are reserved for killing what a probe has started."""

SLOWER_CPU = 2.0
"""A rehearsal shares a few cores with other work: the limits, which are meant for a machine with a GPU, are this much longer."""

QUICK = "quick"
"""Selects the probes that are `quick`, in place of a probe's name."""


def main(step: str, module: str, out: Path, device: str, gpus: int, limit_s: float, names: list[str]) -> None:
    until = time.monotonic() + limit_s - MARGIN_S

    def report(probe: str, folder: Path, left_s: float) -> Report:
        return Report(out, step, probe, device=device, folder=folder, gpus=gpus, left_s=left_s)

    try:
        probes = _select(importlib.import_module(module).probes.all, names)
    except Exception as error:
        traceback.print_exc()
        report("", out.parent, 0).record_exception(error)
        return
    if not probes:
        report("", out.parent, 0).skip("rehearses in seconds", "none of its probes does")
    for probe in probes:
        folder = Path(tempfile.mkdtemp(prefix="kgorch-gpu-"))
        most_s = probe.limit_s * (1.0 if device == "cuda" else SLOWER_CPU)
        left_s = min(most_s, until - time.monotonic())
        if left_s < min(most_s, 5.0):
            report(probe.name, folder, 0).skip("runs", f"the {limit_s:.0f} s of the step are used up")
        else:
            _run(probe, report(probe.name, folder, left_s))
        shutil.rmtree(folder, ignore_errors=True)


def _select(probes: list[Probe], names: list[str]) -> list[Probe]:
    if names == [QUICK]:
        return [probe for probe in probes if probe.quick]
    known = {probe.name: probe for probe in probes}
    if unknown := [name for name in names if name not in known]:
        raise LookupError(f"no probe {', '.join(unknown)}; there are: {', '.join(known)}")
    return [probe for probe in probes if not names or probe.name in names]


def _run(probe: Probe, report: Report) -> None:
    print(f"── {probe.name}", flush=True)
    began_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _in_child(probe, report)
    status = _wait_for(pid, max(report.left_s - 2.0, 1.0))
    if status is None:
        os.kill(pid, signal.SIGUSR1)
        status = _wait_for(pid, 2.0)
    if status is None:
        report.check("ends", f"did not end within {report.left_s:.0f} s", f"within {report.left_s:.0f} s")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    elif os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        report.check("runs to its end", f"ended by {name}", "no signal")
    survivors = end_all(os.environ.get(VARIABLE, ""), exclude=[os.getpid()], within_s=MARGIN_S / 2)
    if survivors:
        report.check("leaves no process", f"pids {survivors} do not die", "none")
    if status is None:
        _wait_for(pid, 1.0)
    print(f"   {time.monotonic() - began_s:.1f} s", flush=True)


def _in_child(probe: Probe, report: Report) -> None:
    """Run the probe and exit hard: Python's own exit may wait for a device that hangs."""
    try:
        os.setsid()
        # Where a probe hangs, into the step's log. Not `dump_traceback_later`: its thread reads the frames of a running
        # interpreter, and ended a probe that was merely slow with SIGSEGV.
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        os.chdir(report.folder)
        probe.run(report)
    except BaseException as error:
        traceback.print_exc()
        report.record_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _wait_for(pid: int, within_s: float) -> int | None:
    """The wait status of a child; None when it has not ended in time."""
    until = time.monotonic() + within_s
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(0.02)


if __name__ == "__main__":
    step_, module_, out_, device_, gpus_, limit_, *names_ = sys.argv[1:]
    main(step_, module_, Path(out_), device_, int(gpus_), float(limit_), names_)
