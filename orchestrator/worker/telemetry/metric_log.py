"""Rank 0's record of the reported metrics (core/metrics/metric_curve.py) on disk, which does not depend on a living supervisor.

The training's thread makes records; a separate thread appends them to `metrics.jsonl` in the attempt's folder. It is not the link's
thread, because a disk that hangs would keep that one from watching the deadline. No disk error reaches the training: records wait
in a bounded queue, and are written when the disk accepts them again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path

from kgorch.core.metrics import metric_curve
from kgorch.core.metrics.metric_curve import Mark, MetricRecorder, Record
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.system import files

WAITING = 512
"""Limit of records that wait for the disk; beyond it the oldest are dropped."""

DRAIN_S, CLOSE_S = 0.05, 2.0
"""Seconds that a save, and the end of the session, wait for the disk at most."""

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class MetricLog:
    """The metrics of one attempt.

    Attributes:
        epoch: of what is reported now, from 1; 0 before the first.
    """

    def __init__(self, launch: LaunchSpec) -> None:
        self.epoch = 0
        self._writer = RecordWriter(Path(launch.folder, metric_curve.FILE_NAME))
        self._recorder = MetricRecorder(self._writer.put)

    def add(self, name: str, value: float, mark: Mark) -> None:
        """Record a value that was reported under that mark."""
        self._recorder.add(name, value, mark, time.time())

    def cut(self) -> None:
        """At a save: complete the records of what was reported until now, so that no mean spans the saved step."""
        self._recorder.flush(time.time())
        self._writer.drain(DRAIN_S)

    def close(self) -> None:
        """Complete the records, and wait for the disk at most CLOSE_S."""
        self._recorder.flush(time.time())
        self._writer.close(CLOSE_S)


class RecordWriter:
    """Appends records to a file, in a thread that starts with the first record."""

    def __init__(self, path: Path, *, most_bytes: int = metric_curve.MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._queue: deque[Record] = deque()
        self._changed = threading.Condition()
        self._is_writing = self._is_closing = False
        self._thread: threading.Thread | None = None
        self._descriptor = -1
        self._bytes = 0

    def put(self, record: Record) -> None:
        """Queue a record; does not wait for the disk."""
        with self._changed:
            self._queue.append(record)
            if len(self._queue) > WAITING:
                self._queue.popleft()
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kgorch-curve", daemon=True)
            self._thread.start()

    def drain(self, within_s: float) -> bool:
        """Wait until the queue is empty and nothing is being written. Returns whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_writing, within_s)

    def close(self, within_s: float) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(within_s)

    def _run(self) -> None:
        pending: list[Record] = []  # what the disk refused; tried again with the next record
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                is_last, self._is_writing = self._is_closing, True
                pending = [*pending, *self._queue][-WAITING:]
                self._queue.clear()
            try:
                self._append("".join(f"{metric_curve.encode(record)}\n" for record in pending).encode())
                pending = []
            except OSError:
                pass  # full, read-only or gone: the training does not depend on it
            if is_last:
                self._close()
                return

    def _append(self, lines: bytes) -> None:
        """Append all of the lines or nothing. Raises: OSError."""
        if self._descriptor < 0:
            self._open()
        if self._bytes + len(lines) > self._most_bytes:
            self._thin()
        count = 0
        try:
            while count < len(lines):
                count += os.write(self._descriptor, lines[count:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._bytes)
            raise
        self._bytes += count

    def _open(self) -> None:
        self._descriptor = os.open(self._path, FLAGS, 0o600)
        self._bytes = os.fstat(self._descriptor).st_size

    def _thin(self) -> None:
        """Thin the records to half of the bytes, in a new file of the same name. Raises: OSError; the file is then unchanged."""
        records = metric_curve.thin(metric_curve.decode(self._path.read_text(errors="replace")), self._most_bytes // 2)
        files.write(self._path, "".join(f"{metric_curve.encode(record)}\n" for record in records).encode())
        self._close()
        self._open()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
