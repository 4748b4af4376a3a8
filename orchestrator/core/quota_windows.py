"""Windows of time in which so many hours may be used: when one begins, when the next.

A calendar window ends at a local time in a named zone, because that is how platforms and people say it: on a day that a clock
change makes 23 or 25 hours long, the window is, too. A time that the change leaves out comes as much later as the clock jumps; of a
time that exists twice the first counts. So the edges are instants, and windows tile time without gap or overlap.
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
"""When the window began that never ends."""

PIECE_S = 3600.0
"""Of a rolling window: use is written down in pieces of this length, since it leaves the window as it came."""

EXPECTED = 'expected "Sat 00:00 UTC", "daily 00:00 Europe/Berlin", "monthly 1 00:00 UTC", "rolling 7d" or "never"'


@dataclass(frozen=True, slots=True)
class Calendar:
    """Ends at `at` of the zone: on each `weekday` (0 is Monday), on each `day` of the month (or its last), or daily."""

    at: time
    zone: tzinfo
    weekday: int | None = None
    day: int | None = None

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        """The window that holds the instant: start <= instant < end."""
        edges = self._edges_around(instant.astimezone(self.zone).date())
        return max(edge for edge in edges if edge <= instant), min(edge for edge in edges if edge > instant)

    # a forecast asks a thousand times; what is kept is small, and bounded
    @functools.lru_cache(maxsize=64)  # noqa: B019
    def _edges_around(self, middle: date) -> set[datetime]:
        """All that may be next to it; two days more than a window is long, for zones are up to a day apart."""
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
    """What was used in the last `length_s` seconds counts."""

    length_s: float

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        return instant - timedelta(seconds=self.length_s), None


@dataclass(frozen=True, slots=True)
class Never:
    """One window, and no hours come back."""

    def window_at(self, instant: datetime) -> tuple[datetime, datetime | None]:
        return min(BEGINNING, instant), None


Window = Calendar | Rolling | Never


def parse(text: str) -> Window:
    """`Sat 00:00 UTC`, `daily 09:30 Europe/Berlin`, `monthly 31 00:00 UTC`, `rolling 7d`, `never`.

    Raises: ValueError that names what was expected, and the nearest weekday or zone.
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
    """A stretch of use, cut at the edges of windows; for a rolling one into lengths of PIECE_S at most."""
    while from_at < until_at:
        edge = from_at + timedelta(seconds=PIECE_S) if isinstance(window, Rolling) else window.window_at(from_at)[1]
        to_at = until_at if edge is None else min(edge, until_at)
        yield from_at, to_at
        from_at = to_at


def _length_s(word: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([mhd])", word)
    length_s = float(found[1]) * {"m": 60.0, "h": 3600.0, "d": 86400.0}[found[2]] if found else 0.0
    if not 60.0 <= length_s <= 366 * 86400.0:
        raise ValueError(f'expected a length from "1m" to "366d" after rolling, found {word!r}')
    return length_s


def _time(word: str) -> time:
    found = re.fullmatch(r"([0-9]{1,2}):([0-9]{2})", word)
    if not found or int(found[1]) > 23 or int(found[2]) > 59:
        raise ValueError(f'expected a time of day such as "00:00", found {word!r}; {EXPECTED}')
    return time(int(found[1]), int(found[2]))


def _weekday(word: str) -> int:
    lower = word.lower()
    for number, name in enumerate(WEEKDAYS):
        if len(lower) >= 3 and name.startswith(lower):
            return number
    known = [*WEEKDAYS, "daily", "monthly", "rolling", *(name[:3] for name in WEEKDAYS)]
    near = difflib.get_close_matches(lower, known, n=1, cutoff=0.5)
    raise ValueError(f"there is no weekday {word!r}" + (f" (did you mean {near[0]!r}?)" if near else f"; {EXPECTED}"))


def _zone(word: str) -> tzinfo:
    """UTC needs no table of zones: a slim container may have none."""
    if word.upper() in ("UTC", "Z"):
        return UTC
    import zoneinfo  # a tenth of what `status` may take, and only some need it

    try:
        return zoneinfo.ZoneInfo(word)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
    if not known:
        raise ValueError(f"the zone {word!r} is not known: this machine has no table of zones; `pip install tzdata`")
    by_lower = {name.lower(): name for name in sorted(known)}
    cities = {name.rpartition("/")[2]: by_lower[name] for name in by_lower} | by_lower
    near = difflib.get_close_matches(word.lower(), cities, n=1, cutoff=0.5)
    raise ValueError(f"there is no time zone {word!r}" + (f" (did you mean {cities[near[0]]!r}?)" if near else ""))
