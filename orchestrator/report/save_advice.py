"""A save that failed: whether its disk is full, and what a person can do about it."""

from __future__ import annotations

import shutil
from pathlib import Path

LOW_BYTES = 64 << 20
"""Less than this is called full where the size of a checkpoint is not known."""


def advice(checkpoints: Path, state_bytes: int) -> str | None:
    """What to do where too little is free for a checkpoint; None where the disk has room, so that something else was wrong.

    Args:
        checkpoints: the run's folder of checkpoints, which need not exist yet.
        state_bytes: of one checkpoint; 0 while it is not known.
    """
    free = free_bytes(checkpoints)
    if free is None or free >= max(1.1 * state_bytes, LOW_BYTES if not state_bytes else 0):
        return None
    return (
        f"free some space in {checkpoints}; or give the plan another checkpoint.dir, or a smaller checkpoint.disk,"
        " so that fewer checkpoints are kept"
    )


def free_bytes(folder: Path) -> int | None:
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
