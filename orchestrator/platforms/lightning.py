"""Lightning AI Studios: credits instead of hours; a free Studio is restarted every few hours."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

PROFILE = Profile(
    name="lightning",
    wall_s=4 * 3600.0,
    home=Path("/teamspace/studios/this_studio/kgorch"),
    began="container",
    sources_of_figures=(
        "4 h: quoted for free Studios, not confirmed, read 2026-11-20; paid ones have no such end and say another"
        " [platform] wall. The folder of a Studio outlives its sessions (read 2026-11-20)"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "LIGHTNING_CLOUD_SPACE_ID" in environ
