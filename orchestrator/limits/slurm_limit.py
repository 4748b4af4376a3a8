"""A Slurm job's end, which is asked for again and again: `scontrol update TimeLimit` and preemption move it.

Slurm speaks of instants, on clocks that a cluster keeps alike. They are brought to CLOCK_BOOTTIME by the difference of this
machine's two clocks when the session was opened: a wall clock that jumps later moves no end.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from orchestrator.core.codes import EventKind, Reason
from orchestrator.core.wall import Wall
from orchestrator.system.clock import boottime_s

EVERY_S = 60.0
"""A limit is changed by hand, in minutes; a controller that serves thousands of jobs is not asked more often."""

FIRST_S = 5.0
"""What the opening of a session waits for the first answer; one that comes later moves the wall."""

SQUEUE_S = 30.0


class JobEnd:
    """The end of the job that we run in (limits/wall_sources.py, Source)."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, every_s: float = EVERY_S) -> None:
        self.notes: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._environ, self._every_s = dict(environ), every_s
        self._ahead_s = time.time() - boottime_s()
        self._wall = self._told_at_launch()
        self._failed = ""
        self._first, self._stopping = threading.Event(), threading.Event()
        threading.Thread(target=self._work, name="slurm", daemon=True).start()
        self._first.wait(FIRST_S)

    def wall(self, now_s: float) -> Wall | None:
        return self._wall

    def stop(self) -> None:
        self._stopping.set()

    def _told_at_launch(self) -> Wall | None:
        """Newer Slurm tells the end to the job; 22.05 does not."""
        try:
            return Wall(float(self._environ["SLURM_JOB_END_TIME"]) - self._ahead_s, Reason.SLURM)
        except (KeyError, ValueError):
            return None

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                end = _asked("%e", self._environ)
                self._wall = None if end is None else Wall(end.timestamp() - self._ahead_s, Reason.SLURM)
                self._failed = ""
            except _Unanswered as error:  # what was known stays
                if str(error) != self._failed:
                    self._failed = str(error)
                    self.notes.put((EventKind.SLURM_UNREACHABLE, {"why": self._failed}))
            self._first.set()
            self._stopping.wait(self._every_s)


def job_began_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the job that we run in was started, on CLOCK_BOOTTIME; None where Slurm does not say."""
    try:
        began = float(environ["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        try:
            found = _asked("%S", environ)
        except _Unanswered:
            return None
        if found is None:
            return None
        began = found.timestamp()
    return boottime_s() - (time.time() - began)


class _Unanswered(Exception):
    pass


def _asked(field: str, environ: Mapping[str, str]) -> datetime | None:
    """A field of our job that is an instant; None for one that is none, such as the end of a job without a limit.

    Raises: _Unanswered.
    """
    job = environ.get("SLURM_JOB_ID", "")
    array, task = (environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if array and task:  # one task bears the array's own number, which means all
        job = f"{array}_{task}"
    # ISO in this machine's zone, whatever the person has set for their own eyes
    plain = {**environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", field],
            env=plain,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SQUEUE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unanswered(f"squeue: {error}") from None
    said = min(done.stdout.split(), default="")  # the parts of a heterogeneous job say theirs: the first instant counts
    if done.returncode or not said:
        raise _Unanswered(f"squeue ended with {done.returncode}: {done.stderr.strip()[:200] or 'it knows no such job'}")
    if said in ("NONE", "N/A", "Unknown", "UNLIMITED"):
        return None
    try:
        return datetime.fromisoformat(said).astimezone()
    except ValueError:
        raise _Unanswered(f"squeue said {said[:60]!r}") from None
