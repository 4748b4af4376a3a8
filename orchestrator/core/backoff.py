"""Exponential back-off: how long to wait after so many failures in a row.

A value instead of a library such as tenacity or stamina: those own the call and the sleep, while every loop here waits on a
condition of its own (stop, hurry, a new job, the daemon's clock), and two of them may import the standard library alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_DOUBLINGS = 64
"""Limit of the exponent: 2.0 ** 1024 raises OverflowError, and a server may be down for that many attempts."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double.

    Attributes:
        first_s: pause after the first failure, seconds.
        longest_s: limit of a pause before jitter, seconds.
        jitter: largest relative deviation, 0 to 1, so that many clients do not come back at once.
    """

    first_s: float
    longest_s: float = math.inf
    jitter: float = 0.0

    def after(self, failures: int, chance: float = 0.5) -> float:
        """Seconds to wait after so many failures in a row; 0 after none.

        Args:
            chance: uniform in 0 to 1; 0.5 gives the pause without jitter.
        """
        if failures < 1:
            return 0.0
        pause_s = self.first_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS)
        return min(pause_s, self.longest_s) * (1 - self.jitter + 2 * self.jitter * chance)
