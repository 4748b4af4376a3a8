"""How much host memory the images of a training's state may take."""

from __future__ import annotations

LEAVES = 0.4
"""Of what is free, so much stays free: a loader's caches and the next stage want memory too."""


def images(need_bytes: int, free_bytes: int, bound_bytes: int | None = None) -> tuple[int, str]:
    """How many images of `need_bytes` (all ranks' together) to keep, and why not two.

    Two: one is always whole, so a crash goes on from memory. One: saves are copied aside, crashes go on from disk.
    None: images lie in files, which the kernel may write out, and a save may wait for the disk.

    Args:
        free_bytes: of host memory, before any image. bound_bytes: the plan's `checkpoint.memory`.
    """
    room = (1 - LEAVES) * free_bytes
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
