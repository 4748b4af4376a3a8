"""Where a rank is in its training, and for how long: what tells a long validation from a hang (core/hang_detection.py).

The training's thread writes (`enter`, a fraction of a microsecond a step), the link's thread reads once a second and looks
besides at the main thread's stack: one that stands on the same instructions as a second ago has not moved.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

from torch import nn

from orchestrator.protocol.messages import RankProgress


class Whereabouts:
    """Attributes: where: a place of core/hang_detection.py. longest: seconds that each place left again has taken at most."""

    def __init__(self) -> None:
        self.where, self._since_s = "start", time.monotonic()
        self.longest: dict[str, float] = {}
        self._learning: set[nn.Module] = set()
        self._stack: list[tuple[int, int]] = []
        self._still_since_s = self._since_s

    def enter(self, where: str, now_s: float | None = None) -> None:
        """Leave one place for the next, which may be the same: each step is one."""
        now_s = time.monotonic() if now_s is None else now_s
        passed_s = now_s - self._since_s
        if passed_s > self.longest.get(self.where, 0.0):
            self.longest[self.where] = passed_s
        self.where, self._since_s = where, now_s

    def told(self, attempt: str, rank: int, modules: Iterable[nn.Module]) -> RankProgress:
        """From the link's thread."""
        self._see_evaluation(modules)
        now_s = time.monotonic()
        if (stack := _main_stack()) != self._stack:
            self._stack, self._still_since_s = stack, now_s
        still_s = now_s - self._still_since_s
        return RankProgress(attempt, rank, self.where, now_s - self._since_s, still_s, dict(self.longest))

    def at_failure(self, modules: Iterable[nn.Module]) -> str:
        """The place in which an exception was raised."""
        self._see_evaluation(modules)
        return self.where

    def _see_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """A validation in the midst of a step: a module that learned is in eval()."""
        training = {module for module in modules if module.training}
        self._learning |= training
        if self.where == "step" and self._learning - training:
            self.where = "evaluation"


def _main_stack() -> list[tuple[int, int]]:
    """The instruction that each frame of the main thread is at, innermost first."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), list[tuple[int, int]]()
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return found
