"""When to ask for the last save of a session, from what this run's saves have cost so far.

The wall is when the platform ends us; the lead is what must lie between the asking and the wall:

    ask ── the step under way, at worst an evaluation ── two steps to agree ── the save ── processes end ── margin ── wall

A save that comes too late costs all that was trained since the one before; one too early costs only seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

STEPS_TO_AGREE = 2
EXIT_S = 2.0
"""From a durable save to the end of all processes: 0.9–1.2 s for two ranks on two cores, most of it PyTorch's unloading."""

RECENT_SAVES = 8


def first_guess_s(state_bytes: int, write_bytes_per_s: float) -> float:
    """Seconds of a save that nobody has seen yet: write, flush and read back at the measured speed, and half as much again.

    The two seconds at its head are for a small state on a slow disk, where the flush alone counts.
    """
    return 2.0 + 3.0 * state_bytes / max(write_bytes_per_s, 1.0)


def save_s(save_times_s: Sequence[float], *, guess_s: float) -> float:
    """Seconds to count on for a save: half as much again as the slowest of the last eight.

    Args:
        save_times_s: asked-for to verified, oldest first; empty at first.
    """
    recent = save_times_s[-RECENT_SAVES:]
    return 1.5 * max(recent) if recent else guess_s


def lead_s(*, save_s: float, gap_s: float, step_s: float, margin_s: float) -> float:
    """Seconds before the wall at which the last save is asked for.

    Args:
        gap_s: the longest time between two step boundaries lately; an evaluation between epochs counts.
        step_s: an ordinary step.
    """
    return save_s + max(gap_s, step_s) + STEPS_TO_AGREE * step_s + EXIT_S + margin_s


def default_margin_s(wall_s: float | None) -> float:
    """What a plan that names no margin gets: a hundredth of the session, between one second and two minutes."""
    return min(max(0.01 * wall_s, 1.0), 120.0) if wall_s else 5.0
