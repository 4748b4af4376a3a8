"""When a run will be done: its remaining steps, laid into the sessions that time limits and quota allow.

The measurements are *spans* of training of this stage, each with the steps that it gained. A span's seconds include all that
comes between steps (validation, saves that block, steps repeated after a crash), so its step time is what training really
takes. The start of a session is measured apart: the time from opening until its ranks are ready, and how much longer its first
epoch took than the later ones (data not in the page cache yet). The remaining run is then walked session by session at the
median step time, at a fast one and at a slow one. This gives the end, and the range that holds it in four cases of five.

The width of the range follows from the scatter of the spans (Student's t on the logarithms of their step times: few spans say
little) and from the number of spans still to come, whose deviations average out. A single span has no scatter: a quarter either
way is assumed, and the forecast says so.

Considered and rejected: the newest step time times the remaining steps. It ignores validation, saves, crashes and start-ups,
which took a tenth to a third of the reference trainings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

SINGLE_SPAN_SPREAD = 0.25
"""Relative half width of the range where only one span was measured."""

MIN_SPREAD = 0.02
"""Smallest relative half width: a few spans that happen to agree do not promise that the next ones will."""

STUDENT = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40, 1.38, 1.37)
"""The 90% quantile of Student's t with 1, 2, … degrees of freedom. Beyond the last one `NORMAL` is close enough."""

NORMAL = 1.28
"""The 90% quantile of the normal distribution. Between it and its opposite lie four cases of five."""

MAX_SPREAD = 2.0
"""Largest half width, on the logarithm: a factor of 7. Two wildly different spans would else overflow `math.exp`."""

COLD_SHARE = 0.1
"""A first epoch less than this share longer than the later ones counts as warm: the difference is noise."""

MAX_SESSIONS = 1000
"""Sessions that are looked ahead. A run that needs more has no end worth telling, and the walk takes time for each."""


class TrainingSpan(NamedTuple):
    """A time of uninterrupted measurement: `steps` gained in `seconds` of training."""

    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class Epoch(NamedTuple):
    """A measured epoch, or the part of it that one session trained. `first`: the first of its session."""

    steps: int
    seconds: float
    first: bool


class PlannedSession(NamedTuple):
    """A session of the forecast, as the quota sees it.

    Attributes:
        from_at: when it opens.
        span_s: its length, seconds.
    """

    started_at: datetime
    span_s: float


class QuotaForecast(Protocol):
    """What the quota allows after the sessions of the forecast (`planned`) have used theirs."""

    def lasts_s(self, planned: Sequence[PlannedSession], at: datetime, /) -> float | None:
        """Seconds that a session may run from `at` on; None for no limit within the horizon."""

    def available_at(self, planned: Sequence[PlannedSession], at: datetime, needed_s: float, /) -> datetime | None:
        """When, not before `at`, a session may run for `needed_s` seconds; None for never."""


class SessionModel(NamedTuple):
    """What the sessions to come are assumed to be like, in seconds.

    Attributes:
        length_s: from opening to the time limit; None for no limit.
        startup_s: from opening to the first step.
        cold_s: what its first epoch takes longer than a later one.
        ending_s: reserved before the time limit, for the last save.
        pause_s: from the end of a session to the opening of the next.
        hours: the quota; None without one.
    """

    length_s: float | None = None
    startup_s: float = 0.0
    cold_s: float = 0.0
    ending_s: float = 0.0
    pause_s: float = 0.0
    hours: QuotaForecast | None = None


class CurrentSession(NamedTuple):
    """The session that runs now.

    Attributes:
        left_s: seconds until its time limit; None for no limit.
        starting_s: seconds until it trains; 0.0 once it does.
    """

    left_s: float | None
    starting_s: float = 0.0


class StepTime(NamedTuple):
    """Seconds a step takes on average: between `fast_s` and `slow_s` in four cases of five.

    Attributes:
        spans: how many spans were measured.
    """

    fast_s: float
    usual_s: float
    slow_s: float
    spans: int


class Projection(NamedTuple):
    """The remaining run at one step time.

    Attributes:
        end_at: when the last step is done.
        sessions: that still have to be opened.
        now_steps: that the current session still does.
    """

    end_at: datetime
    sessions: int
    now_steps: int


class EtaRange(NamedTuple):
    """The projections at the fast, the usual and the slow step time.

    One is None where no end can be computed: no session is long enough for a step, the quota never renews, more than
    `MAX_SESSIONS` sessions are needed, or the end lies beyond the year 9999.
    """

    early: Projection | None
    usual: Projection | None
    late: Projection | None


def cold_s(epochs: Sequence[Epoch]) -> float:
    """Seconds that the first epoch of a session takes longer than a later one, by the median; 0.0 when that is not measurable."""
    later = [epoch.seconds / epoch.steps for epoch in epochs if not epoch.first and epoch.steps]
    firsts = [epoch for epoch in epochs if epoch.first and epoch.steps]
    if not later or not firsts:
        return 0.0
    usual_s = statistics.median(later)
    more = statistics.median(epoch.seconds - epoch.steps * usual_s for epoch in firsts)
    whole = statistics.median(epoch.steps * usual_s for epoch in firsts)
    # The difference must exceed the scatter of the warm epochs, or a slow moment would be read as cold data.
    spread = (max(later) - min(later)) / usual_s
    return more if more > max(COLD_SHARE, spread) * whole else 0.0


