"""Pauses after failures in a row."""

from __future__ import annotations

import pytest

from kgorch.core.backoff import Backoff


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(first_s=5.0, longest_s=30.0)
    assert [backoff.after(failures) for failures in range(6)] == [0.0, 5.0, 10.0, 20.0, 30.0, 30.0]


@pytest.mark.parametrize(("chance", "pause_s"), [(0.0, 8.0), (0.5, 10.0), (1.0, 12.0)])
def test_jitter_spreads_a_pause_around_its_length(chance, pause_s):
    assert Backoff(10.0, jitter=0.2).after(1, chance) == pytest.approx(pause_s)


def test_a_server_that_is_down_for_weeks_overflows_nothing():
    assert Backoff(first_s=10.0, longest_s=15.0).after(1_000_000) == 15.0
