"""Where a rank is in its training, and for how long: distinguishes a long validation from a hang (core/session/hang_detection.py).

The training's thread writes (`enter`, a fraction of a microsecond a step). The link's thread reads once a second, and compares the
main thread's stack: a thread at the same instructions as a second ago has not moved.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from torch import nn

from kgorch.protocol.messages import RankProgress


class ProgressMarker:
    """The place of the training's thread.

    Attributes:
        where: a place of core/session/hang_detection.py.
        longest: the longest duration of each place that was left again, seconds.
    """

    def __init__(self) -> None:
        self.where, self._since_s = "start", time.monotonic()
        self.longest: dict[str, float] = {}
        self._learning: set[nn.Module] = set()
        self._stack: list[tuple[int, int]] = []
        self._still_since_s = self._since_s

    def enter(self, where: str, now_s: float | None = None) -> None:
        """Leave the current place for another one, which may have the same name: each step is a place."""
        now_s = time.monotonic() if now_s is None else now_s
        passed_s = now_s - self._since_s
        if passed_s > self.longest.get(self.where, 0.0):
            self.longest[self.where] = passed_s
        self.where, self._since_s = where, now_s

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """The block is an evaluation; the place before it is entered again after it."""
        where = self.where
        self.enter("evaluation")
        try:
            yield
        finally:
            self.enter(where)

    def message(self, attempt: str, rank: int, modules: Iterable[nn.Module]) -> RankProgress:
        """The place as a message. Called by the link's thread."""
        self._detect_evaluation(modules)
        now_s = time.monotonic()
        if (stack := _main_stack()) != self._stack:
            self._stack, self._still_since_s = stack, now_s
        still_s = now_s - self._still_since_s
        return RankProgress(attempt, rank, self.where, now_s - self._since_s, still_s, dict(self.longest))

    def at_failure(self, modules: Iterable[nn.Module]) -> str:
        """The place in which an exception was raised."""
        self._detect_evaluation(modules)
        return self.where

    def _detect_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Detect a validation within a step: a module that was in training mode is in eval mode."""
        training = {module for module in modules if module.training}
        self._learning |= training
        if self.where == "step" and self._learning - training:
            self.where = "evaluation"


def _main_stack() -> list[tuple[int, int]]:
    """The current instruction of each frame of the main thread, innermost first."""
    frame, stack = sys._current_frames().get(threading.main_thread().ident or 0), list[tuple[int, int]]()
    while frame is not None:
        stack.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return stack
