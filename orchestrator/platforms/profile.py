"""A platform's promise in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Began = Literal["container", "job", "boot", "start"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Attributes:
    wall_s: how long a session may last; None where nothing ends it, or where `notice` tells the end.
    home: folder that outlives the session; None for the XDG state folder.
    sources: read-only folders in which another session's state may lie.
    disk_bytes: what the folder that outlives the session holds at most; None for what its disk does.
    began: what began the session: PID 1 of the container (before us: set-up cells have run since), the batch system's job,
        the machine's boot, or our own start.
    quota_hours, quota_resets: accelerator hours in a window of time, and the window as in the plan's `quota.resets`.
    factor: hours of the quota that an hour of a session on more than one accelerator costs.
    notice: who tells when the session ends, or that it ends sooner: "slurm", or the spot notices of "aws", "gcp", "azure".
    metadata: base URL at which those are asked for.
    sources_of_figures: where each figure comes from, with the date it was read.
    """

    name: str
    wall_s: float | None = None
    home: Path | None = None
    sources: tuple[str, ...] = ()
    disk_bytes: int | None = None
    began: Began = "start"
    quota_hours: float | None = None
    quota_resets: str | None = None
    factor: float = 1.0
    notice: str | None = None
    metadata: str | None = None
    sources_of_figures: str = ""
