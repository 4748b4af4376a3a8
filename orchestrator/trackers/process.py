"""The process that feeds one tracker: `python -m kgorch.trackers.process ORDER`.

Every few seconds it compares what the tracker was sent with what the run has, and sends the rest; after a failure it pauses, longer
each time. When its standard input ends (the session is over, or its supervisor is dead) it does that once more and ends. Each
change is reported to whoever started it as a line of JSON. It has a low priority, and nothing waits for it but the end of a
session, for a bounded time (services/trackers.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sqlalchemy import Engine

from kgorch.core.backoff import Backoff
from kgorch.core.codes import EventKind
from kgorch.core.plan_compatibility import SECRET_ARGUMENT, flat_values
from kgorch.db import runs, sessions
from kgorch.db.engine import open_database
from kgorch.db.rows import RunInfo
from kgorch.errors import PlanError
from kgorch.system import priority, redaction
from kgorch.system.file_lock import FileLock
from kgorch.trackers import state as stored
from kgorch.trackers.feed import Cursor, feed_of, unsent
from kgorch.trackers.state import TrackerState
from kgorch.trackers.tracker import TrackedRun, Tracker, TrackerSettings

EVERY_S, MAX_PAUSE_S, SHARE = 5.0, 60.0, 0.005
"""A comparison every five seconds; up to a minute apart where reading would take more than a two-hundredth of a core."""

RETRIES = Backoff(first_s=5.0, longest_s=600.0)
LOCK_S = 1.0
"""Between two tries to become the process that feeds this tracker: one of a supervisor that was killed may be ending."""

NICE = 10
MAX_WHY = 300
"""Characters of the cause of a failure."""

BUSY = "another process of kgorch sends this run's metrics"

Report = Callable[[Mapping[str, Any]], None]


class TrackerOrder(NamedTuple):
    """What the process is started with. It holds no secret: those are in the environment."""

    home: str
    run_id: str
    tracker: str
    settings: TrackerSettings


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Connect to a tracker. Raises: ImportError; whatever its library raises."""
    if name == "tensorboard":
        from kgorch.trackers.tensorboard_files import TensorBoardFiles

        return TensorBoardFiles(run)
    if name == "wandb":
        from kgorch.trackers.wandb_run import WandbRun

        return WandbRun(run)
    if name == "mlflow":
        from kgorch.trackers.mlflow_run import MlflowRun

        return MlflowRun(run)
    raise ValueError(f"unknown tracker {name!r}")


def pause_s(reading_s: float) -> float:
    """Seconds until the next comparison. Args: reading_s: processor time that reading the run took."""
    return min(max(EVERY_S, reading_s / SHARE), MAX_PAUSE_S)


