"""Folders that are nested deeper than os.walk, shutil.rmtree and the length of a path allow."""

from __future__ import annotations

import os
from pathlib import Path


def make_deep(top: Path, depth: int = 1200) -> None:
    """A folder in a folder, so many times, below `top`."""
    at = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
