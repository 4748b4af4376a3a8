"""What a run's own past says of its future: rows in, core/eta.py and core/metric_trend.py asked, a value out.

The supervisor notes what it takes: an event `epoch` at each epoch's end, with its seconds and metrics, and an event `forecast`
when a session has trained for half a minute and when it ends, so that later forecasts can be held against what came.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from db import checkpoints, queue, runs, sessions
from db.records import AttemptInfo, EventInfo, RunInfo, SessionInfo
from orchestrator.core import eta, metric_trend
from orchestrator.core.codes import EventKind, Reason
from orchestrator.core.eta import Ahead, Course, End, Epoch, Now, Pace, Stretch
from orchestrator.core.metric_trend import Outlook, Point, Target
from orchestrator.limits import quota_outlook
from orchestrator.system.clock import boottime_s

SESSIONS, EPOCHS = 30, 200
"""The newest that are looked at."""

BY_ITSELF_S = 600.0
"""A pause between two sessions that is longer was not the machine's but a person's, or the quota's."""

EPOCH_S = 10.0
"""Epochs that are shorter are noted several at a time."""

TOLD_AFTER_S = 30.0

LEAST_WARM = 0.1
"""What is taken of a stretch's time at least, however much longer its first epoch is said to have taken."""

Note = Callable[[str, dict[str, Any]], None]


class Goal(NamedTuple):
    """`epochs`: fewest, middle and most, from now on; `end`: when those are done. Empty where the outlook foresees nothing."""

    target: Target
    outlook: Outlook
    step: int | None = None
    epochs: tuple[float | None, float | None, float | None] = (None, None, None)
    end: End = End(None, None, None)


class Foretold(NamedTuple):
    """`steps_left`, `epochs_left`, `end`: of the stage; None where its length is not known. `now_steps`: of the session
    that trains, until its wall or the stage's end."""

    stage: str
    pace: Pace
    cold_s: float
    startup_s: float
    steps_left: int | None
    steps_an_epoch: float | None
    now_steps: int | None
    end: End | None
    goal: Goal | None
    assumes: tuple[str, ...]


def foretell(engine: Engine, run: RunInfo, row: SessionInfo, now: datetime, *, lives: bool) -> Foretold | None:
    """From the newest session `row` and those before it; None while nothing has trained.

    Args:
        lives: `row` is a session whose ranks run.
    """
    rows = sessions.of_run(engine, run.id, limit=SESSIONS)
    attached = sessions.first_of_kind(engine, [item.id for item in rows], EventKind.ATTACHED)
    told = [
        item
        for item in sessions.of_kind(engine, run.id, EventKind.EPOCH, limit=EPOCHS)
        if item.facts["stage"] == row.stage
    ]
    epochs = [Epoch(item.facts["steps"], item.facts["lasted_s"], item.facts.get("first", False)) for item in told]
    cold_s = eta.cold_s(epochs)
    left = max(0, row.steps_total - row.step) if row.steps_total else None
    stretches = _stretches(engine, rows, attached, row, now, lives, epochs)
    if len(stretches) == 1 and len(epochs) > 1:
        stretches = [Stretch(epoch.steps, epoch.seconds - (cold_s if epoch.first else 0.0)) for epoch in epochs]
    pace = eta.pace(stretches, steps_left=left or sum(item.steps for item in stretches))
    if pace is None:
        return None
    startups = [(at - item.started_at).total_seconds() for item in rows if (at := attached.get(item.id))]
    ahead = Ahead(
        length_s=_length_s(rows),
        startup_s=max(0.0, statistics.median(startups)) if startups else 0.0,
        cold_s=cold_s,
        ending_s=row.lead_s,
        pause_s=_pause_s(rows),
        hours=quota_outlook.of_run(engine, run, row.id, now),
    )
    running = _running(row, now, row.id in attached, ahead) if lives else None
    at = now if lives else _resumes_at(engine, run, now)

    def until(steps: int, pace: Pace) -> End:
        return eta.end(steps, pace, at, running, ahead)

    per_epoch = row.steps_total / row.epochs_total if row.steps_total and row.epochs_total else None
    end = until(left, pace) if left is not None else None
    return Foretold(
        stage=row.stage,
        pace=pace,
        cold_s=cold_s,
        startup_s=ahead.startup_s,
        steps_left=left,
        steps_an_epoch=per_epoch,
        now_steps=_now_steps(running, pace, ahead, left),
        end=end,
        goal=_goal(engine, run, row, rows, told, pace, per_epoch, until),
        assumes=_assumes(engine, run, row, ahead, pace),
    )


