"""Who a process is: a pid alone is no identity, so it goes with its start in clock ticks and the boot it belongs to.

What an attempt has started bears the path of its launch in the environment, which children inherit: also those that have left
their session, and that no parent knows any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from orchestrator.protocol.launch_spec import LAUNCH_VARIABLE

GRACE_S, PATIENCE_S = 2.0, 10.0
"""What SIGTERM leaves to a helper of a training, and how long all of them may take to be gone: one may be stuck in the kernel."""


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
                if _is_file(Path(entry.path), place, path):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_file(link: Path, place: str, path: Path) -> bool:
    return str(link.readlink()).removesuffix(" (deleted)") == place or link.samefile(path)


def of_attempt(folder: Path) -> Iterator[int]:
    """Living processes of the attempt in that folder, whoever their parent is; without this one and those that it comes from.

    A process that has written over its own environment is not found.
    """
    variable, place = f"{LAUNCH_VARIABLE}=".encode(), os.path.realpath(folder / "launch.json")
    name = os.fsencode(folder.name) + b"/launch.json"
    ours = set(_ancestors())
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) not in ours:
            try:
                variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                continue
            told = next((item.removeprefix(variable) for item in variables if item.startswith(variable)), b"")
            if told.endswith(name) and os.path.realpath(os.fsdecode(told)) == place:
                yield int(entry.name)


def end_attempt(folder: Path) -> bool:
    """End what is left of the attempt in that folder. True when nothing is; safe to repeat."""
    began_s = time.monotonic()
    asked: set[tuple[int, int]] = set()
    while left := {(pid, ticks) for pid in of_attempt(folder) if (ticks := started_ticks(pid))}:
        waited_s = time.monotonic() - began_s
        if waited_s > PATIENCE_S:
            return False
        for pid, ticks in left if waited_s > GRACE_S else left - asked:
            if started_ticks(pid) == ticks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if waited_s > GRACE_S else signal.SIGTERM)
        asked |= left
        time.sleep(0.05)
    return True


def _ancestors() -> Iterator[int]:
    """This process, its parent, and so on."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
