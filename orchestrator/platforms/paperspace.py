"""Paperspace Gradient notebooks: six hours on free machines; /storage outlives them."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

PROFILE = Profile(
    name="paperspace",
    wall_s=6 * 3600.0,
    home=Path("/storage/kgorch"),
    disk_bytes=5 * 10**9,
    began="container",
    sources_of_figures="6 h, 5 GB: the free tier in Paperspace's documentation, read 2026-11-20; paid machines run on",
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return any(name in environ for name in ("PAPERSPACE_NOTEBOOK_ID", "PAPERSPACE_NOTEBOOK_REPO_ID"))
