"""Who a process is: a pid alone is no identity, so it goes with its start in clock ticks and the boot it belongs to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def started_ticks(pid: int) -> int | None:
    """When a living process was started, in clock ticks since boot; None for one that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def started_s(pid: int) -> float | None:
    """The same in seconds of CLOCK_BOOTTIME."""
    ticks = started_ticks(pid)
    return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int | None, ticks: int | None, boot: str) -> bool:
    return pid is not None and ticks is not None and boot == boot_id() and started_ticks(pid) == ticks


def has_open(pid: int, path: Path) -> bool:
    """Whether a process has the file at `path` open, or one that lay there and was deleted since.

    The kernel keeps the name of an open file up to date when its folder is moved: a copy of the folder is never taken for it.
    True where the process may not be asked: then nothing is known against it.
    """
    place = os.path.join(os.path.realpath(path.parent), path.name)
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(entry.path).removesuffix(" (deleted)") == place or os.path.samefile(entry.path, path):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False
