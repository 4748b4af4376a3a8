"""A platform's promise in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Profile:
    """Attributes:
    wall_s: how long a session may last; None where nothing ends it.
    home: folder that outlives the session; None for the XDG state folder.
    sources: read-only folders in which another session's state may lie.
    began_with_container: the session began with PID 1, before us; else it begins with the supervisor.
    quota_hours, quota_resets: accelerator hours in a window of time (core/windows.py); None where none are counted.
    factor: what of them an hour of a session on more than one accelerator costs.
    sources_of_figures: where each figure comes from, with the date it was read.
    """

    name: str
    wall_s: float | None = None
    home: Path | None = None
    sources: tuple[str, ...] = ()
    began_with_container: bool = False
    quota_hours: float | None = None
    quota_resets: str | None = None
    factor: float = 1.0
    sources_of_figures: str = ""
