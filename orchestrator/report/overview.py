"""All runs of a state folder at a glance, in fields of `status --json`.

`run_view.of_run` takes some thirty queries, too many for hundreds of runs every second. A listing is three queries; what it lacks
is read for each run when its rows have changed, and every few seconds while it trains.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine

from kgorch.core.codes import OVER, Phase, Reason, RunState
from kgorch.db import queue, runs, sessions
from kgorch.db.rows import ResumeInfo, RunInfo, SessionInfo
from kgorch.report import curves, forecast, remote_view, run_view
from kgorch.report.curves import CurveCache
from kgorch.report.json_fields import View, finite_metrics

LIVE_S, REFRESH_S = 2.0, 300.0
"""Until the entry of a run is made again without a change in the database, in training and else: a supervisor may have died, and
dates of a forecast pass."""


class ListedRun(NamedTuple):
    """A run with its newest session and its entry in the queue."""

    run: RunInfo
    session: SessionInfo | None
    resume: ResumeInfo | None

    @property
    def is_live(self) -> bool:
        return self.session is not None and self.session.phase not in OVER


def listing(engine: Engine, *, limit: int) -> list[ListedRun]:
    """Live runs first, then the newest."""
    rows = runs.all_runs(engine, limit=limit)
    newest = sessions.newest_of_runs(engine, [run.id for run in rows])
    waiting = {entry.resume.run_id: entry.resume for entry in queue.entries(engine)}
    listed = [ListedRun(run, newest.get(run.id), waiting.get(run.id)) for run in rows]
    return sorted(listed, key=lambda item: (not item.is_live, item.run.state != RunState.ACTIVE))


def brief(item: ListedRun) -> View:
    """The fields of run_view.of_run that the listing knows; the others None."""
    run, row = item.run, item.session
    return {
        "run": run.name,
        "run_number": run.number,
        "state": run.state,
        "phase": row.phase if row else Phase.QUEUED,
        "reason": row.reason if row else Reason.NONE,
        "why": run.why or (row.why if row else ""),
        "stage": row.stage if row else "",
        "stages": None,
        "epoch": row.epoch if row else 0,
        "epochs_total": (row.epochs_total or None) if row else None,
        "step": row.step if row else 0,
        "steps_total": (row.steps_total or None) if row else None,
        "step_s": (row.step_s or None) if row else None,
        "session": None,
        "checkpoint": None,
        "metrics": finite_metrics(row.metrics) if row else {},
        "forecast": None,
        "quota": None,
        "next": None,
        "notices": [],
    }


def progress(view: View) -> View:
    """`stage` (share of the stage's steps), `run` (share of all stages, each counted alike), `session` (share of its time);
    None where it is not known."""
    share = min(1.0, view["step"] / view["steps_total"]) if view["steps_total"] else None
    stages = view["stages"] or []
    whole = 1.0 if view["state"] == RunState.FINISHED else None
    if whole is None and share is not None and stages:
        current_done = any(item["done"] and item["name"] == view["stage"] for item in stages)
        whole = min(1.0, (sum(item["done"] for item in stages) + (0.0 if current_done else share)) / len(stages))
    return {"stage": share, "run": share if whole is None else whole, "session": _session_share(view["session"])}


def _session_share(session: View | None) -> float | None:
    if not session or session["ended_at"] or session["left_s"] is None:
        return None
    elapsed_s = max(0.0, (datetime.now(UTC) - datetime.fromisoformat(session["started_at"])).total_seconds())
    total_s = elapsed_s + session["left_s"]
    return min(1.0, elapsed_s / total_s) if total_s > 0 else 1.0


class ListCache:
    """Entries of runs as `entry` makes them, made again when the listing shows a change. Safe to use from several threads."""

    def __init__(self, curve_cache: CurveCache) -> None:
        self._curves, self._lock = curve_cache, threading.Lock()
        self._entries: dict[str, tuple[object, float, View]] = {}

    def known(self, item: ListedRun) -> View | None:
        """The entry, if there is one and it is current."""
        with self._lock:
            found = self._entries.get(item.run.id)
        if found is None or found[0] != _version(item):
            return None
        return found[2] if time.monotonic() - found[1] < (LIVE_S if item.is_live else REFRESH_S) else None

    def old(self, item: ListedRun) -> View | None:
        """The last entry, current or not."""
        with self._lock:
            return self._entries[item.run.id][2] if item.run.id in self._entries else None

    def make(self, engine: Engine, item: ListedRun) -> View:
        made = entry(engine, item, self._curves)
        with self._lock:
            self._entries[item.run.id] = (_version(item), time.monotonic(), made)
        return made

    def forget(self, run_ids: set[str]) -> None:
        """Drop the entries of all runs but these."""
        with self._lock:
            self._entries = {run_id: found for run_id, found in self._entries.items() if run_id in run_ids}


def entry(engine: Engine, item: ListedRun, curve_cache: CurveCache) -> View:
    """The fields of `brief` with what takes queries of the run: its forecast, what comes next, `progress`, `headline`."""
    run, row, now = item.run, item.session, datetime.now(UTC)
    is_alive = row is not None and run_view.is_live(engine, row)
    is_training = row is not None and not is_alive and item.is_live and run_view.is_running(engine, row)
    view: dict[str, Any] = brief(item)
    view["stages"] = [{"name": one.name, "done": one.finished_at is not None} for one in runs.stages(engine, run.id)]
    if row:
        view["session"] = run_view.session_fields(row, is_alive, is_training, now)
        view["forecast"] = forecast.of_run(engine, run, row, now, is_live=is_alive or is_training)
    elsewhere = remote_view.of_run(engine, run)
    view["next"] = run_view.next_fields(run, row, item.resume, is_alive, is_training) | (
        remote_view.following(run, elsewhere, is_here=row is not None) if elsewhere else {}
    )
    view["progress"] = progress(view)
    view["headline"] = headline(engine, run, view, curve_cache)
    return view


def headline(engine: Engine, run: RunInfo, view: View, curve_cache: CurveCache) -> View | None:
    """The metric that stands for the run: `name`, `value`, and `line`, a few values of it; None for a run without metrics."""
    curve = curve_cache.of_run(engine, run)
    if (name := curves.headline(curve)) is None:
        return None
    line = curves.sparkline(curve, name)
    return {"name": name, "value": view["metrics"].get(name, line[-1] if line else None), "line": line}


def _version(item: ListedRun) -> object:
    """Equal as long as no column of the three rows has changed."""
    return item
