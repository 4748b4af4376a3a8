"""Instants as people type them, on the days when the clocks change too."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.limits.time_parsing import parse_future_time

BERLIN = ZoneInfo("Europe/Berlin")


def _utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("typed", "now", "meant"),
    [
        ("18:30", "2026-11-21T12:00", "2026-11-21T17:30"),
        ("18:30", "2026-11-21T17:30", "2026-11-22T17:30"),  # just now is a day away
        ("7:05", "2026-11-21T12:00", "2026-11-22T06:05"),
        ("00:00", "2026-11-21T22:59", "2026-11-21T23:00"),
        ("00:30", "2026-11-21T23:15", "2026-11-21T23:30"),  # there it is the 22nd already
        ("18:30:15", "2026-11-21T12:00", "2026-11-21T17:30:15"),
        ("2026-11-22T03:00+01:00", "2026-11-21T12:00", "2026-11-22T02:00"),
        ("2026-11-22T03:00Z", "2026-11-21T12:00", "2026-11-22T03:00"),
        ("2026-11-22 03:00", "2026-11-21T12:00", "2026-11-22T02:00"),
        ("2026-11-23", "2026-11-21T12:00", "2026-11-22T23:00"),
        # the night in which 02:00 to 03:00 is left out, and the day before it
        ("02:30", "2026-03-28T23:30", "2026-03-29T01:30"),
        ("03:00", "2026-03-28T23:30", "2026-03-29T01:00"),
        ("18:30", "2026-03-28T18:00", "2026-03-29T16:30"),
        # the night in which it comes twice
        ("02:30", "2026-10-24T23:30", "2026-10-25T00:30"),
        ("02:30", "2026-10-25T00:45", "2026-10-25T01:30"),
        ("02:30", "2026-10-25T01:45", "2026-10-26T01:30"),
    ],
)
def test_a_time_is_the_next_such_one_and_an_instant_is_itself(typed, now, meant):
    assert parse_future_time(typed, _utc(now), BERLIN) == _utc(meant)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("25:00", "not a time of day"),
        ("12:75", "not a time of day"),
        ("soon", "not a date and time"),
        ("", "not a date and time"),
        ("9h", "not a date and time"),
        ("0001-01-01T00:00+23:59", "not a date and time"),
        ("2026-11-21T11:59Z", "has passed"),
        ("2026-11-21T12:00Z", "has passed"),
        ("2025-12-01T12:00Z", "has passed"),
    ],
)
def test_what_is_no_instant_or_has_passed_is_refused_with_the_reason(typed, said):
    with pytest.raises(ValueError, match=said):
        parse_future_time(typed, _utc("2026-11-21T12:00"), BERLIN)


@given(
    st.integers(0, 23),
    st.integers(0, 59),
    st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC)),
    st.sampled_from(["Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Pacific/Apia", "UTC"]),
)
def test_the_next_such_time_is_at_most_a_day_and_a_change_of_the_clocks_away(hour, minute, now, zone):
    at = parse_future_time(f"{hour:02}:{minute:02}", now, ZoneInfo(zone))
    assert timedelta(0) < at - now <= timedelta(hours=26)


@given(st.text(max_size=30))
def test_any_text_is_an_instant_to_come_or_a_value_error(text):
    now = _utc("2026-11-21T12:00")
    try:
        assert parse_future_time(text, now, BERLIN) > now
    except ValueError as error:
        assert str(error)


def test_without_a_zone_the_machines_own_rules_count(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert parse_future_time("02:30", _utc("2026-10-25T00:45")) == _utc("2026-10-25T01:30")
        assert parse_future_time("18:30", _utc("2026-07-21T12:00")) == _utc("2026-07-21T16:30")
    finally:
        monkeypatch.undo()
        time.tzset()