def step_time(spans: Sequence[TrainingSpan], *, steps_left: int) -> StepTime | None:
    """The step time of a run and its range, from all spans; None when none of them gained a step."""
    measured_spans = [span for span in spans if span.steps > 0 and span.seconds > 0]
    if not measured_spans:
        return None
    count, steps = len(measured_spans), sum(span.steps for span in measured_spans)
    usual_s = sum(span.seconds for span in measured_spans) / steps
    if count == 1:
        spread = SINGLE_SPAN_SPREAD
    else:
        freedom = count - 1
        quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
        # Logarithms, because step times scatter by factors. Weighted by steps: a span of an hour says more than one of a minute.
        logs = [math.log(span.step_s / usual_s) for span in measured_spans]
        weights = [span.steps / steps for span in measured_spans]
        mean = sum(weight * log for weight, log in zip(weights, logs, strict=True))
        squares = sum(weight * (log - mean) ** 2 for weight, log in zip(weights, logs, strict=True))
        deviation = math.sqrt(squares * count / freedom)
        # The usual error of a prediction: of the mean so far (1/count) and of the mean of the spans to come.
        spans_to_come = max(1.0, steps_left * count / steps)
        spread = max(MIN_SPREAD, quantile * deviation * math.sqrt(1 / count + 1 / spans_to_come))
    spread = min(spread, MAX_SPREAD)
    return StepTime(usual_s * math.exp(-spread), usual_s, usual_s * math.exp(spread), count)


def estimate_end(
    steps_left: int, step_time: StepTime, now: datetime, running: CurrentSession | None, model: SessionModel
) -> EtaRange:
    """When `steps_left` steps will be done.

    Args:
        running: the session that lives; None between two sessions.
        model: of the sessions after it.
    """
    projections: list[Projection | None] = []
    for step_s in (step_time.fast_s, step_time.usual_s, step_time.slow_s):
        try:
            # What has no end at a faster step time has none at a slower one. It is also what walks all MAX_SESSIONS sessions.
            is_possible = not projections or projections[-1]
            projections.append(_project(steps_left, step_s, now, running, model) if is_possible else None)
        except OverflowError:  # datetime ends with the year 9999
            projections.append(None)
    return EtaRange(*projections)


def _project(
    steps_left: int, step_s: float, now: datetime, running: CurrentSession | None, model: SessionModel
) -> Projection | None:
    """Walk through the sessions at one step time. Raises: OverflowError for an end after the year 9999."""
    at, planned, now_steps = now, list[PlannedSession](), 0
    if running:
        needed_s = running.starting_s + steps_left * step_s
        room_s = None if running.left_s is None else max(0.0, running.left_s - model.ending_s)
        if room_s is None or needed_s <= room_s:
            return Projection(now + timedelta(seconds=needed_s), 0, steps_left)
        now_steps = int(max(0.0, room_s - running.starting_s) / step_s)
        left_s = running.left_s or 0.0
        steps_left, at = steps_left - now_steps, now + timedelta(seconds=left_s + model.pause_s)
        planned.append(PlannedSession(now, left_s))
    for number, (opened_at, room_s) in enumerate(_sessions(at, planned, step_s, model), 1):
        before_s = model.startup_s + model.cold_s
        needed_s = before_s + steps_left * step_s
        if room_s is None or needed_s + model.ending_s <= room_s:
            return Projection(opened_at + timedelta(seconds=needed_s), number, now_steps)
        steps_left -= int((room_s - before_s - model.ending_s) / step_s)
    return None


def _sessions(
    at: datetime, planned: list[PlannedSession], step_s: float, model: SessionModel
) -> Iterator[tuple[datetime, float | None]]:
    """When each of the next sessions opens and how many seconds it may last, as long as they can do at least one step.

    Each is appended to `planned`, because the quota of the next one depends on it.
    """
    needed_s = model.startup_s + model.cold_s + model.ending_s + step_s
    for _ in range(MAX_SESSIONS):
        if model.length_s is not None and model.length_s < needed_s:
            return
        room_s = model.length_s
        if model.hours:
            opens_at = model.hours.available_at(planned, at, needed_s)
            if opens_at is None:
                return
            at, lasts_s = opens_at, model.hours.lasts_s(planned, opens_at)
            room_s = min((length_s for length_s in (room_s, lasts_s) if length_s is not None), default=None)
            if room_s is not None and room_s < needed_s:
                return
        yield at, room_s
        # A session without an end holds all remaining steps, so the caller has returned by now.
        assert room_s is not None
        planned.append(PlannedSession(at, room_s))
        at += timedelta(seconds=room_s + model.pause_s)
