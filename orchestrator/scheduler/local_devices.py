"""The GPUs of this machine, and how many of them and of its places for sessions are free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kgorch.core.scheduling import FreeDevices
from kgorch.db.active_sessions import ActiveSession
from kgorch.db.rows import ResumeInfo
from kgorch.hardware import gpu_locks
from kgorch.hardware.gpu_locks import LockableGpu
from kgorch.system.clock import Clock

QUERY_INTERVAL_S = 300.0
"""Seconds between two queries of the driver for the GPUs of the machine. SIGHUP queries it at once."""


class LocalDevices:
    """The devices that sessions of this machine may use.

    Args:
        at_once: most sessions at the same time; None for one a GPU, or one on a machine without GPUs.
    """

    def __init__(self, home: Path, clock: Clock, at_once: int | None) -> None:
        self._home, self._clock, self._at_once = home, clock, at_once
        self._gpus: list[LockableGpu] = []
        self._query_at_s: float | None = None

    def gpus(self) -> Sequence[LockableGpu]:
        """The GPUs that CUDA would see, as the driver reported them at most QUERY_INTERVAL_S ago."""
        # Not an interval job of APScheduler: that reads the wall clock, which may be set, and a look at the queue needs the GPUs
        # also where no scheduler runs (benchmarks/quarter.py).
        now_s = self._clock.now_s()
        if self._query_at_s is None or now_s - self._query_at_s >= QUERY_INTERVAL_S:
            self._query_at_s, self._gpus = now_s, gpu_locks.visible_gpus()
        return self._gpus

    def forget(self) -> None:
        """Query the driver again at the next use: GPUs were added or removed."""
        self._query_at_s = None

    def max_sessions(self) -> int:
        """How many sessions may run at the same time, without those that share GPUs."""
        return self._at_once or max(len(self.gpus()), 1)

    def count_free(self, sessions: Sequence[ActiveSession], claims: Sequence[ResumeInfo]) -> FreeDevices:
        """What is left beside what runs and what was claimed.

        Args:
            sessions: those that run.
            claims: claimed rows. Their sessions are starting and have not locked their GPUs yet, so the locks alone would
                give the same GPUs away twice.
        """
        gpus = self.gpus()
        free, shared = gpu_locks.count_free_and_shared(self._home, gpus) if gpus else (0, 0)
        exclusive = [row for row in claims if not row.share]
        pending_gpus = sum(len(gpus) if row.ranks is None else row.ranks for row in exclusive)
        return FreeDevices(
            gpus=len(gpus),
            free=max(free - pending_gpus, 0),
            shared=shared,
            at_once=self._at_once,
            running=sum(not session.share for session in sessions) + len(exclusive),
            sharing=sum(session.share for session in sessions) + len(claims) - len(exclusive),
        )
