"""Identity of a process: its pid, its start time in clock ticks, and the boot. A pid alone is reused by the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path


def boot_id() -> str:
    """The kernel's random id of this boot; "unknown" where /proc does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def stat_fields(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from the third one on, the state; see proc(5). Raises: OSError."""
    # the name before them is in parentheses and may hold any bytes: spaces, parentheses, a letter that the kernel has cut
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if fields[0] in b"ZX" else int(fields[19])


def start_time_s(pid: int) -> float | None:
    """Start time of a living process in seconds of CLOCK_BOOTTIME; None if it is gone or a zombie."""
    ticks = start_ticks(pid)
    return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def is_alive(pid: int | None, ticks: int | None, boot: str) -> bool:
    """Whether the very process of that pid, start time and boot is alive."""
    return pid is not None and ticks is not None and boot == boot_id() and start_ticks(pid) == ticks


def has_open_file(pid: int, path: Path) -> bool:
    """Whether a process has the file at `path` open, or a file that was at `path` and was deleted since.

    The kernel updates the name of an open file when its folder is moved, so a copy of the folder is never mistaken for it.
    True where the process may not be inspected: then there is no evidence against it.
    """
    name = os.path.join(os.path.realpath(path.parent), path.name)
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if _is_link_to(Path(entry.path), name, path):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False


PR_SET_NAME = 15  # prctl(2)


def name_rank(rank: int) -> None:
    """Give this process the name by which `rank_of` knows it; `ps` and `top` show it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, f"rank{rank}".encode())


def rank_of(pid: int) -> int | None:
    """The rank of a process that torchrun has started; None before it has become one: until then it is a copy of torchrun.

    A forked rank has its name, and the environment of torchrun in /proc; one that was started anew has its own environment.
    """
    try:
        name = Path(f"/proc/{pid}/comm").read_bytes().strip()
        if name.startswith(b"rank") and name[4:].isdigit():
            return int(name[4:])
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((int(item[5:]) for item in environment if item.startswith(b"RANK=")), None)
    except (OSError, ValueError):
        return None


def _is_link_to(link: Path, name: str, path: Path) -> bool:
    return str(link.readlink()).removesuffix(" (deleted)") == name or link.samefile(path)
