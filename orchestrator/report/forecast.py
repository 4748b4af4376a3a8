"""The forecast of a run: the field `forecast` of `status --json` (docs/json.md), and how accurate earlier ones were."""

from __future__ import annotations

import statistics
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Engine

from kgorch.core.codes import EventKind, RunState, TrendVerdict
from kgorch.core.forecast.eta import EtaRange, Projection
from kgorch.db import sessions
from kgorch.db.rows import RunInfo, SessionInfo
from kgorch.report.json_fields import View, stamp
from kgorch.supervisor import run_forecast
from kgorch.supervisor.run_forecast import Goal, RunForecast

MAX_FORECASTS = 1000
"""Newest forecasts of a run that are compared with its end."""


def of_run(engine: Engine, run: RunInfo, row: SessionInfo, now: datetime, *, is_live: bool) -> View | None:
    """None for a run that is finished or failed, or that has not trained yet, and between sessions of one whose steps are all done:
    nothing is known of what follows them in the script."""
    if run.state != RunState.ACTIVE:
        return None
    forecast = run_forecast.forecast_run(engine, run, row, now, is_live=is_live)
    return _view(forecast) if forecast and (is_live or forecast.steps_left != 0) else None


def _view(forecast: RunForecast) -> View:
    end = forecast.end or EtaRange(None, None, None)
    return {
        "stage": forecast.stage,
        "pace_s": _round(forecast.pace.usual_s),
        "pace_fast_s": _round(forecast.pace.fast_s),
        "pace_slow_s": _round(forecast.pace.slow_s),
        "startup_s": _round(forecast.startup_s),
        "cold_s": _round(forecast.cold_s),
        "steps_left": forecast.steps_left,
        "epochs_left": _epochs(forecast.steps_left, forecast),
        "now_steps": forecast.now_steps,
        "now_epochs": _epochs(forecast.now_steps, forecast),
        "sessions": end.usual.sessions if end.usual else None,
        **_dates(end),
        "target": _target(forecast.goal) if forecast.goal else None,
        "assumes": list(forecast.assumptions),
    }


def _target(goal: Goal) -> View:
    fewest, middle, most = (None if epochs is None else round(epochs, 1) for epochs in goal.epochs)
    return {
        "target": str(goal.target),
        "verdict": goal.outlook.verdict,
        "best": goal.outlook.best,
        "step": goal.outlook.at_step if goal.outlook.verdict is TrendVerdict.REACHED else goal.step,
        "epochs": middle,
        "epochs_fewest": fewest,
        "epochs_most": most,
        **_dates(goal.end),
    }


def _dates(end: EtaRange) -> dict[str, str | None]:
    return {"end_at": _end_of(end.usual), "earliest_at": _end_of(end.early), "latest_at": _end_of(end.late)}


def _end_of(course: Projection | None) -> str | None:
    return stamp(course.end_at) if course else None


def _epochs(steps: int | None, forecast: RunForecast) -> float | None:
    return None if steps is None or not forecast.steps_per_epoch else round(steps / forecast.steps_per_epoch, 2)


def _round(value: float) -> float:
    """Rounded to four significant digits."""
    return float(f"{value:.4g}")


class ForecastAccuracy(NamedTuple):
    """How the forecasts of a run compare with its end.

    Attributes:
        forecasts: how many there are.
        in_range: how many have the end in their range, earliest to latest.
        median_error: distance of the middle from the end, as a share of the time that was left.
    """

    forecasts: int
    in_range: int
    median_error: float


def accuracy(engine: Engine, run: RunInfo) -> ForecastAccuracy | None:
    """Compare the forecasts of a finished run's last stage with its end; None if there are none."""
    events = sessions.events_of_kind(engine, run.id, EventKind.FORECAST, limit=MAX_FORECASTS)
    last = sessions.last(engine, run.id)
    ended_at = run.finished_at
    if not (ended_at and events and last):
        return None
    errors, in_range = [], 0
    for event in events:
        if event.facts["stage"] != last.stage:
            continue
        early, middle, late = (_time(event.facts[name]) for name in ("earliest_at", "end_at", "latest_at"))
        in_range += early is not None and early <= ended_at and (late is None or ended_at <= late)
        error_s = abs((middle - ended_at).total_seconds()) if middle else 0.0
        errors.append(error_s / max((ended_at - event.at).total_seconds(), 1.0))
    return ForecastAccuracy(len(errors), in_range, statistics.median_high(errors)) if errors else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def lines(made: list[View], created_at: str, finished_at: str | None) -> dict[str, list[tuple[float, float | None]]]:
    """Forecasts against what came: by label, points of (made, predicted end), in hours since the run was created.

    Args:
        made: of `course`.
    """

    def end(item: View, name: str) -> tuple[float, float | None]:
        return hours_since(created_at, item["at"]), hours_since(created_at, item[name]) if item[name] else None

    names = {"predicted end": "end_at", "earliest": "earliest_at", "latest": "latest_at"}
    found = {label: [end(item, name) for item in made] for label, name in names.items()}
    if made and finished_at:
        ended_h = hours_since(created_at, finished_at)
        found["actual end"] = [(hours_since(created_at, made[0]["at"]), ended_h), (ended_h, ended_h)]
    return found


def hours_since(since: str, at: str) -> float:
    """Never less than 0: the wall clock may have been set back."""
    return max(0.0, (datetime.fromisoformat(at) - datetime.fromisoformat(since)).total_seconds() / 3600)


def course(engine: Engine, run: RunInfo) -> list[View]:
    """The forecasts that were made of the run, oldest first: `at`, `stage`, `end_at`, `earliest_at`, `latest_at`, `steps_left`,
    `sessions`."""
    events = sessions.events_of_kind(engine, run.id, EventKind.FORECAST, limit=MAX_FORECASTS)
    fields = ("stage", "end_at", "earliest_at", "latest_at", "steps_left", "sessions")
    return [{"at": stamp(event.at)} | {name: event.facts.get(name) for name in fields} for event in events]