def _stretches(
    engine: Engine,
    rows: Sequence[SessionInfo],
    attached: dict[int, datetime],
    row: SessionInfo,
    now: datetime,
    lives: bool,
    epochs: Sequence[Epoch],
) -> list[Stretch]:
    """What each session trained of this stage, crashes and what was done again included."""
    cold_s = eta.cold_s(epochs)
    cold_steps = statistics.median([epoch.steps for epoch in epochs if epoch.first and epoch.steps]) if cold_s else 1
    tries: dict[int, list[AttemptInfo]] = defaultdict(list)
    firsts: dict[int, str] = {}
    for attempt in sessions.attempts_of(engine, [item.id for item in rows]):
        firsts.setdefault(attempt.session_id, attempt.stage)
        if attempt.stage == row.stage:
            tries[attempt.session_id].append(attempt)
    found = []
    for item in rows:
        if not (mine := tries[item.id]):
            continue
        began = attached.get(item.id) if firsts[item.id] == row.stage else mine[0].started_at
        ended = (item.beat_at or now) if lives and item.id == row.id else mine[-1].ended_at or item.ended_at
        steps = max(attempt.last_step for attempt in mine) - mine[0].first_step
        if began and ended and steps > 0:
            lasted_s = (ended - began).total_seconds()
            if lasted_s <= 0:
                continue  # the wall clock was put back: that says nothing of the pace
            cold = cold_s * min(1.0, steps / cold_steps)  # of a first epoch that is not over, so much has come
            found.append(Stretch(steps, max(lasted_s - cold, lasted_s * LEAST_WARM, 1e-3)))
    return found


def _length_s(rows: Sequence[SessionInfo]) -> float | None:
    """Of the newest session that nothing but the wall bounded, else of the newest with any; None for no wall."""
    walls = [row for row in reversed(rows) if row.wall_at]
    if not walls or rows[-1].wall_at is None:
        return None
    row = next((item for item in walls if item.wall_kind in (Reason.NONE, Reason.TIME_LIMIT)), walls[0])
    return (row.wall_at - row.started_at).total_seconds() if row.wall_at else None


def _pause_s(rows: Sequence[SessionInfo]) -> float:
    """Between the end of a session and the next one's opening, where nobody was waited for."""
    pairs = itertools.pairwise(rows)
    pauses = [(after.started_at - before.ended_at).total_seconds() for before, after in pairs if before.ended_at]
    known = [pause_s for pause_s in pauses if 0 <= pause_s <= BY_ITSELF_S]
    return statistics.median(known) if known else 0.0


def _running(row: SessionInfo, now: datetime, has_attached: bool, ahead: Ahead) -> Now:
    left_s = None if row.wall_at is None else max(0.0, (row.wall_at - now).total_seconds())
    so_far_s = (now - row.started_at).total_seconds()
    return Now(left_s, 0.0 if has_attached else max(0.0, ahead.startup_s - so_far_s))


def _resumes_at(engine: Engine, run: RunInfo, now: datetime) -> datetime:
    resume = queue.open_resume(engine, run.id)
    return max(now, resume.due_at) if resume and resume.due_at else now


def _now_steps(running: Now | None, pace: Pace, ahead: Ahead, left: int | None) -> int | None:
    if running is None or (running.left_s is None and left is None):
        return None
    if running.left_s is None:
        return left
    steps = int(max(0.0, running.left_s - running.starting_s - ahead.ending_s) / pace.usual_s)
    return steps if left is None else min(steps, left)


def _assumes(engine: Engine, run: RunInfo, row: SessionInfo, ahead: Ahead, pace: Pace) -> tuple[str, ...]:
    """What no measurement says."""
    said = []
    if pace.stretches == 1:
        said.append("the pace of the one session that is known, give or take a quarter")
    if ahead.length_s is not None:
        said.append("each session begins as soon as it may, and lasts as long as the one before")
    later = [
        stage.name for stage in runs.stages(engine, run.id) if stage.finished_at is None and stage.name != row.stage
    ]
    if later:
        said.append(f"the end of {row.stage}; {', '.join(later)} comes after it")
    return tuple(said)


# A metric's target


def target_of(run: RunInfo) -> Target | None:
    """The plan's, read without the whole plan, which `status` does not load; None where there is none."""
    given = (item.partition("=") for item in run.overrides)
    texts = [text.strip(" \"'") for key, _, text in given if key.strip() == "forecast.target"]
    if not texts and "target" in run.plan:
        import tomllib

        with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
            texts = [str(tomllib.loads(run.plan).get("forecast", {}).get("target", ""))]
    with contextlib.suppress(ValueError):
        return metric_trend.parse_target(texts[-1]) if texts else None
    return None


