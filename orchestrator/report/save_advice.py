"""Advice after a failed save: whether its disk is full, and what the user can do about it."""

from __future__ import annotations

import shutil
from pathlib import Path

LOW_BYTES = 64 << 20
"""A disk with less counts as full while the size of a checkpoint is not known."""


def advice(checkpoints: Path, state_bytes: int) -> str | None:
    """What to do if the disk has too little room for a checkpoint; None if it has room, so that the save failed for another reason.

    Args:
        checkpoints: the run's folder of checkpoints, which need not exist yet.
        state_bytes: size of one checkpoint; 0 while it is not known.
    """
    free = free_bytes(checkpoints)
    if free is None or free >= max(1.1 * state_bytes, LOW_BYTES if not state_bytes else 0):
        return None
    return (
        f"free some space in {checkpoints}; or give the plan another checkpoint.dir, or a smaller checkpoint.disk,"
        " so that fewer checkpoints are kept"
    )


def free_bytes(folder: Path) -> int | None:
    """Free bytes on the disk of a folder, or of the nearest folder above it that exists; None if it cannot be read."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
