"""The forecast as `status` shows it: the field `forecast` of the view (docs/json.md), and how earlier ones held."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Engine

from db import sessions
from db.records import RunInfo, SessionInfo
from orchestrator.core.codes import EventKind, RunState
from orchestrator.core.eta import Course, End
from orchestrator.supervisor import run_forecast
from orchestrator.supervisor.run_forecast import Foretold, Goal

FORECASTS = 1000
"""The newest that are held against what came."""


def of_run(engine: Engine, run: RunInfo, row: SessionInfo, now: datetime, *, lives: bool) -> dict[str, Any] | None:
    """None for a run that is over, which one that has failed is, or that has not trained yet."""
    if run.state != RunState.ACTIVE:
        return None
    found = run_forecast.foretell(engine, run, row, now, lives=lives)
    return _view(found) if found else None


def _view(found: Foretold) -> dict[str, Any]:
    end = found.end or End(None, None, None)
    return {
        "stage": found.stage,
        "pace_s": _short(found.pace.usual_s),
        "pace_fast_s": _short(found.pace.fast_s),
        "pace_slow_s": _short(found.pace.slow_s),
        "startup_s": _short(found.startup_s),
        "cold_s": _short(found.cold_s),
        "steps_left": found.steps_left,
        "epochs_left": _epochs(found.steps_left, found),
        "now_steps": found.now_steps,
        "now_epochs": _epochs(found.now_steps, found),
        "sessions": end.usual.sessions if end.usual else None,
        **_dates(end),
        "target": _target(found.goal) if found.goal else None,
        "assumes": list(found.assumes),
    }


def _target(goal: Goal) -> dict[str, Any]:
    fewest, middle, most = (None if epochs is None else round(epochs, 1) for epochs in goal.epochs)
    return {
        "target": str(goal.target),
        "verdict": goal.outlook.verdict,
        "best": goal.outlook.best,
        "step": goal.outlook.at_step if goal.outlook.verdict == "reached" else goal.step,
        "epochs": middle,
        "epochs_fewest": fewest,
        "epochs_most": most,
        **_dates(goal.end),
    }


def _dates(end: End) -> dict[str, str | None]:
    return {"end_at": _stamp(end.usual), "earliest_at": _stamp(end.early), "latest_at": _stamp(end.late)}


def _stamp(course: Course | None) -> str | None:
    return course.end_at.isoformat(timespec="milliseconds").replace("+00:00", "Z") if course else None


def _epochs(steps: int | None, found: Foretold) -> float | None:
    return None if steps is None or not found.steps_an_epoch else round(steps / found.steps_an_epoch, 2)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def held(engine: Engine, run: RunInfo) -> tuple[int, int, float] | None:
    """Of the finished run's forecasts of its last stage: how many, how many whose range held the end, and by how much of the
    time that was left the middle was off, in the median. None without one."""
    told = sessions.of_kind(engine, run.id, EventKind.FORECAST, limit=FORECASTS)
    last = sessions.last(engine, run.id)
    ended_at = run.finished_at
    if not (ended_at and told and last):
        return None
    offs, inside = [], 0
    for item in told:
        if item.facts["stage"] != last.stage:
            continue
        early, middle, late = (_instant(item.facts[name]) for name in ("earliest_at", "end_at", "latest_at"))
        inside += early is not None and early <= ended_at and (late is None or ended_at <= late)
        off_s = abs((middle - ended_at).total_seconds()) if middle else 0.0
        offs.append(off_s / max((ended_at - item.at).total_seconds(), 1.0))
    return (len(offs), inside, sorted(offs)[len(offs) // 2]) if offs else None


def _instant(told: str | None) -> datetime | None:
    return datetime.fromisoformat(told) if told else None
