"""Free memory and out-of-memory kills of the machine, container or job that this process runs in."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Bytes available without swapping: of the host, or of the control group if less; its page cache counts as free."""
    return free_and_total()[0]


def free_and_total() -> tuple[int, int]:
    """Free bytes as in `free_bytes`, and the total they belong to: the host's, or that of the tightest control group."""
    import psutil

    host = psutil.virtual_memory()
    return min([(int(host.available), int(host.total)), *_of_groups()])


def oom_kill_count() -> int:
    """Processes of our control group that the kernel has killed for want of memory; of the whole machine without a group."""
    for version, root, path in _groups():
        for folder in (root / path.lstrip("/"), root):  # in a container the mount itself may be our group
            try:
                return _oom_kills_in((folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text())
            except (OSError, KeyError):
                continue
    try:
        return _oom_kills_in(Path("/proc/vmstat").read_text())
    except (OSError, KeyError):
        return 0


def _oom_kills_in(text: str) -> int:
    """Raises: KeyError."""
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def _of_groups() -> list[tuple[int, int]]:
    """Free bytes and limit of our control group and of those above it."""
    rooms = []
    for version, root, path in _groups():
        if version == 2:
            rooms += _up(root, path, "memory.max", "memory.current", "inactive_file")
        else:
            rooms += _up(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return rooms


def _groups() -> list[tuple[int, Path, str]]:
    """Version, root and path of our control group, for each version of cgroups that may limit memory."""
    try:
        text = os.fsdecode(Path("/proc/self/cgroup").read_bytes())  # a group may have any name
    except OSError:
        return []
    lines = [line.split(":", 2) for line in text.split("\n") if line]
    # in a hybrid hierarchy version 1 has the memory controller, so it is first
    first = [(1, CGROUP / "memory", path) for _, controllers, path in lines if "memory" in controllers.split(",")]
    return first + [(2, CGROUP, path) for _, controllers, path in lines if not controllers]


def _up(root: Path, path: str, limit: str, used: str, cache: str) -> list[tuple[int, int]]:
    folder, rooms = root / path.lstrip("/"), []
    while True:
        try:
            bound = int((folder / limit).read_text())  # "max" is no number
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # the kernel frees inactive page cache before it kills a process
            free = max(bound - int((folder / used).read_text()) + int(stat.get(cache, 0)), 0)
            rooms.append((free, bound))
        except (OSError, ValueError):
            pass
        if folder == root or root not in folder.parents:
            return rooms
        folder = folder.parent