class Feeder:
    """Feeds one tracker with one run."""

    def __init__(self, engine: Engine, run: RunInfo, order: TrackerOrder, report: Report) -> None:
        self._engine, self._run, self._order, self._report = engine, run, order, report
        self._folder = Path(run.folder, "trackers")
        self._state_path = self._folder / f"{order.tracker}.json"
        self._secrets = redaction.secret_values(os.environ)
        self._tracker: Tracker | None = None
        self._cursor = Cursor()
        self._last_report: Mapping[str, Any] = {}
        self._phase = ""
        self._reading_s = 0.0

    def work(self, ended: threading.Event) -> None:
        """Until `ended`, and once more then."""
        failures = 0
        while True:
            is_last = ended.is_set()
            try:
                self._synchronize()
                failures = 0
            except Exception as error:  # each library raises its own
                failures += 1
                self._report_once({"failed": self._cause(error)})
                self._disconnect()
            if is_last:
                break
            ended.wait(RETRIES.after(failures) or pause_s(self._reading_s))
        self._disconnect()

    def _synchronize(self) -> None:
        began_s = time.thread_time()
        feed = feed_of(self._engine, self._run, system=self._order.settings.system)
        self._reading_s = time.thread_time() - began_s
        self._phase = feed.phase
        if self._tracker is None:
            known = stored.load(self._state_path)
            self._tracker = open_tracker(self._order.tracker, self._tracked_run(known.reference if known else ""))
            cursor = known.cursor if known else self._imported_cursor()
            self._cursor = self._tracker.bring_up(cursor, feed.scalars)
        new = unsent(feed.scalars, self._cursor)
        self._tracker.send(feed, new)
        self._cursor.advance(new)
        if new or not self._last_report:
            stored.store(self._state_path, TrackerState(self._tracker.reference, self._cursor))
        self._report_once({"sent": self._cursor.sent_steps(), "url": self._tracker.url})

    def _imported_cursor(self) -> Cursor:
        """How far the run was sent on the machine that it came from; its journal came along."""
        for kind in (EventKind.TRACKED, EventKind.TRACKING_FAILED):
            for event in reversed(sessions.events_of_kind(self._engine, self._run.id, kind, limit=10)):
                if steps := event.facts["sent"].get(self._order.tracker):
                    return Cursor(stages=dict(steps))
        return Cursor()

    def _tracked_run(self, reference: str) -> TrackedRun:
        return TrackedRun(
            self._run, self._order.settings, _arguments(self._run, self._secrets), self._folder, reference
        )

    def _disconnect(self) -> None:
        """Close the tracker, if it is open; a failure of that is reported and no more."""
        tracker, self._tracker = self._tracker, None
        if tracker:
            try:
                tracker.close(self._phase)
            except Exception as error:
                self._report_once({"failed": self._cause(error)})

    def _cause(self, error: Exception) -> str:
        if isinstance(error, ImportError):
            return f"{error}; pip install 'kgorch[{self._order.tracker}]'"
        text = redaction.redact(" ".join(f"{type(error).__name__}: {error}".split()), self._secrets)
        return text[:MAX_WHY]

    def _report_once(self, report: Mapping[str, Any]) -> None:
        if report != self._last_report:
            self._report(report)
            self._last_report = report


def _arguments(run: RunInfo, secrets: Iterable[str]) -> dict[str, Any]:
    """The arguments of the run's stages by `STAGE.NAME`, those in tables by `STAGE.TABLE.NAME`.

    Without those whose names say that they are secret, and without secrets in the text of the others.
    """
    from kgorch.plan import parse

    try:
        plan = parse(run.plan, "plan.toml", run.overrides)
    except PlanError:  # of another version, or of a run that was found without one
        return {}
    return {
        stage.name + name: _redacted(value, secrets)
        for stage in plan.stage
        for name, value in flat_values(stage.args, ".")
        if not SECRET_ARGUMENT.search(name)
    }


def _redacted(value: Any, secrets: Iterable[str]) -> Any:
    """A value with its texts redacted; of a list each."""
    if isinstance(value, list):
        return [_redacted(item, secrets) for item in value]
    return redaction.redact(value, secrets) if isinstance(value, str) else value


def main(text: str) -> int:
    document = json.loads(text)
    order = TrackerOrder(
        document["home"], document["run"], document["tracker"], TrackerSettings(**document["settings"])
    )
    report = _reporter()
    if document["beside_training"]:
        priority.lower(NICE)
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), name="end", daemon=True).start()
    engine = open_database(Path(order.home))
    run = runs.by_id(engine, order.run_id)
    if run is None:
        return 0
    folder = Path(run.folder, "trackers")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{order.tracker}.lock")
    while not lock.acquire():
        if ended.is_set():
            report({"failed": BUSY})
            return 0
        ended.wait(LOCK_S)
    Feeder(engine, run, order, report).work(ended)
    return 0


def _reporter() -> Report:
    """Reports go to the standard output as it was; what libraries print goes where errors go."""
    stream: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(document: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: the supervisor was killed
            stream.write(json.dumps(document) + "\n")
            stream.flush()

    return report


def _wait_for_end(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    ended.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
