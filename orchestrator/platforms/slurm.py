"""A Slurm job: its end is asked for again and again (limits/slurm_limit.py), for an administrator may move it."""

from collections.abc import Mapping
from pathlib import Path

from orchestrator.platforms.profile import Profile

PROFILE = Profile(
    name="slurm",
    began="job",
    notice="slurm",
    sources_of_figures="none of its own: each site and partition sets the limit; asked with squeue (22.05.8, 2026-11-20)",
)


def is_here(environ: Mapping[str, str], root: Path) -> bool:
    return "SLURM_JOB_ID" in environ
