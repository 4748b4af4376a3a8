"""Google Compute Engine. A Spot machine gets a notice 30 s before it ends (limits/spot_notice.py)."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms import dmi
from kgorch.platforms.profile import Profile

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
