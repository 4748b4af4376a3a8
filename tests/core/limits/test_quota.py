"""Stories of the quota: when windows begin, what is left, how long a session may go on, when one may begin again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kgorch.core.codes import Phase, Reason
from kgorch.core.limits import quota as core
from kgorch.core.limits import quota_windows
from kgorch.core.limits.quota import Quota, Usage, available_at, lasts_s, left_s, used_s
from kgorch.core.session.events import DeadlineReached, StopRequested
from kgorch.core.session.lifecycle import NextSession, advance
from kgorch.core.session.lifecycle_state import LifecycleState

HOUR = 3600.0
DAY = 86400.0
BERLIN = ZoneInfo("Europe/Berlin")
KAGGLE = "Sat 00:00 UTC"


def at(text: str) -> datetime:
    """`2026-11-21 14:00`, in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def quota(hours: float = 30.0, resets: str = KAGGLE, *, reserve_h: float = 0.0) -> Quota:
    return Quota("p", hours * HOUR, quota_windows.parse(resets), reserve_h * HOUR)


def use(began: datetime | str, hours: float, factor: float = 1.0) -> Usage:
    began = at(began) if isinstance(began, str) else began
    return Usage(began, hours * HOUR, hours * HOUR * factor)


def correction(made: datetime | str, hours: float) -> Usage:
    return Usage(at(made) if isinstance(made, str) else made, 0.0, hours * HOUR)


def length_h(window: tuple[datetime, datetime | None]) -> float:
    start, end = window
    assert end is not None
    return (end - start).total_seconds() / HOUR


# Windows


@pytest.mark.parametrize("spelling", ["Sat 00:00 UTC", "saturday 0:00 utc", "  SATU 00:00   Z "])
def test_a_week_begins_on_its_weekday_however_it_is_spelled(spelling):
    start, end = quota_windows.parse(spelling).window_at(at("2026-11-21 00:00"))
    assert (start, end) == (at("2026-11-21 00:00"), at("2026-11-28 00:00"))
    assert quota_windows.parse(spelling).window_at(at("2026-11-20 23:59"))[1] == start


def test_a_day_and_a_week_with_a_clock_change_are_an_hour_shorter_or_longer():
    daily, weekly = quota_windows.parse("daily 00:00 Europe/Berlin"), quota_windows.parse("Mon 09:00 Europe/Berlin")
    assert length_h(daily.window_at(at("2026-03-29 12:00"))) == 23.0
    assert length_h(daily.window_at(at("2026-10-25 12:00"))) == 25.0
    assert length_h(weekly.window_at(at("2026-03-29 12:00"))) == 167.0
    assert length_h(weekly.window_at(at("2026-10-25 12:00"))) == 169.0
    assert weekly.window_at(at("2026-03-29 12:00"))[1] == at("2026-03-30 07:00"), "09:00 in summer time"


def test_a_reset_at_a_time_that_the_clock_leaves_out_comes_as_much_later_as_it_jumps():
    skipped = quota_windows.parse("daily 02:30 Europe/Berlin").window_at(at("2026-03-29 12:00"))[0]
    assert skipped == at("2026-03-29 01:30") and skipped.astimezone(BERLIN).hour == 3


def test_a_reset_at_a_time_that_the_clock_shows_twice_comes_once():
    daily = quota_windows.parse("daily 02:30 Europe/Berlin")
    assert daily.window_at(at("2026-10-25 00:29"))[1] == at("2026-10-25 00:30")
    assert daily.window_at(at("2026-10-25 01:30"))[0] == at("2026-10-25 00:30"), "the second 02:30 is no reset"


def test_weeks_go_on_over_the_end_of_a_year_with_53_of_them():
    weekly = quota_windows.parse("Mon 00:00 UTC")
    assert weekly.window_at(at("2027-01-01 12:00")) == (at("2026-12-28 00:00"), at("2027-01-04 00:00"))


@pytest.mark.parametrize(
    ("inside", "start", "end"),
    [
        ("2027-02-15 00:00", "2027-01-31 00:00", "2027-02-28 00:00"),
        ("2028-02-29 00:00", "2028-02-29 00:00", "2028-03-31 00:00"),
        ("2026-11-30 12:00", "2026-11-30 00:00", "2026-12-31 00:00"),
    ],
)
def test_the_31st_of_a_shorter_month_is_its_last_day(inside, start, end):
    assert quota_windows.parse("monthly 31 00:00 UTC").window_at(at(inside)) == (at(start), at(end))


