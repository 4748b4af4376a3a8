"""Telemetry: about one sample a second, with metrics of GPUs, host and ranks.

Three threads, and nothing waits for any of them: one measures the host and assembles the sample, one queries NVML
(gpu_monitor.py), one uses the disks, which may be slow (the database, and the checkpoints' file system). What could not be
measured is absent, never 0; what cannot be written is dropped. The keys of a sample are promised in docs/json.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import Note
from kgorch.db import samples
from kgorch.hardware.gpu_monitor import STALE_S, GpuMonitor
from kgorch.hardware.host_metrics import HostMetrics
from kgorch.protocol.messages import RankMetrics

SAMPLE_S, FLUSH_S, ROLL_UP_S = 1.0, 5.0, 60.0
MAX_WAITING = 600
"""Samples kept while the disk hangs; older ones are dropped."""

MAX_NODES, NODE_STALE_S = 16, 15.0
"""Other nodes whose figures are in a sample: some 50 of each. Seconds for which they count; a node sends them every five."""

RANK_METRICS = (
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
    """The telemetry of one session; its threads start at once.

    Args:
        checkpoints: the folder whose file system is watched.
        note: takes entries for the journal from any thread: see GpuMonitor.
        on_sample: is given each new sample, in the thread that measures.
        environ: in which the session's GPUs are the visible ones (GpuLocks.environ).
    """

    def __init__(
        self,
        engine: Engine,
        session_id: int,
        checkpoints: Path,
        note: Note,
        on_sample: Callable[[Mapping[str, float]], None] = lambda _: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._note, self._on_sample, self._environ = note, on_sample, environ
        self._engine, self._session_id, self._checkpoints = engine, session_id, checkpoints
        self._stopping = threading.Event()
        self._ranks: dict[int, tuple[float, dict[str, float]]] = {}
        self._nodes: dict[int, tuple[float, dict[str, float]]] = {}
        self._waiting: deque[samples.Measurement] = deque(maxlen=MAX_WAITING)
        self._disk_free: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("telemetry", self._measure), ("telemetry-disk", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def add_rank_metrics(self, vitals: RankMetrics) -> None:
        """Take the metrics that a rank reports; names that are not promised, and what is no finite number, are ignored."""
        metrics = {f"rank{vitals.rank}.{name}": vitals.values[name] for name in RANK_METRICS if name in vitals.values}
        figures = {key: float(value) for key, value in metrics.items() if type(value) in (int, float)}
        self._ranks[vitals.rank] = (
            time.monotonic(),
            {key: value for key, value in figures.items() if math.isfinite(value)},
        )

    def add_node_metrics(self, node: int, values: Mapping[str, float]) -> None:
        """Take the figures of another node. Args: node: its number in the attempt, from 1; -1 where it is in none."""
        if 1 <= node <= MAX_NODES:
            self._nodes[node] = (time.monotonic(), {f"node{node}.{name}": value for name, value in values.items()})

    def stop(self) -> None:
        """Write what is left, if the database can be written at once."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _measure(self) -> None:
        gpus, host = GpuMonitor(self._note, self._environ), HostMetrics()
        next_s = time.monotonic()
        while not self._stopping.wait(max(0.0, next_s - time.monotonic())):
            next_s = max(next_s + SAMPLE_S, time.monotonic())  # missed samples are not made up for
            gpus.check()
            sample = gpus.values() | host.values() | self._disk_free | self._of_others()
            self._waiting.append((datetime.now(UTC), sample))
            self._on_sample(sample)
        gpus.stop()

    def _of_others(self) -> dict[str, float]:
        """What ranks and other nodes have sent lately."""
        metrics: dict[str, float] = {}
        for senders, stale_s in ((self._ranks, STALE_S), (self._nodes, NODE_STALE_S)):
            for at_s, values in list(senders.values()):
                if time.monotonic() - at_s < stale_s:
                    metrics |= values
        return metrics

    def _write(self) -> None:
        with contextlib.suppress(SQLAlchemyError):  # telemetry never ends a session
            samples.prune_ended_sessions(self._engine)
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


def _disk_free(folder: Path) -> dict[str, float]:
    """Free bytes of the file system of `folder`, or of its nearest parent while it does not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    room = os.statvfs(folder)
    return {"host.disk_free": float(room.f_bavail * room.f_frsize)}
