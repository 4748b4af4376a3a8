"""How much memory this process's machine, container or job has left."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """What can be had without swapping: the host's, or less where a control group bounds us (its page cache can be had)."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_of_groups()])


def _of_groups() -> list[int]:
    """Of our control group and those above it: version 2, else version 1's memory controller."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _up(CGROUP, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUP / "memory"
            found += _up(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found


def _up(root: Path, path: str, limit: str, used: str, cache: str) -> list[int]:
    folder, found = root / path.lstrip("/"), []
    while True:
        try:
            bound = int((folder / limit).read_text())  # "max" is no number
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(max(bound - int((folder / used).read_text()) + int(stat.get(cache, 0)), 0))
        except (OSError, ValueError):
            pass
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent
