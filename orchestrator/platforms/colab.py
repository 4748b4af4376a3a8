"""Google Colab. Found out 2026-11-20: about 12 h, varying; idle sessions end after about 90 minutes."""

from collections.abc import Mapping

from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="colab",
    wall_s=12 * 3600.0,
    began_with_container=True,
    sources_of_figures="users' reports, read 2026-11-20; no promise by the platform",
)


def is_here(environ: Mapping[str, str]) -> bool:
    return "COLAB_RELEASE_TAG" in environ
