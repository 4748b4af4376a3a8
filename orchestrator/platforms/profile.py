"""The model of a platform's profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Began = Literal["container", "job", "boot", "start"]


@dataclass(frozen=True, slots=True)
class Profile:
    """Limits and folders of a platform.

    Attributes:
        name: as in the plan's `platform.name`.
        wall_s: time limit of a session in seconds; None where there is none, or where `notice` gives it.
        home: folder that outlives the session; None for the XDG state folder.
        sources: read-only folders in which another session's state may be.
        disk_bytes: capacity of the folder that outlives the session; None for that of its disk.
        began: the start of the session, from which the time limit counts: of PID 1 of the container (earlier than ours, since
            set-up cells may have run), of the batch system's job, of the machine's boot, or of our own process.
        quota_hours: accelerator hours in a window of time; None for no quota.
        quota_resets: the window, as in the plan's `quota.resets`.
        factor: hours of the quota for an hour of a session on more than one accelerator.
        notice: the service that gives the end of the session: "slurm", or the spot notices of "aws", "gcp", "azure".
        metadata: base URL of those notices.
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
