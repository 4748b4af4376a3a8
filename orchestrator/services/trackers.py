"""The experiment trackers of a session, as its supervisor sees them: a process for each (trackers/process.py).

Training and supervisor never wait for them. Only the end of a session does, END_S at most; what is not sent by then is sent by the
next session, or by `kgorch track`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind, Note
from kgorch.db.rows import RunInfo
from kgorch.errors import PlanError
from kgorch.plan import TrackSection
from kgorch.system.paths import home_of_folder

END_S = 30.0
"""Seconds that the end of a session waits for the trackers at most."""

RESTARTS = Backoff(first_s=10.0, longest_s=600.0)
"""Pauses before a process that has ended by itself is started again."""

PROGRAM = "kgorch.trackers.process"


def check(section: TrackSection, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the libraries of the plan's trackers are installed, and that MLflow knows where. Nothing is connected or imported.

    Raises: PlanError naming the package to install, or the variable to set.
    """
    for name in section.to:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, as W&B makes one, is no package
            raise PlanError(
                f"track.to: {name} is not installed", next_step=f"pip install 'kgorch[{name}]'", error_code="KG902"
            )
    if "mlflow" in section.to and not (section.uri or environ.get("MLFLOW_TRACKING_URI")):
        raise PlanError(
            "track.uri: MLflow has no server to send to",
            next_step='give track.uri ("http://HOST:5000", or "sqlite:///mlflow.db" for a local file), or set MLFLOW_TRACKING_URI',
        )


def of(run: RunInfo, section: TrackSection, note: Note) -> Trackers | None:
    """The trackers of a run, started; None without any in the plan."""
    return Trackers(run, section, note) if section.to else None


class Trackers:
    """The processes that feed the trackers of one run.

    Args:
        note: takes entries for the journal from any thread: `tracked` once a tracker holds something, when the last one that had
            failed holds it again, and at the end; `tracking_failed` whenever the failing trackers or their causes have changed.
    """

    def __init__(self, run: RunInfo, section: TrackSection, note: Note) -> None:
        self._note, self._guard = note, threading.Lock()
        self._failing: dict[str, str] = {}
        self._sent: dict[str, dict[str, int]] = {}
        self._urls: dict[str, str] = {}
        self._members = [TrackerProcess(run, section, name, self._take) for name in section.to]

    def hurry(self) -> None:
        """The session is over: each process sends what is left, and ends."""
        for member in self._members:
            member.hurry()

    @property
    def is_busy(self) -> bool:
        """Whether a process lives that was hurried."""
        return any(member.is_alive for member in self._members)

    def stop(self) -> None:
        """Kill what still runs, and record how far the trackers were sent."""
        for member in self._members:
            member.stop()
        with self._guard:
            if self._sent:
                self._enter()

    def _take(self, name: str, report: Mapping[str, Any]) -> None:
        """A report of a process, or that it has ended; from its thread."""
        with self._guard:
            before, is_first = dict(self._failing), name not in self._sent
            if "failed" in report:
                self._failing[name] = str(report["failed"])
            else:
                self._failing.pop(name, None)
                self._sent[name] = report["sent"]
                if report["url"]:
                    self._urls[name] = report["url"]
            # a report comes with every few steps: only a change is recorded
            if self._failing != before or (is_first and name in self._sent):
                self._enter()

    def _enter(self) -> None:
        kind = EventKind.TRACKING_FAILED if self._failing else EventKind.TRACKED
        sent = {name: dict(steps) for name, steps in self._sent.items()}
        self._note(kind, {"failing": dict(self._failing), "sent": sent, "urls": dict(self._urls)})


class TrackerProcess:
    """The process of one tracker, started again when it ends by itself.

    Args:
        take: is given its reports, and its end as `{"failed": why}`, in a thread.
    """

    def __init__(self, run: RunInfo, section: TrackSection, name: str, take: Any) -> None:
        self.name, self._run, self._take = name, run, take
        self._order = order_of(run, section, name, beside_training=True)
        self._process: subprocess.Popen[str] | None = None
        self._guard, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def hurry(self) -> None:
        """End its standard input."""
        self._ending.set()
        with self._guard:
            if self._process and self._process.stdin:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()

    def stop(self) -> None:
        self.hurry()
        with self._guard:
            if self._process and self._process.poll() is None:
                self._process.kill()
        self._thread.join(timeout=1.0)

    def _work(self) -> None:
        failures = 0
        while not self._ending.is_set():
            began_s, why = time.monotonic(), self._run_once()
            if why is None:
                return
            self._take(self.name, {"failed": why})
            failures = 0 if time.monotonic() - began_s > RESTARTS.longest_s else failures + 1
            self._ending.wait(RESTARTS.after(failures))

    def _run_once(self) -> str | None:
        """Start the process and pass on what it reports. Returns why it has ended; None where that was wanted."""
        try:
            with self._guard:
                if self._ending.is_set():
                    return None
                self._process = process = start_process(self._run, self._order)
        except OSError as error:  # no room for another process: the training goes on without it
            return str(error)
        assert process.stdout
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError):
                self._take(self.name, json.loads(line))
        status = process.wait()
        return None if self._ending.is_set() and status == 0 else f"its process ended with status {status}"


class Sent(NamedTuple):
    """What one tracker was sent.

    Attributes:
        sent: the last step by stage.
        why: why it did not get everything; None if it did.
    """

    name: str
    sent: Mapping[str, int]
    url: str
    why: str | None


def send_now(run: RunInfo, section: TrackSection) -> list[Sent]:
    """Send each tracker what it has not got, one after the other. Waits until it is sent."""
    results = []
    for name in section.to:
        process = start_process(run, order_of(run, section, name, beside_training=False))
        report: dict[str, Any] = {}
        # its standard input ends at once, so it does everything once
        for line in process.communicate()[0].splitlines():
            report |= {"failed": None} | json.loads(line)
        why = report.get("failed")
        if process.returncode or not report:
            why = why or f"its process ended with status {process.returncode}; see {run.folder}/trackers/{name}.log"
        results.append(Sent(name, report.get("sent", {}), report.get("url", ""), why))
    return results


def order_of(run: RunInfo, section: TrackSection, name: str, *, beside_training: bool) -> str:
    """What the process of a tracker is started with, as JSON. Args: beside_training: it has a low priority."""
    settings = section.model_dump(exclude={"to"})
    document = {"home": str(home_of_folder(run.folder)), "run": run.id, "tracker": name, "settings": settings}
    return json.dumps(document | {"beside_training": beside_training})


def start_process(run: RunInfo, order: str) -> subprocess.Popen[str]:
    """Start the process of a tracker. What its library prints is in `trackers/NAME.log` of the run. Raises: OSError."""
    folder = Path(run.folder, "trackers")
    folder.mkdir(parents=True, exist_ok=True)
    workdir = Path(run.workdir)
    with open(folder / f"{json.loads(order)['tracker']}.log", "wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                PROGRAM,
                order,
            ],  # -P: no file of the plan's folder takes the place of a module
            cwd=workdir if workdir.is_dir() else folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
