"""Periodic duties of a session, carried out by APScheduler in threads that may wait for a database or a disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from kgorch.system.clock import boottime_s

STEP_S = 1.0
"""Seconds by which the wall clock may differ from CLOCK_BOOTTIME before that counts as a step of it: NTP slews by less."""


class Duties:
    """Of one session. A duty that still runs when its time comes again is left out that once."""

    def __init__(self) -> None:
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # it warns of each time that is left out
        self._scheduler = BackgroundScheduler(
            timezone="UTC", daemon=True, job_defaults={"coalesce": True, "misfire_grace_time": None}
        )
        self._ahead_s = _ahead_s()
        self._scheduler.start()

    def every(self, seconds: float, duty: Callable[[], None]) -> None:
        self._scheduler.add_job(duty, IntervalTrigger(seconds=seconds, timezone="UTC"))

    def follow_clock(self) -> None:
        """Begin the intervals anew where the wall clock was set: APScheduler reads that clock, and would wait until it is back."""
        if abs(_ahead_s() - self._ahead_s) > STEP_S:
            self._ahead_s = _ahead_s()
            for job in self._scheduler.get_jobs():
                # A fresh trigger: the old one counts from the instant at which it was made.
                job.reschedule(IntervalTrigger(seconds=job.trigger.interval_length, timezone="UTC"))

    def stop(self) -> None:
        self._scheduler.shutdown(wait=False)


def _ahead_s() -> float:
    return time.time() - boottime_s()
