"""Kaggle notebooks, as of 2026-11-20. Reports that contradict each other are weighed in DECISIONS.md."""

from collections.abc import Mapping
from pathlib import Path

from kgorch.platforms.profile import Profile

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


def next_session(run: str, environ: Mapping[str, str], root: Path) -> str:
    """What a person does so that the next session has this one's state; the batch session has saved its output by itself."""
    saved = "this session's output"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") == "Interactive":
        saved += " (save a version of the notebook first, with its output: this one is lost with the session)"
    return f"attach {saved} to the next one: Add Input, Notebook Output Files, this notebook; it is searched in /kaggle/input"
