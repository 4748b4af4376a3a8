"""When the last save of a session is requested, from the durations of this run's saves.

The *save lead* is the time between the request and the wall, the session's hard time limit:

    request ── the running step, at worst an evaluation ── three steps to agree ── the save ── margin ── wall

A save that comes too late costs all training since the snapshot before; one too early costs only seconds. After the save nothing
can be lost: processes end within the margin, or are killed at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

STEPS_TO_AGREE = 3
"""Steps until all ranks have agreed on the step after which they save (worker/ranks/consensus_board.py): one until the last of them
has seen the request, and two more."""

MOMENT_S = 0.25
"""Seconds for a rank that reaches the boundary a little late. For a later one the newest snapshot is written instead."""

TRAINS = 0.25
"""At least this share of the time that is left when training begins is trained, however slow saves are. A lead that leaves no
training leaves nothing to save, and the next session would do no better."""

RECENT_SAVES = 19
"""Saves that count. The slowest of 19 estimates their 95% quantile."""


class Save(NamedTuple):
    """A finished save.

    Attributes:
        bytes: size of the checkpoint.
        took_s: seconds from the request until it was read back.
    """

    bytes: int
    took_s: float


def first_guess_s(state_bytes: int, write_bytes_per_s: float) -> float:
    """Estimate of the first save in seconds: write and read back at the measured speed, and half as much again.

    The constant two seconds are for a small state on a slow disk, where the flush alone counts.
    """
    return 2.0 + 3.0 * state_bytes / max(write_bytes_per_s, 1.0)


def save_s(saves: Sequence[Save], state_bytes: int, *, guess_s: float) -> float:
    """Seconds to reserve for a save of `state_bytes`: an upper quantile of the run's own saves.

    The slowest of the last n, each scaled to the present size of the state, and a share 1/√n more: the next save is slower than n
    others with a probability of 1/(n + 1), so a few saves say little.

    Args:
        saves: oldest first; empty at first.
        guess_s: answer while there are none.
    """
    recent = saves[-RECENT_SAVES:]
    if not recent:
        return guess_s
    slowest = max(save.took_s * max(1.0, state_bytes / max(save.bytes, 1)) for save in recent)
    return slowest * (1 + 1 / math.sqrt(len(recent)))


def least_s(saves: Sequence[Save], *, guess_s: float) -> float:
    """The fastest recent save in seconds. A session with less time left need not start to train."""
    return min((save.took_s for save in saves[-RECENT_SAVES:]), default=guess_s)


def save_lead_s(*, save_s: float, gap_s: float, step_s: float, margin_s: float) -> float:
    """Seconds before the wall at which the last save is requested.

    Args:
        save_s: the save itself.
        gap_s: the longest recent time between two step boundaries; an evaluation between epochs counts.
        step_s: an ordinary step.
        margin_s: reserved after the save.
    """
    return save_s + max(gap_s - step_s, 0.0) + agreed_s(step_s) + margin_s


def agreed_s(step_s: float) -> float:
    """Seconds from the request until all ranks save, where there is no evaluation between."""
    return (1 + STEPS_TO_AGREE) * step_s + MOMENT_S


def default_margin_s(wall_s: float | None) -> float:
    """Margin of a plan that names none: 1% of the session, between half a second and two minutes.

    With limits of a minute, a whole second would be 1.7% of the training.
    """
    return min(max(0.01 * wall_s, 0.5), 120.0) if wall_s else 5.0
