"""Windows of time in which a quota may be used: where each begins and ends.

A calendar window ends at a local time in a named zone, because platforms and people define it so: on a day of 23 or 25 hours the
window has as many. A local time that a clock change skips is read as much later as the clock jumps; of one that occurs twice the
first counts. So edges are instants, and windows cover time without gap or overlap.
"""

from __future__ import annotations

import calendar
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo

WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
"""Start of the window that never ends."""

PIECE_S = 3600.0
"""Usage of a rolling window is recorded in pieces of this length, seconds, because it leaves the window piece by piece."""

EXPECTED = 'expected "Sat 00:00 UTC", "daily 00:00 Europe/Berlin", "monthly 1 00:00 UTC", "rolling 7d" or "never"'


@dataclass(frozen=True, slots=True)
class Calendar:
    """A window that ends at a local time, daily unless `weekday` or `day` is set.

    Attributes:
        at: local time of the zone.
        weekday: 0 is Monday.
        day: of the month; the last one in a month that is shorter.
    """

    at: time
    zone: tzinfo
    weekday: int | None = None
    day: int | None = None

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        """Start and end of the window that holds the instant: start <= instant < end."""
        edges = self._edges_around(instant.astimezone(self.zone).date())
        return max(edge for edge in edges if edge <= instant), min(edge for edge in edges if edge > instant)

    # A forecast asks a thousand times. The instances are few, so the cache that holds them alive stays small.
    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _edges_around(self, middle: date) -> set[datetime]:
        """All edges that may be next to the date: two days more than a window is long, because zones are up to a day apart."""
        days = 33 if self.day is not None else 9 if self.weekday is not None else 3
        dates = (middle + timedelta(days=offset) for offset in range(-days, days + 1))
        return {
            datetime.combine(day, self.at, self.zone).astimezone(UTC) for day in dates if self._is_day_of_an_edge(day)
        }

    def _is_day_of_an_edge(self, day: date) -> bool:
        if self.weekday is not None:
            return day.weekday() == self.weekday
        if self.day is not None:
            return day.day == min(self.day, calendar.monthrange(day.year, day.month)[1])
        return True


@dataclass(frozen=True, slots=True)
class Rolling:
    """Usage of the last `length_s` seconds counts."""

    length_s: float

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        return instant - timedelta(seconds=self.length_s), None


@dataclass(frozen=True, slots=True)
class Never:
    """A single window: the quota never renews."""

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        return min(BEGINNING, instant), None


Window = Calendar | Rolling | Never


def parse(text: str) -> Window:
    """Parse `Sat 00:00 UTC`, `daily 09:30 Europe/Berlin`, `monthly 31 00:00 UTC`, `rolling 7d` or `never`.

    Raises: ValueError saying what was expected, with the nearest weekday or zone.
    """
    words = text.split()
    match [word.lower() for word in words]:
        case ["never"]:
            return Never()
        case ["rolling", length]:
            return Rolling(_length_s(length))
        case ["daily", _, _]:
            return Calendar(_time(words[1]), _zone(words[2]))
        case ["monthly", day, _, _]:
            if not re.fullmatch(r"[0-9]{1,2}", day) or not 1 <= int(day) <= 31:
                raise ValueError(f"expected a day of the month from 1 to 31, found {words[1]!r}")
            return Calendar(_time(words[2]), _zone(words[3]), day=int(day))
        case [_, _, _]:
            return Calendar(_time(words[1]), _zone(words[2]), weekday=_weekday(words[0]))
    raise ValueError(EXPECTED)


def pieces(window: Window, from_at: datetime, until_at: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Cut a time of usage at the edges of windows; for a rolling window into pieces of at most PIECE_S."""
    while from_at < until_at:
        edge = from_at + timedelta(seconds=PIECE_S) if isinstance(window, Rolling) else window.window_at(from_at)[1]
        to_at = until_at if edge is None else min(edge, until_at)
        yield from_at, to_at
        from_at = to_at


def _length_s(word: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([mhd])", word)
    length_s = float(match[1]) * {"m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]] if match else 0.0
    if not 60.0 <= length_s <= 366 * 86400.0:
        raise ValueError(f'expected a length from "1m" to "366d" after rolling, found {word!r}')
    return length_s


def _time(word: str) -> time:
    match = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})", word)
    if not match or int(match[1]) > 23 or int(match[2]) > 59:
        raise ValueError(f'expected a time of day such as "00:00", found {word!r}; {EXPECTED}')
    return time(int(match[1]), int(match[2]))


def _weekday(word: str) -> int:
    lower = word.lower()
    for number, name in enumerate(WEEKDAYS):
        if len(lower) >= 3 and name.startswith(lower):
            return number
    choices = [*WEEKDAYS, "daily", "monthly", "rolling", *(name[:3] for name in WEEKDAYS)]
    near = difflib.get_close_matches(lower, choices, n=1, cutoff=0.5)
    raise ValueError(f"there is no weekday {word!r}" + (f" (did you mean {near[0]!r}?)" if near else f"; {EXPECTED}"))


def _zone(word: str) -> tzinfo:
    """The zone of this name. UTC needs no time zone database: a slim container may have none."""
    if word.upper() in ("UTC", "Z"):
        return UTC
    import zoneinfo  # its import takes a tenth of the time of `kgorch status`, and only some quotas need it

    try:
        return zoneinfo.ZoneInfo(word)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        names = zoneinfo.available_timezones()
    if not names:
        raise ValueError(f"the zone {word!r} is not known: this machine has no table of zones; `pip install tzdata`")
    by_lower = {name.lower(): name for name in sorted(names)}
    cities = {name.rpartition("/")[2]: by_lower[name] for name in by_lower} | by_lower
    near = difflib.get_close_matches(word.lower(), cities, n=1, cutoff=0.5)
    raise ValueError(f"there is no time zone {word!r}" + (f" (did you mean {cities[near[0]]!r}?)" if near else ""))
