"""Which value of a metric was measured on the weights of a checkpoint that is named by no step, by the times of both.

A program may print a value and save then, or save, measure, and print: between a save and its own value there is at most an
evaluation, between it and another one's there is training. So the two belong together that are the nearest to each other.
Where the log says more, as of a program that prints the number of an epoch when that begins, it decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

DECISIVE = 2
"""A value counts as that of a save before it only where the value before that save is farther by this factor: for those that are
printed again and again while it trains, the last one before the save is meant."""

LOOK_NS = 1_000_000_000
"""Nanoseconds between two looks at the log: what lies nearer has no order."""

SAME_NS = 2 * LOOK_NS
"""Files that are written within such a time are one save, as the last one and the best one."""


class Printed(NamedTuple):
    """Values of a metric that were printed one after another while the log was at one step.

    Attributes:
        step: of the log.
        since_ns: Unix time at which the first one was not printed yet.
        until_ns: at which the last one was read.
        value: the last one.
    """

    step: int
    since_ns: int
    until_ns: int
    value: float

    def distance(self, saved_ns: int) -> int:
        """Nanoseconds between it and a save; 0 where it is not known which came first."""
        return max(self.since_ns - saved_ns, saved_ns - self.until_ns, 0)


def measured_on(
    saved_ns: int,
    others_ns: Iterable[int],
    printed: Sequence[Printed],
    logged: int | None = None,
    now_ns: float = math.inf,
) -> Printed | None:
    """The values of which the last was measured on a checkpoint; None where it is not known, or not yet.

    Args:
        saved_ns: Unix time at which the checkpoint was written.
        others_ns: at which further ones were.
        printed: of one metric, oldest first.
        logged: step that the log was at before the save, for certain; None where that is not known.
        now_ns: until when nothing else was printed or saved; infinite after the end of the program.
    """
    at_once = [item for item in printed if item.distance(saved_ns) <= LOOK_NS]
    before = next((item for item in reversed(printed) if item.until_ns < saved_ns), None)
    after = next((item for item in printed if item.since_ns > saved_ns), None)
    found, until_ns = before, math.inf
    if at_once:
        # of what is printed all the time while it trains, that of the training before the save
        is_steady = at_once[0].until_ns - at_once[0].since_ns > 3 * LOOK_NS
        found = at_once[0] if len(at_once) == 1 or is_steady else None
    elif after and logged is not None and after.step == logged and (before is None or before.step != logged):
        found, until_ns = after, after.since_ns  # the log had left the step of the one before
    elif after and (before is None or DECISIVE * after.distance(saved_ns) < before.distance(saved_ns)):
        found = after
    if found is None:
        return None
    distance = found.distance(saved_ns)
    others = (at_ns for at_ns in others_ns if abs(at_ns - saved_ns) > SAME_NS and at_ns < until_ns)
    if any(found.distance(at_ns) < distance for at_ns in others):
        return None  # of another checkpoint
    # what may still come would be nearer
    is_open = now_ns < (found.until_ns + distance if found is after else saved_ns + distance / DECISIVE)
    return None if is_open else found
