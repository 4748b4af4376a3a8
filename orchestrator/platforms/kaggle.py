"""Kaggle notebooks. Found out 2026-11-20; what is reported both ways stands in DECISIONS.md."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="kaggle",
    wall_s=9 * 3600.0,
    home=Path("/kaggle/working/kgorch"),
    sources=("/kaggle/input/**",),
    began_with_container=True,
    quota_hours=30.0,
    quota_resets="Sat 00:00 UTC",
    factor=2.0,
    sources_of_figures="9 h: banner of interactive GPU sessions (2026-03). Batch sessions allow 12 h, said in the plan;"
    " they were killed at 43 200 s with exit 137. 30 h a week, renewed on Saturday 00:00 UTC: `kaggle quota` (2026-11)."
    " Whether 2×T4 counts twice is reported both ways: twice until it is measured",
)


def is_here(environ: Mapping[str, str]) -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in environ
