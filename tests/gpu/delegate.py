"""Runs tests of the suite as part of a step. Each test becomes a check.

Outcomes are read from a file that a plug-in (lines.py) writes test by test: a report of pytest's own (JUnit XML) is written at the
very end, and would be lost when the step runs out of time. A rehearsal only collects the tests, which proves that the paths exist.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.lines import VARIABLE
from gpu.runner import ROOT, TESTS
from gpu.step import Report


def run_tests(
    report: Report,
    paths: Sequence[str],
    *,
    marks: str = "not soak and not slow",
    sees_gpu: bool = True,
    side_by_side: bool = True,
) -> None:
    """Run the tests of `paths` (files of tests/, or `file::test`) that have these marks."""
    if importlib.util.find_spec("pytest") is None:
        report.check("tests can be run", "pytest is not installed", "pytest")
        return
    lines = report.folder / "lines"
    lines.touch()
    command = [*_command(marks), *[str(TESTS / path) for path in paths]]
    if not report.is_on_gpu:
        _collect(report, command, paths)
        return
    # Not as a part of the pytest that this may run in, nor with its options.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {VARIABLE: str(lines)}
    env |= {"KGORCH_TEST_GPU": "1"} if sees_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    timeout_s = report.left_s - 5.0
    process = subprocess.Popen([*command, *(_side_by_side() if side_by_side else [])], cwd=ROOT, env=env)
    try:
        code: int | None = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        process.kill()
    _record(report, _read(lines), code, timeout_s)


def _command(marks: str) -> list[str]:
    """pytest without the project's options, which need plug-ins that a GPU machine may lack."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "gpu.lines",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    command += [
        "-o",
        "addopts=",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
        "-W",
        "ignore::pytest.PytestConfigWarning",
    ]
    return command + (["-m", marks] if marks else [])


def _side_by_side() -> list[str]:
    """Options for up to four tests at once, if pytest-xdist is installed: tests wait more than they compute."""
    at_once = min(4, (os.cpu_count() or 1) // 2)
    if at_once < 2 or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(at_once), "--dist", "worksteal"]


def _collect(report: Report, command: list[str], paths: Sequence[str]) -> None:
    process = subprocess.run(
        [*command, "--collect-only"], cwd=ROOT, capture_output=True, text=True, timeout=report.left_s
    )
    tests = [line for line in process.stdout.splitlines() if "::" in line]
    print(process.stdout, process.stderr, flush=True)
    for path in paths:
        count = sum(path in line for line in tests)
        report.check(
            f"{path} can be collected", f"{count} tests", "at least 1 test", ok=count > 0 and process.returncode == 0
        )
    report.skip(f"{len(tests)} tests of {len(paths)} paths", "only collected in a rehearsal")


def _read(lines: Path) -> list[dict[str, Any]]:
    entries = []
    for line in lines.read_text().splitlines():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def _record(report: Report, lines: list[dict[str, Any]], code: int | None, timeout_s: float) -> None:
    outcomes: dict[str, dict[str, Any]] = {}
    ended = [line for line in lines if line["what"] == "ended"]
    for line in ended:
        if outcomes.get(line["test"], {}).get("outcome") not in ("failed", "skipped"):
            outcomes[line["test"]] = line  # the first of set-up, call and tear-down that did not pass counts
    torn_down = {line["test"] for line in ended if line["when"] == "teardown"}
    for name, line in outcomes.items():
        if line["outcome"] == "skipped":
            report.skip(name, line["reason"] or "skipped by itself")
        elif line["outcome"] == "failed":
            report.check(name, line["reason"] or "failed", "passed")
        elif name in torn_down:
            report.check(name, "passed", "passed")
    starts = {line["test"]: line["at_s"] for line in lines if line["what"] == "began"}
    for name in starts.keys() - torn_down:
        if outcomes.get(name, {}).get("outcome", "passed") == "passed":  # of its set-up, or of nothing yet
            report.check(name, f"has not ended after {time.monotonic() - starts[name]:.0f} s", "passed")
    if code is None:
        report.check("the tests end", f"not within {timeout_s:.0f} s", f"within {timeout_s:.0f} s")
    elif code not in (0, 1):
        report.check("the tests run", f"pytest's exit status is {code}", "0, or 1 for tests that failed")
