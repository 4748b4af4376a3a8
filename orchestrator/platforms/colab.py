"""Google Colab. Its limits vary and are documented nowhere; only a mounted Drive outlives a session."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

DRIVE = "content/drive/MyDrive/kgorch"
PROFILE = Profile(
    name="colab",
    wall_s=12 * 3600.0,
    sources=(f"/{DRIVE}/**",),
    began="container",
    sources_of_figures=(
        "12 h: users' reports of the free tier, read 2026-11-20; no promise by the platform. Pro+ is reported at about 24 h;"
        " an idle session ends after about 90 minutes"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "COLAB_RELEASE_TAG" in environ


def next_session(run: str, environ: Mapping[str, str], root: Path) -> str:
    """What a person does so that the next session has this one's state: Drive has it, or has to get it now."""
    with contextlib.suppress(OSError):  # a mount that has died
        if any((root / DRIVE).glob(f"{run}-*")):
            found = f"the checkpoints are in /{DRIVE}, and are searched there"
            return f"mount Drive in the next session, as in this one: {found}"
    return (
        "this machine is deleted with its session, and no checkpoint of the run is in Drive: mount it, make the folder"
        f" /{DRIVE}, and give --set checkpoint.mirror=/{DRIVE}"
    )
