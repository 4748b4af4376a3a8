"""Google Colab: its limits vary and are promised nowhere; nothing but a mounted Drive outlives a session."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="colab",
    wall_s=12 * 3600.0,
    began="container",
    sources_of_figures=(
        "12 h: users' reports of the free tier, read 2026-11-20; no promise by the platform. Pro+ is reported at about 24 h;"
        " an idle session ends after about 90 minutes"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "COLAB_RELEASE_TAG" in environ