def test_a_day_that_a_zone_left_out_makes_no_empty_window():
    start, end = quota_windows.parse("daily 09:00 Pacific/Apia").window_at(at("2011-12-30 20:00"))
    assert start <= at("2011-12-30 20:00") < end and length_h((start, end)) == 24.0


ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu")
SPELLINGS = st.one_of(
    st.builds("{} {:02}:{:02} {}".format, st.sampled_from(("Mon", "Wed", "Sat", "daily")), st.integers(0, 23),
              st.integers(0, 59), st.sampled_from(ZONES)),
    st.builds("monthly {} {:02}:30 Europe/Berlin".format, st.integers(1, 31), st.integers(0, 23)),
)  # fmt: skip
INSTANTS = st.datetimes(datetime(1990, 1, 1), datetime(2080, 1, 1)).map(lambda found: found.replace(tzinfo=UTC))


@given(SPELLINGS, INSTANTS)
def test_windows_tile_time(text, instant):
    window = quota_windows.parse(text)
    start, end = window.window_at(instant)
    assert end is not None and start <= instant < end
    assert window.window_at(start) == window.window_at(end - timedelta(microseconds=1)) == (start, end)
    assert window.window_at(end)[0] == end
    assert window.window_at(start - timedelta(microseconds=1))[1] == start


@given(SPELLINGS | st.sampled_from(("rolling 3d", "never")), INSTANTS, st.floats(0, 40 * DAY))
def test_pieces_are_the_stretch_cut_at_the_edges(text, instant, span_s):
    window, until_at = quota_windows.parse(text), instant + timedelta(seconds=span_s)
    cut = list(quota_windows.pieces(window, instant, until_at))
    assert [end for _, end in cut[:-1]] == [start for start, _ in cut[1:]]
    assert not cut or (cut[0][0], cut[-1][1]) == (instant, until_at)
    for start, end in cut:
        last = end - timedelta(microseconds=1)
        if text.startswith("rolling"):
            assert (end - start).total_seconds() <= quota_windows.PIECE_S
        else:
            assert window.window_at(start) == window.window_at(last)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Satt 00:00 UTC", "did you mean 'sat'"),
        ("Wendesday 00:00 UTC", "did you mean 'wednesday'"),
        ("Sat 24:00 UTC", "time of day"),
        ("Sat 00:60 UTC", "time of day"),
        ("Sat 00:00 Europe/Berln", "did you mean 'Europe/Berlin'"),
        ("Sat 00:00 berlin", "did you mean 'Europe/Berlin'"),
        ("Sat 00:00 ../etc/passwd", "no time zone"),
        ("Sat 00:00 Europe", "no time zone"),
        ("Sat 00:00", "expected"),
        ("monthly 0 00:00 UTC", "1 to 31"),
        ("monthly ٣ 00:00 UTC", "1 to 31"),
        ("rolling 7", "expected a length"),
        ("rolling 1s", "expected a length"),
        ("rolling 999999d", "expected a length"),
        ("dayly 00:00 UTC", "did you mean 'daily'"),
        ("", "expected"),
    ],
)
def test_a_window_that_cannot_be_read_is_refused_with_what_was_meant(text, said):
    with pytest.raises(ValueError, match=said):
        quota_windows.parse(text)


@given(
    st.text(max_size=30)
    | st.lists(
        st.sampled_from(["Sat", "monthly", "rolling", "7d", "31", "00:00", "UTC", "Europe", "\0", "-1"]), max_size=5
    ).map(" ".join)
)
def test_any_text_is_a_window_or_a_value_error(text):
    try:
        window = quota_windows.parse(text)
    except ValueError as error:
        assert str(error)
    else:
        assert window.window_at(at("2026-11-21 00:00"))[0] <= at("2026-11-21 00:00")


# What is left


def test_what_was_used_before_the_reset_counts_no_more():
    uses = [use("2026-11-20 20:00", 3), use("2026-11-21 10:00", 2)]
    assert used_s(quota(), uses, at("2026-11-20 23:30")) == 5 * HOUR
    assert used_s(quota(), uses, at("2026-11-21 12:00")) == 2 * HOUR


def test_two_accelerators_cost_twice_and_a_reserve_stays():
    now = at("2026-11-21 12:00")
    spent = [use("2026-11-21 02:00", 10, factor=2.0)]
    assert left_s(quota(reserve_h=4), spent, now) == 6 * HOUR
    assert lasts_s(quota(reserve_h=4), spent, now, rate=2.0) == 3 * HOUR


