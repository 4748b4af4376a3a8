"""The parts of the pages that change while one looks: each is a piece of HTML with an id, made from the same templates as the page.

A stream sends a part again when its HTML differs from what was sent before. Parts are made once for all browsers that ask within
a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment

from kgorch.core.codes import CheckpointState, RunState
from kgorch.db import checkpoints, queue, runs, sessions
from kgorch.db.rows import RunInfo
from kgorch.errors import ConfigError, PlanError
from kgorch.report import (
    checkpoint_list,
    doctor,
    fleet_view,
    forecast,
    overview,
    plan_view,
    quota_view,
    run_view,
    timeline,
)
from kgorch.report.json_fields import View, stamp
from kgorch.report.overview import ListedRun
from kgorch.web.state import WebState

MAX_RUNS = 500
FRESH_S, SUMMARY_S, ADVICE_S = 0.9, 5.0, 20.0
BUDGET_S = 0.1
"""Of one turn for entries of runs that are not known yet; the others follow in the next turn, so that no update takes long."""

CHECKPOINTS_SHOWN = 200


def run_key(run: RunInfo) -> str:
    return f"run-{run.id}"


class Parts:
    """Makes the parts. Methods may be called from several threads."""

    def __init__(self, state: WebState, templates: Environment) -> None:
        self._state, self._templates = state, templates
        self._rows: dict[str, tuple[View | None, ListedRun, str]] = {}

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    # the list of runs

    def runs(self) -> View:
        """`rows` (HTML by id, in order), `summary` (HTML), `complete`: False while some rows lack their details."""
        found: View = self._state.shared("runs", FRESH_S, self._runs, lambda found: bool(found["complete"]))
        return found

    def _runs(self) -> View:
        engine, entries = self._state.engine, self._state.entries
        listed = overview.listing(engine, limit=MAX_RUNS)
        ids = {item.run.id for item in listed}
        entries.forget(ids)
        self._rows = {run_id: row for run_id, row in self._rows.items() if run_id in ids}
        until_s = time.monotonic() + BUDGET_S
        rows, complete = {}, True
        for item in listed:
            view = entries.known(item)
            if view is None and time.monotonic() < until_s:
                view = entries.make(engine, item)
            complete = complete and view is not None
            rows[run_key(item.run)] = self._row(item, view or entries.old(item))
        counts = {
            "live": sum(item.is_live for item in listed),
            "queued": sum(item.resume is not None and item.resume.due_at is not None for item in listed),
            "failed": sum(item.run.state == RunState.FAILED for item in listed),
            "all": runs.count(engine),
        }
        pools = self._state.shared("pools", SUMMARY_S, lambda: quota_view.all_pools(engine))
        summary = self.render(
            "_summary.html",
            counts=counts,
            pools=pools,
            machine=self._state.machine(),
            fleet=self._state.shared("fleet", SUMMARY_S, lambda: fleet_view.view(engine)),
            shown=len(listed),
        )
        return {"rows": rows, "summary": summary, "complete": complete}

    def _row(self, item: ListedRun, view: View | None) -> str:
        before = self._rows.get(item.run.id)
        if before and before[0] is view and before[1] == item:  # nothing has changed
            return before[2]
        known = view or overview.brief(item)
        if view is None:
            known |= {"progress": overview.progress(known), "headline": None}
        html = self.render("_run_row.html", view=known, is_known=view is not None, resume=item.resume)
        self._rows[item.run.id] = (view, item, html)
        return html

    # one run

    def of_run(self, name: str, number: int, page: str) -> Mapping[str, str]:
        """The parts of one page of a run: HTML by id. Raises: NotFound."""
        found: Mapping[str, str] = self._state.shared(
            ("run", name, number, page), FRESH_S, lambda: self._of_run(self._state.find(name, number), page)
        )
        return found

    def _of_run(self, run: RunInfo, page: str) -> Mapping[str, str]:
        engine = self._state.engine
        view: View = run_view.of_run(engine, run)
        view["progress"] = overview.progress(view)
        base = {"view": view, "run": run, "resume": queue.pending_resume(engine, run.id)}
        parts = {"head": self.render("_run_head.html", **base), "actions": self.render("_run_actions.html", **base)}
        if page == "overview":
            extra = {
                "advice": self._state.shared(("advice", run.id), ADVICE_S, lambda: self._advice(run)),
                "accuracy": forecast.accuracy(engine, run),
                "course": self._course(run)[-5:],
            }
            parts["facts"] = self.render("_run_facts.html", **base, **extra)
        elif page == "checkpoints":
            parts["checkpoints"] = self.render("_checkpoints.html", **base, **self._checkpoints(run))
        elif page == "plan":
            parts["plan"] = self.render("_plan.html", **base, plan=plan_view.of_run(engine, run))
        return parts

    def _advice(self, run: RunInfo) -> View | None:
        """None for a run whose stored plan cannot be read any more: it is shown all the same."""
        try:
            return doctor.of_run(self._state.engine, run)
        except (PlanError, ConfigError):
            return None

    def _checkpoints(self, run: RunInfo) -> View:
        rows = checkpoints.of_run(self._state.engine, run.id)
        newest = rows[-CHECKPOINTS_SHOWN:]
        verified = [row for row in newest if row.state == CheckpointState.VERIFIED]
        present = {row.path for row in checkpoint_list.on_disk(verified)}
        entries = list(reversed(checkpoint_list.entries(newest)))
        return {
            "entries": [entry for entry in entries if entry["path"] in present],
            "gone": [entry for entry in entries if entry["path"] not in present],
            "total_bytes": sum(entry["bytes"] for entry in entries if entry["path"] in present),
            "older": len(rows) - len(newest),
        }

    def timeline(self, run: RunInfo) -> View:
        found: View = self._state.shared(
            ("timeline", run.id), FRESH_S, lambda: timeline.of_run(self._state.engine, run, datetime.now(UTC))
        )
        return found

    def forecasts(self, run: RunInfo) -> View:
        """Curves of the predicted ends: `series`, with `label`, `x` (made) and `y` (end), both in hours since the run began."""
        lines = forecast.lines(self._course(run), run.created_at.isoformat(), stamp(run.finished_at))
        return {
            "series": [
                {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points]}
                for label, points in lines.items()
                if points
            ]
        }

    def _course(self, run: RunInfo) -> list[View]:
        found: list[View] = self._state.shared(
            ("course", run.id), SUMMARY_S, lambda: forecast.course(self._state.engine, run)
        )
        return found

    def session_starts(self, run: RunInfo) -> list[tuple[int, datetime]]:
        """Number and start of the newest sessions, newest first."""
        rows = sessions.of_run(self._state.engine, run.id, limit=500)
        return [(row.number, row.started_at) for row in reversed(rows)]
