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
    sources_of_figures="9 h: banner of interactive GPU sessions (2026-03). Batch sessions allow 12 h, said in the plan;"
    " they were killed at 43 200 s with exit 137",
)


def is_here(environ: Mapping[str, str]) -> bool:
    return "KAGGLE_KERNEL_RUN_TYPE" in environ
