"""Durations of steps, and of the longest stretch without a step boundary."""

from __future__ import annotations

import statistics
import time
from collections import deque

from kgorch.worker.telemetry.progress_marker import ProgressMarker

RECENT_STEPS = 5
"""Steps of which the middle one is usual."""


class StepTimer:
    """The clock of a rank's step boundaries.

    Attributes:
        ticked_s: monotonic reading of the newest tick; 0.0 before the first.
        step_s: seconds of the newest step.
    """

    def __init__(self, marker: ProgressMarker) -> None:
        self._marker = marker
        self.ticked_s = self.step_s = self._gap_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def tick(self, place: str = "step") -> float:
        """Seconds since the previous tick; 0.0 at the first. A `place` of core/session/hang_detection.py begins."""
        now_s = time.monotonic()
        self._marker.enter(place, now_s)
        passed_s = now_s - self.ticked_s if self.ticked_s else 0.0
        if passed_s > self._gap_s:
            self._gap_s = passed_s
        self.ticked_s = now_s
        return passed_s

    def end_step(self) -> None:
        """An optimizer's step is over. What ticks come between two such ends counts as one step."""
        self.step_s = self.tick()
        self._recent.append(self.step_s)

    @property
    def usual_s(self) -> float:
        """Seconds of a usual step: one with an evaluation or a compilation in it is none. 0.0 before the first. For any thread."""
        recent = list(self._recent)
        return statistics.median_low(recent) if recent else 0.0

    def take_gap_s(self) -> float:
        """The longest time between two ticks since this was called last, the current one included. For the link's thread."""
        gap_s, self._gap_s = self._gap_s, 0.0
        if self.ticked_s:
            gap_s = max(gap_s, time.monotonic() - self.ticked_s)
        return gap_s
