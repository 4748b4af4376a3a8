"""A sample about once a second: what NVML, the host and the ranks tell of how a training goes.

Three threads, and nobody waits for any of them: one measures the host and puts all together, one asks NVML (gpus.py), one
speaks to disks, which may be slow (the database, and the checkpoints' file system). What could not be measured is
absent, never 0; what cannot be written is dropped. The keys of a sample are promised in docs/json.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import samples
from orchestrator.protocol.messages import RankMetrics
from orchestrator.runtime import memory
from orchestrator.runtime.gpus import STALE_S, Gpus

SAMPLE_S, FLUSH_S, ROLL_UP_S = 1.0, 5.0, 60.0
HELD_AT_MOST = 600
"""Samples that wait for a disk that hangs; older ones are dropped."""

VITALS = (
    "alloc",
    "reserved",
    "peak",
    "total",
    "alloc_retries",
    "ooms",
    "rss",
    "rss_peak",
    "step_s",
    "data_wait",
    "cpu",
    "loaders",
)


class Sampler:
    """Of one session, at work from the beginning.

    Args:
        checkpoints: the folder whose file system is watched.
    Attributes:
        notes: for the journal, with their facts: see Gpus.
    """

    def __init__(self, engine: Engine, session_id: int, checkpoints: Path) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._engine, self._session_id, self._checkpoints = engine, session_id, checkpoints
        self._stopping = threading.Event()
        self._ranks: dict[int, tuple[float, dict[str, float]]] = {}
        self._latest: dict[str, float] = {}
        self._waiting: deque[samples.Measured] = deque(maxlen=HELD_AT_MOST)
        self._disk_free: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("telemetry", self._measure), ("telemetry-disk", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def latest(self) -> dict[str, float]:
        """The newest sample, whole; from any thread."""
        return dict(self._latest)

    def hear(self, vitals: RankMetrics) -> None:
        """What a rank tells of itself; other names than are promised, and what is no figure, are passed over."""
        told = {f"rank{vitals.rank}.{name}": vitals.values[name] for name in VITALS if name in vitals.values}
        figures = {key: float(value) for key, value in told.items() if type(value) in (int, float)}
        self._ranks[vitals.rank] = (
            time.monotonic(),
            {key: value for key, value in figures.items() if math.isfinite(value)},
        )

    def stop(self) -> None:
        """Write what is left, if the database allows it at once."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _measure(self) -> None:
        gpus, host = Gpus(lambda kind, facts: self.notes.put((kind, facts))), Host()
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + SAMPLE_S, time.monotonic())
            gpus.look_after()
            self._latest = gpus.values() | host.values() | self._disk_free | self._of_ranks()
            self._waiting.append((datetime.now(UTC), self._latest))
        gpus.stop()

    def _of_ranks(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for told_s, values in list(self._ranks.values()):
            if time.monotonic() - told_s < STALE_S:
                found |= values
        return found

    def _write(self) -> None:
        with contextlib.suppress(SQLAlchemyError):
            samples.tidy(self._engine)
        rolled_s = time.monotonic()
        while not self._stopping.is_set():
            with contextlib.suppress(OSError):
                self._disk_free = _disk_free(self._checkpoints)
            self._stopping.wait(FLUSH_S)
            with contextlib.suppress(SQLAlchemyError):
                self._flush()
                if self._stopping.is_set() or time.monotonic() - rolled_s > ROLL_UP_S:
                    rolled_s = time.monotonic()
                    samples.roll_up(self._engine, self._session_id)
                    samples.prune(self._engine, self._session_id)

    def _flush(self) -> None:
        samples.write(self._engine, self._session_id, [self._waiting.popleft() for _ in range(len(self._waiting))])


class Host:
    """CPU, memory, swap and disks of this machine, as psutil tells them; rates are over the time since it was last asked."""

    def __init__(self) -> None:
        import psutil

        self._psutil, self._read_s = psutil, time.monotonic()
        self._before: Any = None
        self.values()

    def values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for ask in (self._cpu, self._memory, self._swap, self._disks):
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # not told in this container
                found |= ask()
        return found

    def _cpu(self) -> dict[str, float]:
        return {"host.cpu": self._psutil.cpu_percent(), "host.cores": float(len(os.sched_getaffinity(0)))}

    def _memory(self) -> dict[str, float]:
        free, total = memory.free_and_total()
        return {"host.mem_used": float(total - free), "host.mem_total": float(total)}

    def _swap(self) -> dict[str, float]:
        return {"host.swap_used": float(self._psutil.swap_memory().used)}

    def _disks(self) -> dict[str, float]:
        now, now_s = self._psutil.disk_io_counters(), time.monotonic()
        before, passed_s = self._before, now_s - self._read_s
        self._before, self._read_s = now, now_s
        if now is None or before is None or passed_s <= 0:
            return {}
        return {
            "host.disk_read_bps": (now.read_bytes - before.read_bytes) / passed_s,
            "host.disk_write_bps": (now.write_bytes - before.write_bytes) / passed_s,
        }


def _disk_free(folder: Path) -> dict[str, float]:
    """The folder may not be there yet: its nearest parent then."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = os.statvfs(folder)
    return {"host.disk_free": float(found.f_bavail * found.f_frsize)}
