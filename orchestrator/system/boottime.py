"""The clock that all processes of a machine share."""

from __future__ import annotations

import time


def boottime_s() -> float:
    """Seconds of CLOCK_BOOTTIME. It goes on through suspend, and no change of the wall clock moves it.

    Instants named `…_s` in messages and in launch.json are readings of it; they mean nothing on another machine or boot.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)
