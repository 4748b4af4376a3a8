"""Kaggle notebooks. Found out 2026-11-20; what is reported both ways stands in DECISIONS.md."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="kaggle",
    wall_s=9 * 3600.0,
    home=Path("/kaggle/working/kgorch"),
    sources=("/kaggle/input/**",),
    disk_bytes=20 * 10**9,
    began="container",
    quota_hours=30.0,
    quota_resets="Sat 00:00 UTC",
    factor=2.0,
    sources_of_figures=(
        "9 h: banner of interactive GPU sessions (Kaggle/kaggle-benchmarks#76, 2026-03). Batch sessions allow 12 h: the"
        " client's source (kaggle 2.2.5) says so, and they were killed at 43 200 s with exit 137 (users' reports, read 2026-11-20);"
        ' a plan for them says [session] wall = "12h". 30 h a week and its reset: users\' reports, read 2026-11-20; an account'
        " may have more, `kaggle quota` tells. Factor: 2×T4 is reported to cost one hour and two; the dearer one is taken until"
        " measured (read 2026-11-20). 20 GB: what of /kaggle/working outlives a session (read 2026-11-20)"
    ),
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in environ
