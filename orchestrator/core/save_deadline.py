"""When to ask for the last save of a session, from what this run's saves have cost so far.

The wall is when the platform ends us; the lead is what must lie between the asking and the wall:

    ask ── the step under way, at worst an evaluation ── two steps to agree ── the save ── margin ── wall

A save that comes too late costs all that was trained since the snapshot before; one too early costs only seconds. What comes
after the save is no matter of life and death: processes end within the margin, or are killed at its end, and nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

STEPS_TO_AGREE = 2
MOMENT_S = 0.25
"""For a rank that comes to the boundary a little late: who is later has the newest snapshot written in its stead."""

TRAINS = 0.25
"""Of what is left as training begins, so much is trained, however long a save may take: a lead that leaves nothing to save guards
nothing, and the next session would do no better."""

RECENT_SAVES = 19
"""The slowest of so many is their 95% quantile."""


class Save(NamedTuple):
    """A finished save: what it held, and the seconds from asking for it to having read it back."""

    bytes: int
    took_s: float


def first_guess_s(state_bytes: int, write_bytes_per_s: float) -> float:
    """Seconds of a save that nobody has seen yet: write, flush and read back at the measured speed, and half as much again.

    The two seconds at its head are for a small state on a slow disk, where the flush alone counts.
    """
    return 2.0 + 3.0 * state_bytes / max(write_bytes_per_s, 1.0)


def save_s(saves: Sequence[Save], state_bytes: int, *, guess_s: float) -> float:
    """Seconds to count on for a save of `state_bytes`: an upper quantile of the run's own, as far as so few tell one.

    The slowest of the last n, each stretched to the state's size now, and a part 1/√n more: of n saves the next one is
    slower than all with a chance of 1/(n + 1), so little was seen while n is small.

    Args:
        saves: oldest first; empty at first.
    """
    recent = saves[-RECENT_SAVES:]
    if not recent:
        return guess_s
    slowest = max(save.took_s * max(1.0, state_bytes / max(save.bytes, 1)) for save in recent)
    return slowest * (1 + 1 / math.sqrt(len(recent)))


def least_s(saves: Sequence[Save], *, guess_s: float) -> float:
    """Seconds below which no save has been: with less left, a session need not begin to train."""
    return min((save.took_s for save in saves[-RECENT_SAVES:]), default=guess_s)


def lead_s(*, save_s: float, gap_s: float, step_s: float, margin_s: float) -> float:
    """Seconds before the wall at which the last save is asked for.

    Args:
        gap_s: the longest time between two step boundaries lately; an evaluation between epochs counts.
        step_s: an ordinary step.
    """
    return save_s + max(gap_s - step_s, 0.0) + agreed_s(step_s) + margin_s


def agreed_s(step_s: float) -> float:
    """Seconds from asking until all ranks save, where nothing but steps lies between."""
    return (1 + STEPS_TO_AGREE) * step_s + MOMENT_S


def default_margin_s(wall_s: float | None) -> float:
    """What a plan that names no margin gets: a hundredth of the session, between half a second and two minutes."""
    return min(max(0.01 * wall_s, 0.5), 120.0) if wall_s else 5.0
