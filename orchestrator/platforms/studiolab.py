"""SageMaker Studio Lab: four GPU hours a session and a day; the home folder outlives it."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

HOME = "home/studio-lab-user"
PROFILE = Profile(
    name="studiolab",
    wall_s=4 * 3600.0,
    home=Path("/") / HOME / "kgorch",
    disk_bytes=15 * 10**9,
    began="container",
    quota_hours=4.0,
    quota_resets="rolling 24h",
    sources_of_figures="4 h a session and in 24 h, 15 GB: users' reports, read 2026-11-20; CPU sessions last longer",
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    try:
        return (root / HOME).is_dir()
    except PermissionError:  # on other machines /home may be closed to us
        return False
