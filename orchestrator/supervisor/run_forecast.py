"""The forecast of a run from its own past: reads rows of the database for core/forecast/eta.py and core/metrics/metric_trend.py.

The supervisor records what later forecasts need: an event `epoch` at the end of each epoch, with its seconds and metrics. It also
records an event `forecast` once a session has trained for half a minute, and another at the session's end, so that forecasts can
be compared with what happened.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from kgorch.core.codes import EventKind, Reason, TrendVerdict
from kgorch.core.forecast import eta
from kgorch.core.forecast.eta import (
    CurrentSession,
    Epoch,
    EtaRange,
    Projection,
    SessionModel,
    StepTime,
    TrainingSpan,
)
from kgorch.core.metrics import metric_trend
from kgorch.core.metrics.metric_trend import MetricTarget, Outlook, TrendPoint
from kgorch.db import checkpoints, queue, runs, sessions
from kgorch.db.rows import AttemptInfo, EventInfo, RunInfo, SessionInfo
from kgorch.limits import quota_outlook
from kgorch.system.clock import boottime_s

MAX_SESSIONS, MAX_EPOCHS = 30, 200
"""Newest sessions and events `epoch` that a forecast reads."""

AUTOMATIC_PAUSE_S = 600.0
"""Longest pause between two sessions, in seconds, that counts as the machine's. In a longer one it waited for the user or for the
quota."""

EPOCH_S = 10.0
"""Shortest time between two events `epoch`, in seconds: shorter epochs are recorded several at a time."""

FORECAST_AFTER_S = 30.0
"""Seconds of training after which a session's first forecast is recorded."""

MIN_WARM_SHARE = 0.1
"""Smallest share of a span's time that counts as warm. In the first minutes of a session the excess of a cold first epoch can be
longer than the span, whose pace would be faster than any."""

Note = Callable[[str, dict[str, Any]], None]
"""Writes an event: its kind and its facts."""


class Goal(NamedTuple):
    """The forecast of the plan's target.

    Attributes:
        step: of the stage, at which the metric reaches the target; None unless foreseeable.
        epochs: fewest, usual and most epochs from now to there; None for those that are not known.
        end: the instants of these.
    """

    target: MetricTarget
    outlook: Outlook
    step: int | None = None
    epochs: tuple[float | None, float | None, float | None] = (None, None, None)
    end: EtaRange = EtaRange(None, None, None)


class RunForecast(NamedTuple):
    """The forecast of a run's current stage.

    Attributes:
        cold_s: seconds that the first epoch of a session takes longer than a later one.
        startup_s: seconds from the opening of a session to its first step.
        steps_left: of the stage; None if its length is not known.
        steps_per_epoch: None if not known.
        now_steps: steps of the session that trains, until its wall or the stage's end; None if none trains.
        end: of the stage; None if its length is not known.
        goal: None without a target.
        assumptions: sentences about what no measurement supports.
    """

    stage: str
    pace: StepTime
    cold_s: float
    startup_s: float
    steps_left: int | None
    steps_per_epoch: float | None
    now_steps: int | None
    end: EtaRange | None
    goal: Goal | None
    assumptions: tuple[str, ...]


class _History(NamedTuple):
    """The past of a run, as the database holds it.

    Attributes:
        row: the newest session; the forecast is for its stage.
        rows: the newest sessions, in the order of their numbers; `row` is among them.
        attached: when the ranks of a session attached, by the session's id.
        epoch_events: events `epoch` of the stage, in order.
        epochs: the same, as core/forecast/eta.py takes them.
    """

    engine: Engine
    run: RunInfo
    row: SessionInfo
    rows: Sequence[SessionInfo]
    attached: Mapping[int, datetime]
    epoch_events: Sequence[EventInfo]
    epochs: Sequence[Epoch]

    @property
    def steps_per_epoch(self) -> float | None:
        row = self.row
        return row.steps_total / row.epochs_total if row.steps_total and row.epochs_total else None


