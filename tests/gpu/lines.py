"""A plug-in of pytest that writes the outcome of each test as a JSON line as soon as it is known (delegate.py)."""

from __future__ import annotations

import json
import os
import time
from typing import Any

VARIABLE = "KGORCH_GPU_LINES"


def _write(**line: Any) -> None:
    """With pytest-xdist only the controlling process writes: it receives the reports of all workers."""
    if (path := os.environ.get(VARIABLE)) and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(what="began", test=_short(nodeid), at_s=time.monotonic())


def pytest_runtest_logreport(report: Any) -> None:
    _write(what="ended", test=_short(report.nodeid), when=report.when, outcome=report.outcome, reason=_reason(report))


def _short(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _reason(report: Any) -> str:
    """Why the test failed or was skipped, in one line."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return " ".join(f"{crash.message} ({os.path.basename(crash.path)}:{crash.lineno})".split())[:400]  # noqa: PTH119
    return str(report.longrepr or "")[-400:] if report.outcome == "failed" else ""
