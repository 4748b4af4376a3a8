"""How much memory this process's machine, container or job has left."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """What can be had without swapping: the host's, or less where a control group bounds us (its page cache can be had)."""
    return free_and_total()[0]


def free_and_total() -> tuple[int, int]:
    """The same, and what it is free of: of the host, or of the control group that leaves least."""
    import psutil

    host = psutil.virtual_memory()
    return min([(int(host.available), int(host.total)), *_of_groups()])


def kernel_kills() -> int:
    """Processes of our control group that the kernel has killed for want of memory, so far; the whole machine's without one."""
    for version, root, path in _groups():
        for folder in (root / path.lstrip("/"), root):  # in a container the mount itself may be our group
            try:
                return _counted((folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text())
            except (OSError, KeyError):
                continue
    try:
        return _counted(Path("/proc/vmstat").read_text())
    except (OSError, KeyError):
        return 0


def _counted(text: str) -> int:
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def _of_groups() -> list[tuple[int, int]]:
    """Free and bound of our control group and those above it."""
    found = []
    for version, root, path in _groups():
        if version == 2:
            found += _up(root, path, "memory.max", "memory.current", "inactive_file")
        else:
            found += _up(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return found


def _groups() -> list[tuple[int, Path, str]]:
    """Version, root and path of our control group, of each version that may bound memory."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    first = [(1, CGROUP / "memory", path) for _, controllers, path in lines if "memory" in controllers.split(",")]
    return first + [(2, CGROUP, path) for _, controllers, path in lines if not controllers]


def _up(root: Path, path: str, limit: str, used: str, cache: str) -> list[tuple[int, int]]:
    folder, found = root / path.lstrip("/"), []
    while True:
        try:
            bound = int((folder / limit).read_text())  # "max" is no number
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = max(bound - int((folder / used).read_text()) + int(stat.get(cache, 0)), 0)
            found.append((free, bound))
        except (OSError, ValueError):
            pass
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent
