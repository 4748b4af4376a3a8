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
from kgorch.db import checkpoints, runs
from kgorch.db.rows import RunInfo
from kgorch.report import checkpoint_list, doctor, forecast, overview, plan_view, quota_view, timeline
from kgorch.report.json_fields import View
from kgorch.report.overview import ListedRun
from kgorch.web.state import WebState

MAX_RUNS = 500
FRESH_S, ADVICE_S = 0.9, 20.0
BUDGET_S = 0.25
"""Of one turn for views of runs that are not known yet; the others follow in the next turn, so that an update never takes long."""

CHECKPOINTS_SHOWN = 200


def run_key(run: RunInfo) -> str:
    return f"run-{run.id}"


class Parts:
    """Makes the parts. Methods may be called from several threads."""

    def __init__(self, state: WebState, templates: Environment) -> None:
        self._state, self._templates = state, templates

    def render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    # the list of runs

    def runs(self) -> View:
        """`rows` (HTML by id, in order), `summary` (HTML), `complete`: False while some rows lack their details."""
        found: View = self._state.shared("runs", FRESH_S, self._runs)
        return found

    def _runs(self) -> View:
        engine, until_s = self._state.engine, time.monotonic() + BUDGET_S
        listed = overview.listing(engine, limit=MAX_RUNS)
        self._state.views.forget({item.run.id for item in listed})
        rows, complete = {}, True
        for item in listed:
            view = self._state.views.known(item)
            if view is None and time.monotonic() < until_s:
                view = self._state.views.of_run(engine, item)
            complete = complete and view is not None
            rows[run_key(item.run)] = self._row(item, view)
        counts = {
            "live": sum(item.is_live for item in listed),
            "queued": sum(item.resume is not None and item.resume.due_at is not None for item in listed),
            "failed": sum(item.run.state == RunState.FAILED for item in listed),
            "all": runs.count(engine),
        }
        summary = self.render(
            "_summary.html",
            counts=counts,
            pools=quota_view.all_pools(engine),
            machine=self._state.machine(),
            shown=len(listed),
        )
        return {"rows": rows, "summary": summary, "complete": complete}

    def _row(self, item: ListedRun, view: View | None) -> str:
        known = view or overview.brief(item) | {"progress": None, "headline": None}
        if view is None:
            known["progress"] = overview.progress(known)
        return self.render(
            "_run_row.html", key=run_key(item.run), view=known, is_known=view is not None, resume=item.resume
        )

    # one run

    def listed(self, run: RunInfo) -> ListedRun:
        from kgorch.db import queue, sessions

        return ListedRun(
            run, sessions.last(self._state.engine, run.id), queue.pending_resume(self._state.engine, run.id)
        )

    def view(self, run: RunInfo) -> View:
        return self._state.views.of_run(self._state.engine, self.listed(run))

    def of_run(self, name: str, number: int, page: str) -> Mapping[str, str]:
        """The parts of one page of a run: HTML by id. Raises: NotFound."""
        found: Mapping[str, str] = self._state.shared(
            ("run", name, number, page), FRESH_S, lambda: self._of_run(self._state.find(name, number), page)
        )
        return found

    def _of_run(self, run: RunInfo, page: str) -> Mapping[str, str]:
        engine, item = self._state.engine, self.listed(run)
        view = self._state.views.of_run(engine, item)
        base = {"view": view, "run": run, "resume": item.resume, "is_live": item.is_live}
        parts = {"head": self.render("_run_head.html", **base), "actions": self.render("_run_actions.html", **base)}
        if page == "overview":
            advice = self._state.shared(("advice", run.id), ADVICE_S, lambda: doctor.of_run(engine, run))
            extra = {
                "advice": advice,
                "accuracy": forecast.accuracy(engine, run),
                "course": forecast.course(engine, run)[-5:],
            }
            parts["facts"] = self.render("_run_facts.html", **base, **extra)
        elif page == "checkpoints":
            parts["checkpoints"] = self.render("_checkpoints.html", **base, **self._checkpoints(run))
        elif page == "plan":
            parts["plan"] = self.render("_plan.html", **base, plan=plan_view.of_run(engine, run))
        return parts

    def _checkpoints(self, run: RunInfo) -> View:
        rows = checkpoints.of_run(self._state.engine, run.id)
        newest = rows[-CHECKPOINTS_SHOWN:]
        present = {
            row.path
            for row in checkpoint_list.on_disk([row for row in newest if row.state == CheckpointState.VERIFIED])
        }
        entries = checkpoint_list.entries(newest)
        return {
            "entries": list(reversed([entry for entry in entries if entry["path"] in present])),
            "gone": list(reversed([entry for entry in entries if entry["path"] not in present])),
            "total_bytes": sum(entry["bytes"] for entry in entries if entry["path"] in present),
            "older": len(rows) - len(newest),
        }

    def timeline(self, run: RunInfo) -> View:
        found: View = self._state.shared(
            ("timeline", run.id), FRESH_S, lambda: timeline.of_run(self._state.engine, run, datetime.now(UTC))
        )
        return found
