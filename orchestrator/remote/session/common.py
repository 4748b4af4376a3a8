"""What the modules of the program share: names of files, the end of a session, what is printed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MARKER_NAME, RECORD_NAME, LOG_NAME = "kgorch-bundle.json", "kgorch-session.json", "kgorch.log"
MAX_JSON_BYTES = 4 << 20

Order = Any  # the JSON table that bootstrap.py renders


class Ended(Exception):
    """The session is over. Attributes: outcome: as in the record; message: why, for a person."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome, self.message = outcome, message


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # a closed stdout, or a signal in the midst of a print
        print(f"kgorch session: {text}", flush=True)


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat()


def container_age_s() -> float:
    """Seconds since the place started the container; 0 where that is not known. A place's time limit counts from there."""
    if "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        return 0.0
    try:
        ticks = int(Path("/proc/1/stat").read_bytes().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def read_table(path: Path) -> dict[str, Any]:
    """A JSON table. Raises: OSError, ValueError."""
    if path.is_symlink() or path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is a link or too large")
    table = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(table, dict):
        raise ValueError(f"{path} is no table")
    return table
