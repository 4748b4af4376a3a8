"""What ends a session: of all the walls the nearest one counts, and its name is what people are told.

Some stand from the beginning (the platform's limit, the plan's, the time that a person gave); others move while it lasts: the
quota, which other sessions spend too, a Slurm job's end that an administrator changes, a spot machine that is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

WALL = "the wall"
"""The platform's limit or the plan's."""

UNTIL = "the time that was given"
QUOTA = "the quota"
SLURM = "the end of the Slurm job"
SPOT = "a notice that the machine is taken back"


class Wall(NamedTuple):
    """`at_s`: CLOCK_BOOTTIME."""

    at_s: float
    why: str


def nearest(walls: Iterable[Wall | None]) -> Wall | None:
    return min((wall for wall in walls if wall is not None), default=None)


STILL_S = 0.5
"""A wall that moves by less has not moved: what is computed anew from a database and two clocks trembles."""


def has_moved(before: Wall | None, now: Wall | None) -> bool:
    if before is None or now is None:
        return before is not now
    return before.why != now.why or abs(before.at_s - now.at_s) > STILL_S
