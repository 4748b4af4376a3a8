"""Visits of the runs at other places that are due: a process for each (`kgorch remote visit`), because a visit waits for the place.

Rows are the truth: a visit that is killed at any point is made up for by the next one (remote/driver.py).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine

from kgorch.db import remote
from kgorch.db.remote import DueRun
from kgorch.system import process_protection
from kgorch.system.clock import Clock

AT_ONCE = 4
"""Visits at the same time: each may read a training's folder and send a bundle."""

AGAIN_S = 60.0
"""Seconds until a run is visited again that is due as before: the visit has failed, or another process was at it."""

LIMIT_S = 6 * 3600.0
"""After which a visit is killed. Each request has a deadline of its own, but for a bundle of many parts they add up."""

log = logging.getLogger("kgorch.daemon")
Start = Callable[[DueRun, Sequence[str]], "subprocess.Popen[bytes]"]


def start_visit(run: DueRun, without: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process that visits a run; it writes to `remote.log` of the run's folder. Raises: OSError.

    Args:
        without: variables that are not for it.
    """
    folder = Path(run.folder)
    with open(folder / "remote.log", "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "kgorch.cli", "remote", "visit", run.run_id],
            start_new_session=True,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={name: value for name, value in os.environ.items() if name not in without}
            | process_protection.child_environment(),
        )


@dataclass(slots=True)
class _Visit:
    process: subprocess.Popen[bytes]
    run: DueRun
    began_s: float


class RemoteVisits:
    """The visits of one daemon. Args: without: variables that visits do not get."""

    def __init__(self, clock: Clock, without: Sequence[str], start: Start = start_visit) -> None:
        self._clock, self._without, self._start = clock, without, start
        self._visits: dict[str, _Visit] = {}
        self._last: dict[str, tuple[datetime, float]] = {}  # of a run: what was due at the last visit, when that began

    @property
    def has_ended(self) -> bool:
        """Whether a visit is over that `tick` has not seen yet."""
        return any(visit.process.poll() is not None for visit in self._visits.values())

    def tick(self, engine: Engine, now: datetime) -> datetime | None:
        """Start the visits that are due. Returns: when the next one is; None for none."""
        self._reap()
        due = remote.due_runs(engine, now)
        self._last = {run.run_id: self._last[run.run_id] for run in due if run.run_id in self._last}
        for run in due:
            if len(self._visits) >= AT_ONCE:
                break
            if run.run_id not in self._visits and not self._was_just_visited(run):
                self._visit(run)
        return remote.next_due_at(engine, now)

    def stop(self) -> None:
        """End what lives: the next daemon's visits begin with the rows."""
        for visit in self._visits.values():
            visit.process.terminate()
        for visit in self._visits.values():
            with suppress(subprocess.TimeoutExpired):
                visit.process.wait(timeout=5)
            visit.process.kill()

    def _was_just_visited(self, run: DueRun) -> bool:
        due_at, began_s = self._last.get(run.run_id, (None, 0.0))
        return due_at == run.due_at and self._clock.now_s() - began_s < AGAIN_S

    def _visit(self, run: DueRun) -> None:
        began_s = self._clock.now_s()
        self._last[run.run_id] = run.due_at, began_s
        try:
            self._visits[run.run_id] = _Visit(self._start(run, self._without), run, began_s)
        except OSError as error:
            log.warning("%s cannot be visited: %s", run.run, error, extra={"run": run.run})

    def _reap(self) -> None:
        for run_id, visit in list(self._visits.items()):
            code, name = visit.process.poll(), visit.run.run
            if code is None and self._clock.now_s() - visit.began_s > LIMIT_S:
                log.warning("%s: its visit takes too long and is killed", name, extra={"run": name})
                visit.process.kill()
            elif code is not None:
                del self._visits[run_id]
                if code:
                    text = "%s: its visit ended with %s: see %s/remote.log"
                    log.warning(text, name, code, visit.run.folder, extra={"run": name})
