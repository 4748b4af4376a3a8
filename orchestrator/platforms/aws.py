"""Amazon EC2. A Spot instance gets a notice two minutes before it ends (limits/spot_notice.py)."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms import dmi
from kgorch.platforms.profile import Profile

PROFILE = Profile(
    name="aws",
    notice="aws",
    metadata="http://169.254.169.254",
    sources_of_figures=(
        "no limit and no quota of hours. Two minutes, to be looked for every 5 s: docs.aws.amazon.com,"
        " spot-instance-termination-notices, read 2026-11-21. Vendor 'Amazon EC2': cloud-init's ds-identify"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return dmi.field(root, "sys_vendor") == "Amazon EC2" or dmi.field(root, "board_vendor") == "Amazon EC2"