def forecast_run(engine: Engine, run: RunInfo, row: SessionInfo, now: datetime, *, is_live: bool) -> RunForecast | None:
    """The forecast of a run from its newest session `row` and those before it; None if nothing has trained yet.

    Args:
        is_live: the ranks of session `row` are running.
    """
    history = _read_history(engine, run, row)
    cold_s = eta.cold_s(history.epochs)
    steps_left = max(0, row.steps_total - row.step) if row.steps_total else None
    spans = _spans(history, now, is_live=is_live)
    if len(spans) == 1 and len(history.epochs) > 1:
        # From one span the range of the pace is a guess; from several epochs it is measured.
        spans = [
            TrainingSpan(epoch.steps, epoch.seconds - (cold_s if epoch.first else 0.0)) for epoch in history.epochs
        ]
    pace = eta.step_time(spans, steps_left=steps_left or sum(span.steps for span in spans))
    if pace is None:
        return None
    model = _session_model(history, cold_s, now)
    current = _current_session(row, now, model, is_attached=row.id in history.attached) if is_live else None
    start_at = now if is_live else _next_start(engine, run, now)

    def end_after(steps: int, pace: StepTime) -> EtaRange:
        return eta.estimate_end(steps, pace, start_at, current, model)

    end = end_after(steps_left, pace) if steps_left is not None else None
    return RunForecast(
        stage=row.stage,
        pace=pace,
        cold_s=cold_s,
        startup_s=model.startup_s,
        steps_left=steps_left,
        steps_per_epoch=history.steps_per_epoch,
        now_steps=_steps_of_session(current, pace, model, steps_left),
        end=end,
        goal=_goal(history, pace, end_after),
        assumptions=_assumptions(history, model, pace),
    )


def _read_history(engine: Engine, run: RunInfo, row: SessionInfo) -> _History:
    rows = sessions.of_run(engine, run.id, limit=MAX_SESSIONS)
    attached = sessions.first_event_times(engine, [item.id for item in rows], EventKind.ATTACHED)
    events = [
        event
        for event in sessions.events_of_kind(engine, run.id, EventKind.EPOCH, limit=MAX_EPOCHS)
        if event.facts["stage"] == row.stage
    ]
    epochs = [Epoch(event.facts["steps"], event.facts["lasted_s"], event.facts.get("first", False)) for event in events]
    return _History(engine, run, row, rows, attached, events, epochs)


def _spans(history: _History, now: datetime, *, is_live: bool) -> list[TrainingSpan]:
    """The training of this stage in each session. Whole sessions, so that crashes and repeated steps slow the pace down."""
    cold_s, stage = eta.cold_s(history.epochs), history.row.stage
    first_epochs = [epoch.steps for epoch in history.epochs if epoch.first and epoch.steps]
    cold_steps = statistics.median(first_epochs) if cold_s else 1
    attempts: dict[int, list[AttemptInfo]] = defaultdict(list)
    first_stages: dict[int, str] = {}
    for attempt in sessions.attempts_of_sessions(history.engine, [row.id for row in history.rows]):
        first_stages.setdefault(attempt.session_id, attempt.stage)
        if attempt.stage == stage:
            attempts[attempt.session_id].append(attempt)
    spans = []
    for row in history.rows:
        if not (of_stage := attempts[row.id]):
            continue
        first, last = of_stage[0], of_stage[-1]
        # The start-up before the session's first stage is not training: SessionModel counts it by itself.
        from_at = history.attached.get(row.id) if first_stages[row.id] == stage else first.started_at
        if is_live and row.id == history.row.id:
            until_at: datetime | None = row.heartbeat_at or now
        else:
            until_at = last.ended_at or row.ended_at
        steps = max(attempt.last_step for attempt in of_stage) - first.first_step
        if from_at and until_at and steps > 0:
            total_s = (until_at - from_at).total_seconds()
            if total_s <= 0:
                continue  # the wall clock was set back: this says nothing about the pace
            excess_s = cold_s * min(1.0, steps / cold_steps)  # the part of a first epoch that is not over yet
            spans.append(TrainingSpan(steps, max(total_s - excess_s, total_s * MIN_WARM_SHARE, 1e-3)))
    return spans


def _session_model(history: _History, cold_s: float, now: datetime) -> SessionModel:
    """The sessions to come are assumed to be like those of the past."""
    row, attached = history.row, history.attached
    startups = [(at - item.started_at).total_seconds() for item in history.rows if (at := attached.get(item.id))]
    return SessionModel(
        length_s=_length_s(history.rows),
        startup_s=max(0.0, statistics.median(startups)) if startups else 0.0,
        cold_s=cold_s,
        ending_s=row.save_lead_s,
        pause_s=_pause_s(history.rows),
        hours=quota_outlook.of_run(history.engine, history.run, row.id, now),
    )


