"""Fewer points that draw the same picture."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.metrics.downsample import smoothed, thin_series

numbers = st.floats(-1e6, 1e6)
series = st.lists(st.tuples(numbers, st.none() | numbers), max_size=300).map(
    lambda points: sorted(points, key=lambda one: one[0])
)


@given(points=series, most=st.integers(4, 100))
def test_ends_extremes_and_order_stay_and_no_point_is_made_up(points, most):
    thin = thin_series(points, most)
    assert len(thin) <= max(most, 4)
    assert all(point in points for point in thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    if points:
        assert thin[0] == points[0] and thin[-1] == points[-1]
    known = [y for _, y in points if y is not None]
    if known:
        left = [y for _, y in thin if y is not None]
        assert (min(left), max(left)) == (min(known), max(known))


def test_a_single_spike_among_a_hundred_thousand_points_stays():
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    thin = thin_series(points, 400)
    assert (54_321.0, 99.0) in thin and len(thin) <= 400


def test_smoothing_begins_at_the_first_value_and_leaves_gaps():
    points = [(0.0, 4.0), (1.0, None), (2.0, 2.0)]
    told = smoothed(points, 0.5)
    assert told[0] == (0.0, 4.0) and told[1] == (1.0, None)
    assert math.isclose(told[2][1] or 0.0, (0.5 * 4 * 0.5 + 0.5 * 2) / 0.75)
    assert smoothed(points, 0.0) == points
