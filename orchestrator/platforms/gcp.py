"""Google Compute Engine. A Spot machine is told 30 s before it is switched off (limits/spot_notice.py)."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms import dmi
from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="gcp",
    notice="gcp",
    metadata="http://metadata.google.internal",
    sources_of_figures=(
        "no limit (preemptible machines of old end after 24 h: say so with [platform] wall and began). 30 s:"
        " googleapis, Scheduling.skipGuestOsShutdown, read 2026-11-20. Product name: cloud-init's ds-identify"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return dmi.field(root, "product_name") == "Google Compute Engine"
