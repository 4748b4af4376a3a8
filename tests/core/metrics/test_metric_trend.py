"""When a metric reaches its target, and when that cannot be told."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.metrics.metric_trend import MetricTarget, Outlook, TrendPoint, outlook, parse_target

IOU = MetricTarget("iou", True, 0.72)


def rising(count, by, until, noise=0.0, seed=0):
    """`count` epochs that gain `by` each and end near `until`."""
    dice = random.Random(seed)
    return [TrendPoint(n, until - (count - 1 - n) * by + dice.gauss(0, noise)) for n in range(count)]


def test_gains_of_0_0015_an_epoch_reach_0_72_in_53_more_epochs():
    found = outlook(rising(87, 0.0015, 0.72 - 53 * 0.0015), IOU)
    assert found.verdict == "foreseeable" and found.steps in (53, 54)
    noisy = outlook(rising(87, 0.0015, 0.72 - 53 * 0.0015, noise=0.003, seed=1), IOU)
    assert noisy.fewest < noisy.steps < noisy.most and noisy.fewest <= 53 <= noisy.most


def test_a_loss_that_falls_reaches_its_target_from_above():
    points = [TrendPoint(10 * n, 2.0 - 0.01 * n) for n in range(50)]
    found = outlook(points, MetricTarget("loss", False, 1.0))
    assert found.verdict == "foreseeable" and found.steps == pytest.approx(510, abs=2)
    assert found.best == pytest.approx(1.51)


def test_a_flat_trend_is_called_so():
    assert outlook(rising(40, 0.0, 0.6, noise=0.01), IOU).verdict == "flat"
    assert outlook([TrendPoint(n, 0.6) for n in range(40)], IOU).verdict == "flat"


def test_a_metric_that_moves_away_is_called_so():
    assert outlook(rising(40, -0.002, 0.5, noise=0.002), IOU).verdict == "away"


def test_a_target_that_was_reached_says_when_also_if_the_metric_fell_again():
    points = [TrendPoint(1, 0.5), TrendPoint(2, 0.73), TrendPoint(3, 0.6)]
    assert outlook(points, IOU) == Outlook("reached", at_step=2, best=0.73)


def test_few_points_say_nothing():
    assert outlook(rising(4, 0.01, 0.6), IOU) == Outlook("too few points", best=0.6)
    assert outlook([], IOU) == Outlook("too few points")


def test_points_that_are_no_number_are_left_out():
    points = [point if n % 3 else TrendPoint(point.step, math.nan) for n, point in enumerate(rising(60, 0.0015, 0.65))]
    assert outlook(points, IOU).steps == pytest.approx(47, abs=1)


def test_values_beyond_all_measure_tell_of_no_trend_and_break_nothing():
    points = rising(60, 0.0015, 0.65)
    points[7], points[9] = TrendPoint(7, 1e200), TrendPoint(9, -1e308)
    assert outlook(points, MetricTarget("loss", True, 1e300)).verdict in ("foreseeable", "flat")
    assert outlook([TrendPoint(n, (-1) ** n * 1.7e308) for n in range(20)], IOU).verdict == "too few points"


@pytest.mark.parametrize("target", ["x >= 1e300", "x >= 1e999"])
def test_a_target_that_no_number_of_steps_reaches_is_not_foreseeable(target):
    assert outlook([TrendPoint(1000 * n, 1e-17 * n) for n in range(8)], parse_target(target)).verdict == "flat"


def test_a_metric_that_rises_by_the_very_same_amount_reaches_its_target_on_its_line():
    points = [TrendPoint(1000 * n, 4096.0 * n) for n in range(20)]
    assert outlook(points, parse_target("tokens >= 1e6")).steps == pytest.approx(225_141, abs=1)


VALUES = st.one_of(st.integers(-3, 3).map(float), st.floats(allow_nan=True, allow_infinity=True))


@given(st.lists(st.tuples(st.integers(0, 2**40), VALUES), max_size=30), st.floats(allow_nan=False), st.booleans())
def test_any_points_have_an_outlook(pairs, value, up):
    points = [TrendPoint(*pair) for pair in sorted(pairs, key=lambda pair: pair[0])]
    assert outlook(points, MetricTarget("iou", up, value)).verdict


@given(st.integers(5, 30), st.integers(1, 10**6), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-1e9, 1e9))
def test_any_line_has_an_outlook(count, every, base, by, value):
    points = [TrendPoint(every * n, base + by * n) for n in range(count)]
    assert outlook(points, MetricTarget("iou", True, value)).verdict


def test_single_bad_evaluations_do_not_bend_the_line():
    points = rising(30, 0.002, 0.66, noise=0.0005)
    for n in (5, 14, 26):
        points[n] = TrendPoint(n, 0.1)
    assert outlook(points, IOU).steps == pytest.approx(30, abs=4)


def test_a_curve_that_levels_off_before_the_target_is_called_so():
    dice = random.Random(2)
    points = [TrendPoint(n, 0.70 - 0.3 * math.exp(-n / 15) + dice.gauss(0, 0.001)) for n in range(60)]
    assert outlook(points, IOU).verdict == "levels off"


def test_a_curve_that_levels_off_beyond_the_target_reaches_it_later_than_a_line_would():
    dice = random.Random(3)
    points = [TrendPoint(n, 0.78 - 0.3 * math.exp(-n / 30) + dice.gauss(0, 0.001)) for n in range(40)]
    found, truth = outlook(points, IOU), math.ceil(30 * math.log(0.3 / 0.06) - 39)
    assert found.verdict == "foreseeable" and found.fewest <= truth <= (found.most or math.inf)
    assert found.steps == pytest.approx(truth, abs=4)


def test_the_range_of_a_noisy_line_holds_the_truth_in_about_four_cases_of_five():
    held, told = 0, 0
    for seed in range(200):
        found = outlook(rising(30, 0.002, 0.66, noise=0.004, seed=seed), IOU)
        if found.verdict == "foreseeable":
            told, held = told + 1, held + (found.fewest <= 30 <= (found.most or math.inf))
    assert told > 190 and 0.7 < held / told < 0.95


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("dice >= 0.72", MetricTarget("dice", True, 0.72)),
        ("val/loss<=1e-3", MetricTarget("val/loss", False, 1e-3)),
        ("iou ≥ .5", MetricTarget("iou", True, 0.5)),
    ],
)
def test_a_target_is_read(text, target):
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["dice", "dice > 0.7", "dice >= high", ">= 0.7", "dice >= 0.7 and more", "dice = 1"])
def test_what_is_no_target_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="expected a metric and its value"):
        parse_target(text)
