"""When a run will be done: what is left of it, laid into the sessions that walls and quota allow.

What was measured is a list of *stretches*: times of training of this stage, each with the steps it gained. Their seconds hold
all that comes between steps (validation, saves that block, steps done again after a crash), so a stretch's pace is what training
really takes. A session's beginning is known apart: opened until its ranks were ready, and what its first epoch took longer
than the later ones (data not read before). The run is then walked through session by session, at the middling pace, at a
fast and at a slow one: these give the instant of the end, and the two between which it lies in four cases of five.

How far apart fast and slow are follows from how much the stretches differ (Student's t on the logarithms of their paces:
few stretches tell little), and from how many are still to come, which average out. One stretch tells nothing of that: then
a quarter either way is assumed, and said.

Considered and left: the last second's step time times the steps left. It forgets validation, saves, crashes and start-ups, which
took a tenth to a third of the reference trainings.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol

ALONE = 0.25
"""The spread that is assumed when a single stretch is known."""

LEAST = 0.02
"""Stretches that are as alike as measured say no more about the next ones than this."""

STUDENT = (3.08, 1.89, 1.64, 1.53, 1.48, 1.44, 1.41, 1.40, 1.38, 1.37)
"""The 90% quantile of Student's t with 1, 2, … degrees of freedom; from there on the normal distribution's."""

NORMAL = 1.28
COLD_SHARE = 0.1
"""A first epoch that took less than this more than the later ones is none that began cold."""

SESSIONS = 1000
"""How far is looked."""


class Stretch(NamedTuple):
    """`steps` gained in `seconds` of training."""

    steps: int
    seconds: float

    @property
    def pace_s(self) -> float:
        return self.seconds / self.steps


class Epoch(NamedTuple):
    """One that was measured, or the part of it that a session did. `first`: of its session."""

    steps: int
    seconds: float
    first: bool


class Spent(NamedTuple):
    """A session that is foretold, as far as a quota is concerned."""

    from_at: datetime
    span_s: float


class Hours(Protocol):
    """The quota: what it allows once the sessions in `spent`, which are not there yet, have used theirs."""

    def lasts_s(self, spent: Sequence[Spent], at: datetime) -> float | None:
        """For how many seconds a session may run from `at` on; None for as long as one looks."""

    def available_at(self, spent: Sequence[Spent], at: datetime, needed_s: float) -> datetime | None:
        """When, not before `at`, a session may run for so long; None for never."""


class Ahead(NamedTuple):
    """What sessions to come are like, in seconds.

    Attributes:
        length_s: from opening to the wall; None for no wall.
        startup_s: from opening to the first step. cold_s: what its first epoch takes longer.
        ending_s: before the wall, for the last save.
        pause_s: from the end of one to the opening of the next.
    """

    length_s: float | None = None
    startup_s: float = 0.0
    cold_s: float = 0.0
    ending_s: float = 0.0
    pause_s: float = 0.0
    hours: Hours | None = None


class Now(NamedTuple):
    """A session that trains: until its wall `left_s`, None for no wall. `starting_s`: before it trains."""

    left_s: float | None
    starting_s: float = 0.0


class Pace(NamedTuple):
    """Seconds a step: between `fast_s` and `slow_s` in four cases of five. `stretches`: how many were measured."""

    fast_s: float
    usual_s: float
    slow_s: float
    stretches: int


class Course(NamedTuple):
    """The rest of a run at one pace.

    `now_steps`: what the session that trains still does. `sessions`: that are still to be opened.
    """

    end_at: datetime
    sessions: int
    now_steps: int


class End(NamedTuple):
    """None where the end is not to be seen: no session is long enough, no hours come back, more than 1,000 sessions, or later
    than any date."""

    early: Course | None
    usual: Course | None
    late: Course | None


def cold_s(epochs: Sequence[Epoch]) -> float:
    """What the first epoch of a session takes longer than the later ones, in the middle of those known; 0.0 when the data do
    not show it."""
    later = [epoch.seconds / epoch.steps for epoch in epochs if not epoch.first and epoch.steps]
    firsts = [epoch for epoch in epochs if epoch.first and epoch.steps]
    if not later or not firsts:
        return 0.0
    usual_s = statistics.median(later)
    more = statistics.median(epoch.seconds - epoch.steps * usual_s for epoch in firsts)
    whole = statistics.median(epoch.steps * usual_s for epoch in firsts)
    spread = (max(later) - min(later)) / usual_s
    return more if more > max(COLD_SHARE, spread) * whole else 0.0


def pace(stretches: Sequence[Stretch], *, steps_left: int) -> Pace | None:
    """From all stretches; None when they gained no step."""
    known = [stretch for stretch in stretches if stretch.steps > 0 and stretch.seconds > 0]
    if not known:
        return None
    steps = sum(stretch.steps for stretch in known)
    usual_s = sum(stretch.seconds for stretch in known) / steps
    if len(known) == 1:
        wide = ALONE
    else:
        freedom = len(known) - 1
        quantile = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
        logs = [math.log(stretch.pace_s / usual_s) for stretch in known]
        weights = [stretch.steps / steps for stretch in known]
        mean = sum(weight * log for weight, log in zip(weights, logs, strict=True))
        squares = sum(weight * (log - mean) ** 2 for weight, log in zip(weights, logs, strict=True))
        deviation = math.sqrt(squares * len(known) / freedom)
        to_come = max(1.0, steps_left * len(known) / steps)
        wide = max(LEAST, quantile * deviation * math.sqrt(1 / len(known) + 1 / to_come))
    wide = min(wide, 2.0)
    return Pace(usual_s * math.exp(-wide), usual_s, usual_s * math.exp(wide), len(known))


def end(steps_left: int, at_pace: Pace, now: datetime, running: Now | None, ahead: Ahead) -> End:
    """When `steps_left` steps will be done.

    Args:
        running: the session that lives; None between two.
    """
    found: list[Course | None] = []
    for pace_s in (at_pace.fast_s, at_pace.usual_s, at_pace.slow_s):
        try:  # what is not to be seen at a faster pace is not at a slower one, and is what takes long to find out
            found.append(_walk(steps_left, pace_s, now, running, ahead) if not found or found[-1] else None)
        except OverflowError:  # later than any date
            found.append(None)
    return End(*found)


def _walk(steps_left: int, pace_s: float, now: datetime, running: Now | None, ahead: Ahead) -> Course | None:
    at, spent, now_steps = now, list[Spent](), 0
    if running:
        needed_s = running.starting_s + steps_left * pace_s
        room_s = None if running.left_s is None else max(0.0, running.left_s - ahead.ending_s)
        if room_s is None or needed_s <= room_s:
            return Course(now + timedelta(seconds=needed_s), 0, steps_left)
        now_steps = int(max(0.0, room_s - running.starting_s) / pace_s)
        left_s = running.left_s or 0.0
        steps_left, at = steps_left - now_steps, now + timedelta(seconds=left_s + ahead.pause_s)
        spent.append(Spent(now, left_s))
    for number, (opened_at, room_s) in enumerate(_sessions(at, spent, pace_s, ahead), 1):
        before_s = ahead.startup_s + ahead.cold_s
        needed_s = before_s + steps_left * pace_s
        if room_s is None or needed_s + ahead.ending_s <= room_s:
            return Course(opened_at + timedelta(seconds=needed_s), number, now_steps)
        steps_left -= int((room_s - before_s - ahead.ending_s) / pace_s)
    return None


def _sessions(at: datetime, spent: list[Spent], pace_s: float, ahead: Ahead) -> Iterator[tuple[datetime, float | None]]:
    """When each of the next sessions opens and how long it may last, as far as they come to a step."""
    needed_s = ahead.startup_s + ahead.cold_s + ahead.ending_s + pace_s
    for _ in range(SESSIONS):
        if ahead.length_s is not None and ahead.length_s < needed_s:
            return
        room_s = ahead.length_s
        if ahead.hours:
            opens_at = ahead.hours.available_at(spent, at, needed_s)
            if opens_at is None:
                return
            at, lasts_s = opens_at, ahead.hours.lasts_s(spent, opens_at)
            room_s = min((length_s for length_s in (room_s, lasts_s) if length_s is not None), default=None)
            if room_s is not None and room_s < needed_s:
                return
        yield at, room_s
        assert room_s is not None  # else what is left fits
        spent.append(Spent(at, room_s))
        at += timedelta(seconds=room_s + ahead.pause_s)
