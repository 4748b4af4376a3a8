"""Microsoft Azure. A Spot machine gets a notice 30 s or more before it ends (limits/spot_notice.py)."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms import dmi
from kgorch.platforms.profile import Profile

ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
"""Of every machine there, and of no other Hyper-V machine: cloud-init's azure/identity.py."""

PROFILE = Profile(
    name="azure",
    notice="azure",
    metadata="http://169.254.169.254",
    sources_of_figures=(
        "no limit and no quota of hours. 30 s at least: MicrosoftDocs/azure-docs 896dbf0, scheduled-events, read 2026-11-20"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return dmi.field(root, "chassis_asset_tag") == ASSET_TAG
