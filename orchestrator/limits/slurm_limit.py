"""The end of a Slurm job, queried repeatedly, because `scontrol update TimeLimit` and preemption move it.

Slurm reports instants, on clocks that a cluster keeps in step. They are converted to CLOCK_BOOTTIME by the difference of this
machine's two clocks when the session was opened, so a later jump of the wall clock does not move the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from kgorch.core.codes import EventKind, Reason
from kgorch.core.limits.wall import Wall
from kgorch.limits.source import News
from kgorch.system.clock import boottime_s

EVERY_S = 60.0
"""Seconds between two queries. People change a limit in minutes, and a controller that serves thousands of jobs must not be
queried more often."""

FIRST_S = 5.0
"""Seconds that the opening of a session waits for the first answer. A later one moves the wall."""

SQUEUE_S = 30.0
"""Seconds that squeue may run."""


class JobEnd:
    """The end of the job that this process runs in, as a source (limits/source.py).

    Args:
        environ: of the job; `SLURM_JOB_ID` and, from newer versions of Slurm, `SLURM_JOB_END_TIME`.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, *, every_s: float = EVERY_S) -> None:
        self.news = News()
        self._environ, self._every_s = dict(environ), every_s
        self._clock_difference_s = time.time() - boottime_s()
        self._wall = self._end_at_launch()
        self._failure = ""
        self._has_queried, self._stopping = threading.Event(), threading.Event()
        self._woken = threading.Event()
        self._listen()
        threading.Thread(target=self._work, name="slurm", daemon=True).start()
        self._has_queried.wait(FIRST_S)

    def wall(self, now_s: float) -> Wall | None:
        return self._wall

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()

    def look_now(self) -> None:
        """Query the end again without waiting: Slurm has warned of it."""
        self._woken.set()

    def _listen(self) -> None:
        """Slurm warns with SIGUSR1 before the time limit, and on some sites when a preemption begins (`sbatch --signal`).

        The signal says only that the end is near, so the end is queried. Python allows handlers in the main thread alone.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, lambda *_: self.look_now())

    def _end_at_launch(self) -> Wall | None:
        """The end by the job's environment. Newer versions of Slurm set the variable; 22.05 does not."""
        try:
            return Wall(float(self._environ["SLURM_JOB_END_TIME"]) - self._clock_difference_s, Reason.SLURM)
        except (KeyError, ValueError):
            return None

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                end = _query("%e", self._environ)
                self._wall = None if end is None else Wall(end.timestamp() - self._clock_difference_s, Reason.SLURM)
                self._failure = ""
                self.news.wall_moved()
            except _QueryFailed as error:  # the wall stays: the job still ends, whether the controller answers or not
                if str(error) != self._failure:
                    self._failure = str(error)
                    self.news.note(EventKind.SLURM_UNREACHABLE, {"why": self._failure})
            self._has_queried.set()
            self._woken.wait(self._every_s)
            self._woken.clear()


def job_began_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """When this job was started, seconds of CLOCK_BOOTTIME; None where Slurm does not say."""
    try:
        began = float(environ["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        try:
            start = _query("%S", environ)
        except _QueryFailed:
            return None
        if start is None:
            return None
        began = start.timestamp()
    return boottime_s() - (time.time() - began)


class _QueryFailed(Exception):
    """squeue gave no answer that can be used; the text says why."""


def _query(field: str, environ: Mapping[str, str]) -> datetime | None:
    """A field of this job that is an instant; None where it has none, as the end of a job without a limit.

    Args:
        field: of squeue's --format, such as "%e".
    Raises: _QueryFailed.
    """
    job = environ.get("SLURM_JOB_ID", "")
    array, task = (environ.get(f"SLURM_ARRAY_{name}_ID") for name in ("JOB", "TASK"))
    if array and task:  # one task of an array has the array's own number as its job, which means all tasks
        job = f"{array}_{task}"
    # ISO 8601, whatever format the user has set for squeue; in UTC, because in autumn an hour of local time comes twice
    variables = {**environ, "SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", field],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SQUEUE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _QueryFailed(f"squeue: {error}") from None
    text = min(
        done.stdout.split(), default=""
    )  # a heterogeneous job has a line for each part: the first instant counts
    if done.returncode or not text:
        raise _QueryFailed(f"squeue: exit status {done.returncode}: {done.stderr.strip()[:200] or 'no such job'}")
    if text in ("NONE", "N/A", "Unknown", "UNLIMITED"):
        return None
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise _QueryFailed(f"squeue: expected an instant, found {text[:60]!r}") from None
