"""The two clocks of a session behind one protocol, so that tests can move them by hand."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


def boottime_s() -> float:
    """Seconds of CLOCK_BOOTTIME, which all processes of a machine share.

    It goes on while the machine is suspended, and no change of the wall clock moves it. Instants named `…_s` in messages and in
    launch.json are readings of it; they mean nothing on another machine or after a reboot.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock(Protocol):
    """Where a loop reads the time."""

    def now_s(self) -> float:
        """CLOCK_BOOTTIME in seconds, for durations and deadlines.

        Changes of the wall clock do not move it, and it goes on while the machine is suspended.
        """

    def utc(self) -> datetime:
        """The wall clock in UTC, for what is stored and shown."""


class SystemClock:
    """The clocks of this machine."""

    def now_s(self) -> float:
        return boottime_s()

    def utc(self) -> datetime:
        return datetime.now(UTC)