def points_of(
    engine: Engine, run: RunInfo, row: SessionInfo, rows: Sequence[SessionInfo], told: Sequence[EventInfo], metric: str
) -> list[Point]:
    """A metric by steps: as it stood at the ends of epochs; where too few are known, also in checkpoints and at the ends of
    sessions, one an epoch."""
    found = {item.facts["step"]: item.facts["metrics"] for item in told}
    if sum(metric in metrics for metrics in found.values()) < metric_trend.FEWEST:
        saved = checkpoints.metrics(engine, run.id, row.stage, limit=metric_trend.MOST)
        ends = {item.step: item.metrics for item in rows if item.stage == row.stage}
        found = {**ends, **saved, **found}
        if row.steps_total and row.epochs_total:
            found = {
                max(step - 1, 0) * row.epochs_total // row.steps_total: (step, found[step]) for step in sorted(found)
            }
            found = dict(found.values())
    return [Point(step, found[step][metric]) for step in sorted(found) if found[step].get(metric) is not None]


def _goal(
    engine: Engine,
    run: RunInfo,
    row: SessionInfo,
    rows: Sequence[SessionInfo],
    told: Sequence[EventInfo],
    pace: Pace,
    per_epoch: float | None,
    until: Callable[[int, Pace], End],
) -> Goal | None:
    target = target_of(run)
    if target is None:
        return None
    points = points_of(engine, run, row, rows, told, target.metric)
    found = metric_trend.outlook(points, target)
    if found.verdict != "foreseeable":
        return Goal(target, found)
    passed = row.step - points[-1].step
    fewest, middle, most = (
        None if steps is None else max(0, steps - passed) for steps in (found.fewest, found.steps, found.most)
    )
    epochs = tuple(None if steps is None or not per_epoch else steps / per_epoch for steps in (fewest, middle, most))
    end = End(
        until(fewest or 0, pace).early, until(middle or 0, pace).usual, None if most is None else until(most, pace).late
    )
    return Goal(target, found, row.step + (middle or 0), (epochs[0], epochs[1], epochs[2]), end)


class Foreteller:
    """Of one session, in its supervisor. Not for several threads: the loop alone calls.

    Args:
        note: writes an event.
    """

    def __init__(self, engine: Engine, run: RunInfo, note: Note) -> None:
        self._engine, self._run, self._note = engine, run, note
        self._stage, self._first, self._told = "", True, False
        self._epoch = self._step = self._newest = 0
        self._since_s = self._began_s = 0.0

    def beat(self, row: SessionInfo) -> None:
        """The ranks have told how far they are."""
        now_s = boottime_s()
        if row.stage != self._stage or row.step < self._newest:
            self._stage, self._first, self._began_s = row.stage, True, self._began_s or now_s
            self._begin(row, now_s)
        is_over, self._epoch, self._newest = row.epoch > self._epoch, row.epoch, row.step
        if is_over and row.step > self._step and now_s - self._since_s >= EPOCH_S:
            metrics = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
            facts = {"stage": row.stage, "epoch": row.epoch, "step": row.step, "metrics": metrics}
            lasted = {"steps": row.step - self._step, "lasted_s": round(now_s - self._since_s, 3), "first": self._first}
            self._note(EventKind.EPOCH, facts | lasted)
            self._first = False
            self._begin(row, now_s)
        if not self._told and now_s - self._began_s >= TOLD_AFTER_S:
            self._told = True
            self.tell(row, lives=True)

    def tell(self, row: SessionInfo, *, lives: bool) -> None:
        """Note what is foretold now, to be held against what comes."""
        with contextlib.suppress(SQLAlchemyError):
            found = foretell(self._engine, self._run, row, datetime.now(UTC), lives=lives)
            if found and found.steps_left and found.end and found.end.usual:  # of what is done nothing is foretold
                early, late = found.end.early, found.end.late
                facts = {"stage": found.stage, "end_at": _stamp(found.end.usual), "earliest_at": _stamp(early)}
                more = {"latest_at": _stamp(late), "steps_left": found.steps_left, "sessions": found.end.usual.sessions}
                self._note(EventKind.FORECAST, facts | more)

    def _begin(self, row: SessionInfo, now_s: float) -> None:
        self._epoch, self._step, self._since_s = row.epoch, row.step, now_s


def _stamp(course: Course | None) -> str | None:
    return course.end_at.isoformat(timespec="seconds").replace("+00:00", "Z") if course else None
