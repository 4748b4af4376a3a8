"""Instants as people type them: the next 18:30 on the wall, or an ISO date and time."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo

A_DAY = timedelta(days=1)
EXPECTED = 'expected the next such time, "18:30", or an instant, "2026-11-22T03:00+01:00"'


def until(text: str, now: datetime, zone: tzinfo | None = None) -> datetime:
    """The instant that is meant, in UTC, after `now`.

    A time that a change of the clocks leaves out counts from before the change; of one that comes twice the next is meant.

    Args:
        now: aware.
        zone: whose time is meant where none is given; None for the machine's own.
    Raises: ValueError saying what was expected, or that the instant has passed.
    """
    if match := re.fullmatch(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", text.strip()):
        try:
            wanted = time(int(match[1]), int(match[2]), int(match[3] or 0))
        except ValueError:
            raise ValueError(f"{text!r} is no time of a day; {EXPECTED}") from None
        return _next(wanted, now, zone)
    try:
        found = datetime.fromisoformat(text.strip())
        at = found.astimezone(UTC) if found.tzinfo else _in_zone(found, zone)
        at + A_DAY  # so that any zone can show it
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no instant; {EXPECTED}") from None
    if at <= now:
        raise ValueError(f"{text} has passed: it is {now.astimezone(zone).isoformat(timespec='seconds')}")
    return at


def _next(wanted: time, now: datetime, zone: tzinfo | None) -> datetime:
    today: date = now.astimezone(zone).date()
    days = (today, today + timedelta(days=1))
    walls = [datetime.combine(day, wanted) for day in days]
    first = [_in_zone(wall, zone) for wall in walls]
    second = [at for wall in walls if (at := _in_zone(wall.replace(fold=1), zone)).astimezone(zone).time() == wanted]
    return min(at for at in first + second if at > now)


def _in_zone(naive: datetime, zone: tzinfo | None) -> datetime:
    """Without a zone the machine's own rules count, which Python asks the C library for."""
    return (naive.replace(tzinfo=zone) if zone else naive).astimezone(UTC)
