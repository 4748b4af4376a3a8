"""How long a program's log was when, for the order of what it prints and saves (core/checkpoint/log_order.py)."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from kgorch.core.checkpoint.log_order import LogLength

LOOK_S = 0.05
"""Seconds between two looks: some 0.1 ms of CPU time each."""

MAX_LENGTHS = 5000
"""That are remembered: those of 250 s, of a program that prints at each look."""


class LogLengths:
    """Of one log. In one thread, but for `found`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._found: deque[LogLength] = deque(maxlen=MAX_LENGTHS)
        self.look()

    def found(self) -> list[LogLength]:
        """Oldest first."""
        return list(self._found)

    def since(self, size: int) -> int | None:
        """Unix time in nanoseconds since which it has that many bytes; None where that is not known."""
        first = None
        for length in reversed(self._found):
            if length.bytes < size:
                break
            first = length
        return first and first.first_ns

    def look(self) -> None:
        """Note how long it is now."""
        began_ns = time.time_ns()
        try:
            size = self._log.stat().st_size
        except OSError:
            size = 0
        if self._found and size < self._found[-1].bytes:
            self._found.clear()  # its beginning was cut off
        if self._found and size == self._found[-1].bytes:
            self._found[-1] = self._found[-1]._replace(last_ns=began_ns)
            return
        self._found.append(LogLength(size, time.time_ns(), began_ns))

    def watch(self, seconds: float) -> None:
        """Look again and again for so long."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            self.look()
