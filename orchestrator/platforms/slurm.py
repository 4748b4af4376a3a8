"""A Slurm job. Its time limit is queried repeatedly (limits/slurm_limit.py), because an administrator may change it."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

PROFILE = Profile(
    name="slurm",
    began="job",
    notice="slurm",
    sources_of_figures="none of its own: each site and partition sets the limit; asked with squeue (22.05.8, 2026-11-20)",
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "SLURM_JOB_ID" in environ
