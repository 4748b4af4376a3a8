"""Two clocks behind one small protocol, so that tests can move them by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol

from orchestrator.system.boottime import boottime_s


class Clock(Protocol):
    def now_s(self) -> float:
        """CLOCK_BOOTTIME, seconds: for durations and deadlines. No change of the wall clock moves it; suspend counts."""

    def utc(self) -> datetime:
        """The wall clock, for what is kept and shown."""


class SystemClock:
    def now_s(self) -> float:
        return boottime_s()

    def utc(self) -> datetime:
        return datetime.now(UTC)
