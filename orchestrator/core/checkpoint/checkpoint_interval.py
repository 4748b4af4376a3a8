"""How often to save: Young's optimum from the measured cost of a save and the failures of the run."""

from __future__ import annotations

import math

PRIOR_FAILURE_FREE_S = 9 * 3600.0
"""Prior of the failure rate: one failure in nine hours. A new run has no rate of its own."""

SHORTEST_S, LONGEST_S = 10.0, 1800.0
"""Bounds of the interval, whatever was measured."""


def interval_s(blocking_s: float, *, trained_s: float, failures: int, at_most_s: float | None = None) -> float:
    """Seconds between the ends of two saves: sqrt(2 · cost · mean time between failures).

    Args:
        blocking_s: for how long a save stops the training; what runs beside training costs no steps.
        trained_s: of this run.
        failures: of this run; the end of a session at its time limit is none.
        at_most_s: the plan's `checkpoint.every`; None for no upper bound.
    Source: Young 1974; the cost of being a factor 2 off is 25% of an overhead below 1%.
    """
    between_failures_s = (trained_s + PRIOR_FAILURE_FREE_S) / (failures + 1)
    best_s = min(max(math.sqrt(2 * max(blocking_s, 0.01) * between_failures_s), SHORTEST_S), LONGEST_S)
    return min(best_s, at_most_s) if at_most_s is not None else best_s
