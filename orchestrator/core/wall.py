"""What ends a session: of all the walls the nearest one counts, and its name is what people are told.

Some stand from the beginning (the platform's limit, the plan's, the time that a person gave); others move while it lasts: the
quota, which other sessions spend too, a Slurm job's end that an administrator changes, a spot machine that is taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.core.codes import Reason


class Wall(NamedTuple):
    """`at_s`: CLOCK_BOOTTIME, seconds. `kind`: one of the first five reasons."""

    at_s: float
    kind: Reason


def nearest(walls: Iterable[Wall | None]) -> Wall | None:
    return min((wall for wall in walls if wall is not None), default=None)


STILL_S = 0.5
"""A wall that moves by less has not moved: what is computed anew from a database and two clocks trembles."""


def has_moved(before: Wall | None, now: Wall | None) -> bool:
    if before is None or now is None:
        return before is not now
    return before.kind != now.kind or abs(before.at_s - now.at_s) > STILL_S
