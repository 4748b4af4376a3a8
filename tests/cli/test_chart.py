"""The geometry of the charts in a report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.cli.pages import chart
from kgorch.cli.pages.chart import Stretch, line_chart, number, timeline

finite_or_not = st.floats(allow_nan=True, allow_infinity=True)
value_or_none = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(st.integers(0, 2**62), value_or_none), max_size=50))
def test_every_point_of_any_curve_lies_in_the_picture(points):
    drawn = line_chart(
        "loss", {"loss": [(float(x), y) for x, y in sorted(points, key=lambda point: point[0])]}, x_label="step"
    )
    if drawn is None:
        assert not [y for _, y in points if y is not None]
        return
    pairs = [
        tuple(map(float, pair.split(","))) for line in drawn.lines for part in line.polylines for pair in part.split()
    ]
    for x, y in [*pairs, *(dot for line in drawn.lines for dot in line.dots)]:
        assert chart.LEFT - 0.1 <= x <= chart.WIDTH - chart.RIGHT + 0.1
        assert chart.TOP - 0.1 <= y <= chart.HEIGHT - chart.BOTTOM + 0.1
    assert len(drawn.y_ticks) <= 12 and len(drawn.x_ticks) <= 14
    assert all(len(tick.text) <= 12 for tick in drawn.y_ticks)


def test_the_axis_has_round_numbers_and_is_logarithmic_over_many_magnitudes():
    drawn = line_chart("loss", {"loss": [(0.0, 0.0), (100.0, 1.0)]}, x_label="step")
    assert [tick.text for tick in drawn.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"] and not drawn.is_log
    wide = line_chart("loss", {"loss": [(0.0, 1e-4), (100.0, 10.0)]}, x_label="step")
    assert wide.is_log and [tick.text for tick in wide.y_ticks] == ["0.0001", "0.001", "0.01", "0.1", "1", "10"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.0, "0"), (0.25, "0.25"), (20_000, "20k"), (-3e6, "-3M"), (3e9, "3e+09"), (1e-7, "1e-07")],
)
def test_numbers_of_an_axis_are_short(value, text):
    assert number(value) == text


def test_a_curve_of_nothing_but_gaps_has_no_chart_and_a_gap_cuts_the_line():
    assert line_chart("loss", {"loss": [(0.0, None), (1.0, None)]}, x_label="step") is None
    points = [(0.0, 1.0), (1.0, 1.0), (2.0, None), (3.0, 1e308), (4.0, None)]
    [line] = line_chart("loss", {"loss": points}, x_label="step").lines
    assert len(line.polylines) == 1 and len(line.dots) == 1


def test_a_mark_outside_of_the_curve_is_left_out():
    drawn = line_chart(
        "loss", {"loss": [(10.0, 1.0), (20.0, 2.0)]}, x_label="step", marks=[(5, "a"), (15, "b"), (99, "c")]
    )
    assert [mark.text for mark in drawn.marks] == ["b"]


@given(st.lists(st.tuples(finite_or_not, finite_or_not), max_size=20))
def test_a_timeline_draws_no_negative_width_whatever_the_clocks_said(stretches):
    drawn = timeline([("1", [Stretch(start, end, "attempt", "") for start, end in stretches])])
    if drawn:
        for bar in [*drawn.rows[0].bars, *drawn.rows[0].marks]:
            assert chart.LABELS <= bar.x <= chart.WIDTH and 0 <= bar.width <= chart.WIDTH


def test_ticks_of_a_timeline_suit_its_length():
    assert [tick.text for tick in timeline([("1", [Stretch(0, 9, "attempt", "")])]).ticks] == [
        "0 h",
        "2 h",
        "4 h",
        "6 h",
        "8 h",
    ]
    assert timeline([("1", [Stretch(0, 0.5, "attempt", "")])]).ticks[1].text == "5 min"
    assert timeline([("1", [])]) is None
