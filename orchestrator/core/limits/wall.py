"""A *wall*: a hard time limit of a session. Of all walls the nearest one counts, and its kind is reported as the reason of the end.

Some are fixed (the platform's limit, the plan's, `--until`). Others move while the session lasts: the quota, which other sessions
spend as well, the end of a Slurm job, which an administrator may change, and the notice that a spot machine is reclaimed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kgorch.core.codes import Reason


class Wall(NamedTuple):
    """A time limit.

    Attributes:
        at_s: seconds of CLOCK_BOOTTIME.
        kind: TIME_LIMIT, UNTIL, QUOTA, SLURM or SPOT.
    """

    at_s: float
    kind: Reason


def nearest(walls: Iterable[Wall | None]) -> Wall | None:
    """The first wall to come; None without any."""
    return min((wall for wall in walls if wall is not None), default=None)


STILL_S = 0.5
"""Seconds. A smaller change is no move: a wall that is computed again from a database and two clocks jitters."""


def has_moved(before: Wall | None, now: Wall | None) -> bool:
    """Whether the session's wall is another one, or at another time."""
    if before is None or now is None:
        return before is not now
    return before.kind != now.kind or abs(before.at_s - now.at_s) > STILL_S
