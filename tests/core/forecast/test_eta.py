"""When a run will be done, in stories; the reference trainings' own figures come out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from kgorch.core.forecast import eta
from kgorch.core.forecast.eta import CurrentSession, Epoch, PlannedSession, SessionModel, StepTime, TrainingSpan

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)  # a Monday
MINUTE, HOUR = 60.0, 3600.0


def exactly(pace_s):
    return StepTime(pace_s, pace_s, pace_s, 9)


class Weekly:
    """So many hours from Monday noon to Monday noon."""

    def __init__(self, hours):
        self.allowed_s = hours * HOUR

    def _week(self, at):
        start = NOON + timedelta(weeks=(at - NOON) // timedelta(weeks=1))
        return start, start + timedelta(weeks=1)

    def _left_s(self, spent, at):
        start, end = self._week(at)
        return self.allowed_s - sum(use.span_s for use in spent if start <= use.started_at < end)

    def lasts_s(self, spent, at):
        return self._left_s(spent, at)

    def available_at(self, spent, at, needed_s):
        if needed_s > self.allowed_s:
            return None
        return at if self._left_s(spent, at) >= needed_s else self._week(at)[1]


def test_ten_epochs_of_50_minutes_the_first_one_60_are_510_minutes():
    steps = 250
    known = [Epoch(steps, 60 * MINUTE, True), *[Epoch(steps, 50 * MINUTE, False)] * 2]
    cold_s = eta.cold_s(known)
    assert cold_s == 10 * MINUTE
    found = eta.estimate_end(10 * steps, exactly(50 * MINUTE / steps), NOON, None, SessionModel(cold_s=cold_s)).usual
    assert found.end_at - NOON == timedelta(minutes=510) and found.sessions == 1


def test_fifty_three_epochs_in_seven_hours_are_done_in_seven_hours():
    found = eta.estimate_end(
        53, exactly(7 * HOUR / 53), NOON, CurrentSession(left_s=9 * HOUR), SessionModel(9 * HOUR)
    ).usual
    assert abs(found.end_at - (NOON + timedelta(hours=7))) < timedelta(seconds=1)
    assert found.sessions == 0 and found.now_steps == 53


@pytest.mark.parametrize(("hours", "sessions"), [(5, 12), (6, 10)])
def test_a_hundred_epochs_of_35_minutes_are_58_hours_in_10_to_12_sessions(hours, sessions):
    steps = 1000  # an epoch of 35 minutes, so that the last of a session need not be whole
    found = eta.estimate_end(
        100 * steps, exactly(35 * MINUTE / steps), NOON, None, SessionModel(length_s=hours * HOUR)
    ).usual
    assert found.sessions == sessions
    assert 58.3 < (found.end_at - NOON) / timedelta(hours=1) < 58.4


@pytest.mark.parametrize(("quota", "weeks"), [(12, 5), (30, 2), (45, 2)])
def test_under_a_weekly_quota_58_hours_take_the_weeks_that_they_need(quota, weeks):
    ahead = SessionModel(length_s=5 * HOUR, hours=Weekly(quota))
    found = eta.estimate_end(100_000, exactly(2.1), NOON, None, ahead).usual
    assert (found.end_at - NOON) // timedelta(weeks=1) == weeks - 1
    spent = 100_000 * 2.1 / HOUR - (weeks - 1) * quota
    into = (found.end_at - NOON) % timedelta(weeks=1)
    assert abs(into / timedelta(hours=1) - spent) < 0.01, "what is left begins at the reset"


def test_start_ups_last_saves_and_pauses_are_counted_in_each_session():
    ahead = SessionModel(length_s=1000, startup_s=60, cold_s=30, ending_s=10, pause_s=5)
    found = eta.estimate_end(2700, exactly(1.0), NOON, None, ahead).usual
    assert found.sessions == 3, "900 steps fit in one"
    assert found.end_at - NOON == timedelta(seconds=2 * 1005 + 90 + 900)


def test_the_session_that_trains_ends_at_its_wall_and_its_hours_are_spent():
    ahead = SessionModel(length_s=HOUR, ending_s=100, hours=Weekly(1))
    found = eta.estimate_end(4000, exactly(1.0), NOON, CurrentSession(left_s=HOUR), ahead).usual
    assert found.now_steps == 3500 and found.sessions == 1
    assert found.end_at == NOON + timedelta(weeks=1, seconds=500)


def test_a_session_too_short_for_a_step_foretells_nothing():
    assert (
        eta.estimate_end(10, exactly(1.0), NOON, None, SessionModel(length_s=60, startup_s=59, ending_s=1)).usual
        is None
    )


def test_hours_that_never_come_back_foretell_nothing():
    assert eta.estimate_end(10, exactly(HOUR), NOON, None, SessionModel(hours=Weekly(0.5))).usual is None


def test_one_stretch_alone_has_a_wide_range_and_says_that_it_is_one():
    found = eta.step_time([TrainingSpan(100, 200.0)], steps_left=1000)
    assert found.usual_s == pytest.approx(2.0) and found.spans == 1
    assert found.slow_s / found.usual_s == pytest.approx(1.284, abs=0.001)


def test_the_range_narrows_with_what_is_known():
    wides = []
    for count in (2, 4, 16):
        stretches = [TrainingSpan(100, 200.0 + 20 * (-1) ** number) for number in range(count)]
        found = eta.step_time(stretches, steps_left=1000)
        wides.append(found.slow_s / found.fast_s)
    assert wides[0] > wides[1] > wides[2] > 1


def test_stretches_that_gained_no_step_are_no_pace():
    assert eta.step_time([TrainingSpan(0, 500.0)], steps_left=10) is None


def test_the_range_holds_the_end_in_about_four_cases_of_five():
    """Stretches of random pace: what comes after five of them lies between fast and slow about as often as said."""
    import random

    dice, held, rounds = random.Random(1), 0, 2000
    for _ in range(rounds):
        seconds = [100 * dice.lognormvariate(0, 0.2) for _ in range(15)]
        found = eta.step_time([TrainingSpan(100, taken) for taken in seconds[:5]], steps_left=1000)
        held += 1000 * found.fast_s <= sum(seconds[5:]) <= 1000 * found.slow_s
    assert 0.76 < held / rounds < 0.90


def test_epochs_that_differ_anyway_hide_no_cold_one():
    later = [Epoch(100, taken, False) for taken in (90.0, 130.0, 100.0)]
    assert eta.cold_s([Epoch(100, 120.0, True), *later]) == 0.0
    assert eta.cold_s([Epoch(100, 120.0, True)]) == 0.0, "nothing to compare it with"


def test_a_part_of_an_epoch_is_cold_by_the_steps_that_it_did():
    later = [Epoch(100, 100.0, False)] * 3
    assert eta.cold_s([Epoch(50, 80.0, True), *later]) == pytest.approx(30.0)


def test_what_is_foretold_is_spent_in_the_order_of_the_sessions():
    seen = []

    class Watching(Weekly):
        def available_at(self, spent, at, needed_s):
            seen.append(list(spent))
            return super().available_at(spent, at, needed_s)

    eta.estimate_end(50, exactly(1.0), NOON, None, SessionModel(length_s=20, hours=Watching(1)))
    assert seen[2] == [PlannedSession(NOON, 20), PlannedSession(NOON + timedelta(seconds=20), 20)]


@pytest.mark.parametrize("ahead", [SessionModel(), SessionModel(length_s=10 * 365 * 24 * HOUR)])
@pytest.mark.parametrize("running", [None, CurrentSession(None)])
def test_an_end_that_is_later_than_any_date_is_not_to_be_seen(ahead, running):
    assert eta.estimate_end(10**13, exactly(1.0), NOON, running, ahead).usual is None