def test_two_sessions_of_a_pool_share_what_is_left():
    now = at("2026-11-21 12:00")
    assert lasts_s(quota(30), [], now, rate=1.0) == 30 * HOUR
    assert lasts_s(quota(30), [], now, rate=3.0) == 10 * HOUR


def test_a_session_that_lives_to_see_the_reset_has_the_new_hours():
    now = at("2026-11-27 22:00")  # two hours before
    spent = [use("2026-11-21 00:00", 27)]
    assert lasts_s(quota(30), spent, now, rate=1.0) == (2 + 30) * HOUR
    assert lasts_s(quota(30), spent, now, rate=2.0) == 1.5 * HOUR, "two of them do not come so far"
    assert lasts_s(quota(200), spent, now, rate=1.0) is None, "more hours than a week has are no limit"


def test_the_hour_more_of_an_autumn_day_is_used_up_by_who_may_use_24():
    now = at("2026-10-24 22:00")  # Sunday 00:00 in Berlin
    assert lasts_s(quota(24, "daily 00:00 Europe/Berlin"), [], now, rate=1.0) == 24 * HOUR


def test_hours_that_never_come_back_are_spent_once():
    now, spent = at("2026-11-21 00:00"), [use("2020-01-01 00:00", 29.5)]
    assert lasts_s(quota(resets="never"), spent, now, rate=1.0) == HOUR / 2
    assert available_at(quota(resets="never"), spent, now, needed_s=HOUR) is None


def test_a_rolling_window_gives_hours_back_as_old_use_leaves_it():
    rolling, now = quota(4, "rolling 1d"), at("2026-11-21 12:00")
    spent = [use("2026-11-20 14:00", 2)]  # leaves between 14:00 and 16:00 today
    assert left_s(rolling, spent, now) == 2 * HOUR
    assert lasts_s(rolling, spent, now, rate=1.0) == 4 * HOUR, (
        "at 14:00 nothing is left, but as much comes back as is used"
    )
    assert lasts_s(rolling, spent, now, rate=2.0) == 1 * HOUR
    assert lasts_s(quota(24, "rolling 1d"), [], now, rate=1.0) is None


def test_a_session_may_begin_again_when_a_useful_stretch_has_come_back():
    rolling, now = quota(2, "rolling 1d"), at("2026-11-21 12:00")
    spent = [use("2026-11-20 14:00", 2)]
    found = available_at(rolling, spent, now, needed_s=600)
    assert found is not None and abs((found - at("2026-11-21 14:10")).total_seconds()) < 0.1
    assert left_s(rolling, spent, found) >= 600
    assert available_at(rolling, [], now, needed_s=9 * HOUR) == now, "more than all is never there: all will do"


def test_a_spent_week_begins_again_at_the_reset_and_one_with_hours_at_once():
    now = at("2026-11-25 12:00")
    assert available_at(quota(), [use("2026-11-21 00:00", 30)], now, needed_s=60) == at("2026-11-28 00:00")
    assert available_at(quota(), [use("2026-11-21 00:00", 29)], now, needed_s=60) == now


def test_corrections_count_for_the_window_in_which_they_were_made():
    uses = [use("2026-11-21 00:00", 10), correction("2026-11-22 00:00", -4)]
    assert used_s(quota(), uses, at("2026-11-23 00:00")) == 6 * HOUR
    assert used_s(quota(), uses, at("2026-11-28 01:00")) == 0.0


def test_a_negative_correction_of_a_rolling_window_gives_no_hours_back_twice():
    rolling = quota(10, "rolling 2d")
    uses = [use("2026-11-20 00:00", 8), correction("2026-11-20 12:00", -8)]
    assert used_s(rolling, uses, at("2026-11-20 12:00")) == 0.0
    later = [*uses, use("2026-11-22 01:00", 9)]
    assert used_s(rolling, later, at("2026-11-22 10:00")) == 9 * HOUR, (
        "what was corrected away has left; the rest counts whole"
    )
    half = [use("2026-11-20 00:00", 8), correction("2026-11-20 12:00", -2)]
    assert used_s(rolling, half, at("2026-11-22 01:59")) == 6 * HOUR, (
        "the oldest was taken away, so the rest stays to the last"
    )
    assert used_s(rolling, half, at("2026-11-22 05:00")) == 3 * HOUR


