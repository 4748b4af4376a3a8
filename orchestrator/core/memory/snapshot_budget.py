"""How much host memory the snapshots of a training's state may take.

A snapshot lies in a buffer in shared memory. Two buffers: one always holds a whole snapshot, so a crash resumes from memory.
One: saves are copied aside, and a crash resumes from disk. None: the buffers are files, which the kernel may write out at any
time, so a save may have to wait for the disk.
"""

from __future__ import annotations

FREE_SHARE = 0.4
"""Share of the free memory that stays free: the page cache of the data and the next stage need memory, too."""


def buffer_count(need_bytes: int, free_bytes: int, bound_bytes: int | None = None) -> tuple[int, str]:
    """How many buffers to hold, 0 to 2, and in words why not two.

    Args:
        need_bytes: of one buffer, all ranks together.
        free_bytes: of host memory, before any buffer.
        bound_bytes: the plan's `checkpoint.memory`; None for none.
    """
    room = (1 - FREE_SHARE) * free_bytes
    if bound_bytes is not None:
        room = min(room, bound_bytes)
    count = min(int(room // max(need_bytes, 1)), 2)
    if count == 2:
        return 2, ""
    what = "no snapshots between saves" if count else "saves go through files, not through memory"
    whose = (
        "the plan's checkpoint.memory allows" if bound_bytes is not None and room == bound_bytes else "this host allows"
    )
    return count, f"{what}: two copies of the state take {2 * need_bytes >> 20} MiB, {whose} {int(room) >> 20}"