def _length_s(rows: Sequence[SessionInfo]) -> float | None:
    """Seconds from opening to wall; None if the newest session has no wall.

    Of the newest session with a regular time limit. One that a quota or the user made shorter is used if there is no other.
    """
    with_wall = [row for row in reversed(rows) if row.wall_at]
    if not with_wall or rows[-1].wall_at is None:
        return None
    row = next((item for item in with_wall if item.wall_kind in (Reason.NONE, Reason.TIME_LIMIT)), with_wall[0])
    return (row.wall_at - row.started_at).total_seconds() if row.wall_at else None


def _pause_s(rows: Sequence[SessionInfo]) -> float:
    """Median seconds from the end of a session to the opening of the next, over automatic pauses; 0.0 without one."""
    pairs = itertools.pairwise(rows)
    pauses = [(after.started_at - before.ended_at).total_seconds() for before, after in pairs if before.ended_at]
    automatic = [pause_s for pause_s in pauses if 0 <= pause_s <= AUTOMATIC_PAUSE_S]
    return statistics.median(automatic) if automatic else 0.0


def _current_session(row: SessionInfo, now: datetime, model: SessionModel, *, is_attached: bool) -> CurrentSession:
    left_s = None if row.wall_at is None else max(0.0, (row.wall_at - now).total_seconds())
    elapsed_s = (now - row.started_at).total_seconds()
    return CurrentSession(left_s, 0.0 if is_attached else max(0.0, model.startup_s - elapsed_s))


def _next_start(engine: Engine, run: RunInfo, now: datetime) -> datetime:
    """When the next session may start, by the queue; `now` if nothing is queued."""
    resume = queue.pending_resume(engine, run.id)
    return max(now, resume.due_at) if resume and resume.due_at else now


def _steps_of_session(
    current: CurrentSession | None, pace: StepTime, model: SessionModel, steps_left: int | None
) -> int | None:
    """Steps that the current session still does; None without one, or if neither a wall nor the stage's end bounds it."""
    if current is None or (current.left_s is None and steps_left is None):
        return None
    if current.left_s is None:
        return steps_left
    steps = int(max(0.0, current.left_s - current.starting_s - model.ending_s) / pace.usual_s)
    return steps if steps_left is None else min(steps, steps_left)


def _assumptions(history: _History, model: SessionModel, pace: StepTime) -> tuple[str, ...]:
    sentences = []
    if pace.spans == 1:
        sentences.append("the pace of the one session that is known, give or take a quarter")
    if model.length_s is not None:
        sentences.append("each session begins as soon as it may, and lasts as long as the one before")
    stages = runs.stages(history.engine, history.run.id)
    later = [stage.name for stage in stages if stage.finished_at is None and stage.name != history.row.stage]
    if later:
        sentences.append(f"the end of {history.row.stage}; {', '.join(later)} comes after it")
    return tuple(sentences)


# The plan's target


def target_of(run: RunInfo) -> MetricTarget | None:
    """The plan's target; None without one. Read without the plan's loader, which `status` does not import."""
    overrides = (item.partition("=") for item in run.overrides)
    texts = [text.strip(" \"'") for key, _, text in overrides if key.strip() == "forecast.target"]
    if not texts and "target" in run.plan:
        import tomllib

        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
            texts = [str(tomllib.loads(run.plan).get("forecast", {}).get("target", ""))]
    with contextlib.suppress(ValueError):
        return metric_trend.parse_target(texts[-1]) if texts else None
    return None


