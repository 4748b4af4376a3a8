"""Points in time as a user types them for --until: a time of day, "18:30", or an ISO 8601 date and time."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo

EXPECTED = 'expected a time of day, "18:30", for the next such time, or a date and time, "2026-11-22T03:00+01:00"'


def parse_future_time(text: str, now: datetime, zone: tzinfo | None = None) -> datetime:
    """Parse a point in time after `now`, in UTC.

    A time of day that a change to summer time skips is read with the offset from before the change; of one that occurs twice
    the next is meant.

    Args:
        now: aware.
        zone: of a text without an offset; None for the machine's own.
    Raises: ValueError saying what was expected, or that the time has passed.
    """
    if match := re.fullmatch(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", text.strip()):
        try:
            time_of_day = time(int(match[1]), int(match[2]), int(match[3] or 0))
        except ValueError:
            raise ValueError(f"{text!r} is not a time of day; {EXPECTED}") from None
        return _next_occurrence(time_of_day, now, zone)
    try:
        parsed = datetime.fromisoformat(text.strip())
        at = parsed.astimezone(UTC) if parsed.tzinfo else _in_utc(parsed, zone)
        # within a day of year 9999 the conversion to another zone would overflow, later, where the time is shown
        at + timedelta(days=1)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a date and time; {EXPECTED}") from None
    if at <= now:
        raise ValueError(f"{text} has passed: it is {now.astimezone(zone).isoformat(timespec='seconds')}")
    return at


def _next_occurrence(time_of_day: time, now: datetime, zone: tzinfo | None) -> datetime:
    today: date = now.astimezone(zone).date()
    local = [datetime.combine(day, time_of_day) for day in (today, today + timedelta(days=1))]
    first = [_in_utc(naive, zone) for naive in local]
    # fold=1 is the second occurrence where clocks are set back. Where they are set forward it is another time of day
    second = [
        at for naive in local if (at := _in_utc(naive.replace(fold=1), zone)).astimezone(zone).time() == time_of_day
    ]
    return min(at for at in first + second if at > now)


def _in_utc(naive: datetime, zone: tzinfo | None) -> datetime:
    """Convert a local time. Without a zone astimezone() asks the C library for the machine's rules."""
    return (naive.replace(tzinfo=zone) if zone else naive).astimezone(UTC)
