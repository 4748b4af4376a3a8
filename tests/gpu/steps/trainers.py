"""Unmodified programs of Trainer libraries on one GPU: stopped once and killed once, they end with the bits of an uncut run.

A program starts four times, and its imports alone took 15 s (Accelerate) to 26 s (Lightning) on a machine with an H100: with
80 s for a program, none came to its end there.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from harness import Kgorch

from gpu.step import Probes, Report

probes = Probes()
PROGRAMS = {
    "transformers": ("with_transformers.py", {"save_steps": 20}),
    "lightning": ("with_lightning.py", {"save_steps": 20}),
    "accelerate": ("with_accelerate.py", {}),
}
DETERMINISTIC = 'deterministic = "warn"\n'


def unmodified_program(library: str, report: Report) -> None:
    """A program of this library: alone, then in three sessions."""
    if importlib.util.find_spec(library) is None:
        report.skip(f"{library}: bits", "not installed")
        return
    program, args = PROGRAMS[library]
    alone, plan = _make(report, f"{library}-alone", program, args, spread_s=0.0)
    alone("start", plan, timeout_s=report.left_s / 3)
    steps = alone.status()["step"]
    cut, plan = _make(report, f"{library}-cut", program, args, spread_s=0.25)
    cut.stop_and_kill(plan, steps, within_s=60)
    report.check(f"{library}: attempts of the run that was cut", _outcomes(cut), ["stopped", "lost", "finished"])
    same = cut.export() == alone.export()
    report.check(f"{library}: bytes of the final state are those of the uncut run, {steps} steps", same)
    report.check(f"{library}: what follows the training is the same", _after(cut), _after(alone))
    report.check(f"{library}: device", _after(cut).split()[-1], report.device)


def _make(report: Report, name: str, program: str, args: dict[str, Any], *, spread_s: float) -> tuple[Kgorch, str]:
    folder = report.folder / name
    folder.mkdir()
    env = {"DEVICE": report.device, "SPREAD_S": str(spread_s)}
    kgorch = Kgorch(folder, report.folder / f"{name}-home", extra_env=env)
    plan = kgorch.plan(program, args=args, every="2s")
    plan.write_text(DETERMINISTIC + plan.read_text())
    return kgorch, str(plan)


def _outcomes(kgorch: Kgorch) -> list[str]:
    return [attempt["outcome"] for session in kgorch.history() for attempt in session["attempts"]]


def _after(kgorch: Kgorch) -> str:
    return (kgorch.folder / "out" / "after.txt").read_text()


for _library in PROGRAMS:
    probes(limit_s=190, quick=False, name=_library)(functools.partial(unmodified_program, _library))