def _points(history: _History, metric: str) -> list[TrendPoint]:
    """The values of a metric in the order of steps.

    They are those at the ends of epochs. If these are too few for a trend, those of checkpoints and of ends of sessions are
    added, one an epoch.
    """
    row = history.row
    metrics_at = {event.facts["step"]: event.facts["metrics"] for event in history.epoch_events}
    if sum(metric in metrics for metrics in metrics_at.values()) < metric_trend.FEWEST:
        in_checkpoints = checkpoints.metrics_by_step(history.engine, history.run.id, row.stage, limit=metric_trend.MOST)
        ends = {item.step: item.metrics for item in history.rows if item.stage == row.stage}
        metrics_at = {**ends, **in_checkpoints, **metrics_at}
        if row.steps_total and row.epochs_total:
            # The last step of each epoch replaces those before it.
            by_epoch = {max(step - 1, 0) * row.epochs_total // row.steps_total: step for step in sorted(metrics_at)}
            metrics_at = {step: metrics_at[step] for step in by_epoch.values()}
    return [
        TrendPoint(step, metrics_at[step][metric])
        for step in sorted(metrics_at)
        if metrics_at[step].get(metric) is not None
    ]


def _goal(history: _History, pace: StepTime, end_after: Callable[[int, StepTime], EtaRange]) -> Goal | None:
    """Args: end_after: when a number of steps is done at a pace."""
    target = target_of(history.run)
    if target is None:
        return None
    points = _points(history, target.metric)
    outlook = metric_trend.outlook(points, target)
    if outlook.verdict is not TrendVerdict.FORESEEABLE:
        return Goal(target, outlook)
    since_point = history.row.step - points[-1].step  # the outlook counts from the newest point, a goal from now
    fewest, usual, most = (
        None if steps is None else max(0, steps - since_point)
        for steps in (outlook.fewest, outlook.steps, outlook.most)
    )
    end = EtaRange(
        end_after(fewest or 0, pace).early,
        end_after(usual or 0, pace).usual,
        None if most is None else end_after(most, pace).late,
    )
    epochs = (_epochs(history, fewest), _epochs(history, usual), _epochs(history, most))
    return Goal(target, outlook, history.row.step + (usual or 0), epochs, end)


def _epochs(history: _History, steps: int | None) -> float | None:
    return None if steps is None or not history.steps_per_epoch else steps / history.steps_per_epoch


class ForecastRecorder:
    """Records the epochs and forecasts of one session, in its supervisor. Not thread-safe: the journal's thread alone calls it.

    Args:
        note: writes an event.
    """

    def __init__(self, engine: Engine, run: RunInfo, note: Note) -> None:
        self._engine, self._run, self._note = engine, run, note
        self._stage, self._is_first, self._has_forecast = "", True, False
        self._epoch = self._step = self._newest_step = 0
        self._epoch_began_s = self._began_s = 0.0

    def on_heartbeat(self, row: SessionInfo) -> None:
        """The ranks have reported their progress, which is in `row`."""
        now_s = boottime_s()
        # A step that is lower than the last one: another attempt repeats steps, and its first epoch is cold again.
        if row.stage != self._stage or row.step < self._newest_step:
            self._stage, self._is_first, self._began_s = row.stage, True, self._began_s or now_s
            self._begin_epoch(row, now_s)
        is_over, self._epoch, self._newest_step = row.epoch > self._epoch, row.epoch, row.step
        if is_over and row.step > self._step and now_s - self._epoch_began_s >= EPOCH_S:
            # NaN is not valid JSON: readers of `history --events --json` would fail.
            metrics = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
            facts = {
                "stage": row.stage,
                "epoch": row.epoch,
                "step": row.step,
                "metrics": metrics,
                "steps": row.step - self._step,
                "lasted_s": round(now_s - self._epoch_began_s, 3),
                "first": self._is_first,
            }
            self._note(EventKind.EPOCH, facts)
            self._is_first = False
            self._begin_epoch(row, now_s)
        if not self._has_forecast and now_s - self._began_s >= FORECAST_AFTER_S:
            self._has_forecast = True
            self.record(row, is_live=True)

    def record(self, row: SessionInfo, *, is_live: bool) -> None:
        """Record the forecast of now, to be compared with what happens. Args: is_live: as in `forecast_run`."""
        with contextlib.suppress(SQLAlchemyError):
            forecast = forecast_run(self._engine, self._run, row, datetime.now(UTC), is_live=is_live)
            # Without steps left it would be a forecast of now: `history` would count it as a good one.
            if forecast and forecast.steps_left and forecast.end and forecast.end.usual:
                end = forecast.end
                facts = {
                    "stage": forecast.stage,
                    "end_at": _stamp(end.usual),
                    "earliest_at": _stamp(end.early),
                    "latest_at": _stamp(end.late),
                    "steps_left": forecast.steps_left,
                    "sessions": forecast.end.usual.sessions,
                }
                self._note(EventKind.FORECAST, facts)

    def _begin_epoch(self, row: SessionInfo, now_s: float) -> None:
        self._epoch, self._step, self._epoch_began_s = row.epoch, row.step, now_s


def _stamp(projection: Projection | None) -> str | None:
    return projection.end_at.isoformat(timespec="seconds").replace("+00:00", "Z") if projection else None