@st.composite
def histories(draw):
    """Uses of the last three days, before `now`."""
    now = at("2026-10-25 12:00")
    found = []
    for _ in range(draw(st.integers(0, 6))):
        span_s = draw(st.floats(0, 6 * HOUR))
        ago_s = draw(st.floats(span_s, 3 * DAY))
        found.append(Usage(now - timedelta(seconds=ago_s), span_s, span_s * draw(st.sampled_from((0.5, 1.0, 2.0)))))
    for _ in range(draw(st.integers(0, 2))):
        made = now - timedelta(seconds=draw(st.floats(0, 3 * DAY)))
        found.append(Usage(made, 0.0, draw(st.floats(-6 * HOUR, 6 * HOUR))))
    return now, found


RESETS = st.sampled_from(("daily 03:00 Europe/Berlin", "Sun 13:00 UTC", "rolling 1d", "rolling 2d", "never"))


@given(histories(), RESETS, st.floats(0.1, 30), st.sampled_from((0.5, 1.0, 3.0)), st.floats(0, 1))
def test_who_ends_at_the_wall_has_at_no_instant_used_more_than_was_allowed(history, resets, hours, rate, share):
    now, uses = history
    held = quota(hours, resets)
    lasts = lasts_s(held, uses, now, rate=rate)
    was_over = used_s(held, uses, now) > held.usable_s
    lived = share * (5 * DAY if lasts is None else lasts)
    if was_over:
        assert lasts == 0.0
    then = now + timedelta(seconds=lived)
    cut = [
        Usage(start, (end - start).total_seconds(), (end - start).total_seconds() * rate)
        for start, end in quota_windows.pieces(held.window, now, then)
    ]
    if not was_over:
        assert used_s(held, [*uses, *cut], then) <= held.usable_s + 1.0


def test_a_use_that_leaves_a_rolling_window_at_this_very_instant_is_not_counted_to_its_end():
    now = datetime(2026, 10, 25, 12, tzinfo=UTC)
    held, use = quota(1.0, "rolling 1d"), Usage(now - timedelta(days=1), 0.0, 2.0)
    assert lasts_s(held, [use], now, rate=0.5) == 7200.0


@given(histories(), RESETS, st.floats(0.1, 30), st.sampled_from((0.5, 1.0, 3.0)))
def test_no_hours_are_left_when_the_wall_comes(history, resets, hours, rate):
    now, uses = history
    held = quota(hours, resets)
    assume(used_s(held, [*uses, Usage(now, 0.0, 9.0)], now) >= 9.0)  # nobody corrects away more than was used
    lasts = lasts_s(held, uses, now, rate=rate)
    assume(lasts)
    then = now + timedelta(seconds=lasts)
    cut = [
        Usage(a, (b - a).total_seconds(), (b - a).total_seconds() * rate)
        for a, b in quota_windows.pieces(held.window, now, then)
    ]
    assert left_s(held, [*uses, *cut], then) <= 1.0 or held.window.window_at(then)[0] == then


def test_a_correction_of_this_instant_is_out_of_the_window_when_all_of_the_quota_is_said_to_be_there():
    now = datetime(2026, 10, 25, 12, tzinfo=UTC)
    held = quota(0.25, "rolling 2d")
    uses = [Usage(now - timedelta(seconds=2), 1.2959717239809834, 0.6479858619904917), Usage(now, 0.0, 1.0)]
    found = available_at(held, uses, now, needed_s=900.0)
    assert left_s(held, uses, found) == 900.0 and found - now < timedelta(days=2, seconds=1)


@given(histories(), RESETS, st.floats(0.1, 30), st.floats(0, 2 * HOUR))
def test_what_is_needed_is_there_when_it_is_said_to_be(history, resets, hours, needed):
    now, uses = history
    held = quota(hours, resets)
    found = available_at(held, uses, now, needed_s=needed)
    if found is None:
        assert resets == "never" and left_s(held, uses, now) < needed
        return
    assert found >= now
    assert left_s(held, uses, found) + 0.01 >= min(needed, held.usable_s)


def test_what_is_useful_of_a_small_quota_is_a_share_of_it():
    assert quota(30).useful_s == core.USEFUL_S and quota(1).useful_s == pytest.approx(72.0)


def test_only_who_ends_for_want_of_hours_waits_for_them():
    spending = LifecycleState(phase=Phase.STARTING, wall_s=100.0, wall_kind=Reason.QUOTA)
    spent = advance(spending, DeadlineReached(), 90.0).record.resume
    assert spent == NextSession(Reason.QUOTA, "the quota")
    ended = advance(spending, StopRequested(Reason.SIGTERM, 50.0), 40.0).record.resume
    assert ended == NextSession(Reason.SIGTERM, "SIGTERM"), "the platform came first"
