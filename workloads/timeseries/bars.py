"""Bars of prices: the CSV files of exchanges, brokers and pandas, checked, and coarser bars made from finer ones.

Axes: N bars, V the five values open, high, low, close, volume, C figures of a bar that a network sees.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from kgorch.workloads.common.files import DataError

NAMES = {
    "time": ("time", "timestamp", "datetime", "date", "open_time", "open time", "unix", ""),
    "open": ("open",),
    "high": ("high",),
    "low": ("low",),
    "close": ("close",),
    "volume": ("volume", "tick_volume", "tickvol", "vol"),
}
"""Headers of a column, in lower case, the first one found counts. pandas writes an index without a name as ""."""

SYMBOLS = ("symbol", "ticker", "name")
"""Headers of the column that tells the symbols of a file with several apart."""

FIGURES = 5
VOLUME = FIGURES - 1
"""The volume's place among the figures; a window measures it against its own mean (data.py)."""

SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
MONDAY_S = 4 * 86400
"""1970-01-05, a Monday: weeks are counted from it. 1970-01-01 was a Thursday."""

UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class Rows(NamedTuple):
    """Lines of one file that belong to one symbol."""

    time_s: np.ndarray  # int64 [N], when the bar begins, seconds since 1970 UTC
    values_NV: np.ndarray  # float64 [N, V]
    line: np.ndarray  # int64 [N], number of the line in the file, the first is 1


@dataclass(frozen=True)
class Bars:
    """One symbol at one time frame, in the order of time.

    Attributes:
        span_s: length of a bar, seconds.
        begins_s: int64 [N], when a bar begins, seconds since 1970 UTC.
        closes_s: int64 [N], when it is over: nothing of it is known before.
        values_NV: float64 [N, V].
        figures_NC: float32 [N, C], what a network sees.
    """

    span_s: int
    begins_s: np.ndarray
    closes_s: np.ndarray
    values_NV: np.ndarray
    figures_NC: np.ndarray

    @property
    def close(self) -> np.ndarray:
        """float64 [N]: the closing prices."""
        return self.values_NV[:, 3]

    def newest_closed(self, at_s: np.ndarray | int) -> np.ndarray:
        """Index of the newest bar that is over at each instant; -1 for none."""
        return np.searchsorted(self.closes_s, at_s, side="right") - 1


def span_of(frame: str) -> int:
    """Seconds of a time frame, "5m", "1h", "1d" or "1w". Raises DataError."""
    match = re.fullmatch(r"([1-9]\d*)([mhdw])", frame)
    if match is None:
        raise DataError(f"{frame!r} is not a time frame", next_step='write it as "5m", "1h", "1d" or "1w"')
    return int(match[1]) * SECONDS[match[2]]


def bars_of(rows: Rows, path: Path, frame: str) -> Bars:
    """The bars of checked lines. Raises DataError naming the line whose values or time are wrong."""
    span_s = span_of(frame)
    if len(rows.time_s) > 1 and (np.diff(rows.time_s) < 0).all():  # the newest first, as some sites write them
        rows = Rows(*(part[::-1] for part in rows))
    check_values(rows, path)
    gap = np.isnan(rows.values_NV[:, :4]).all(1)  # a line without prices is a gap
    rows = Rows(*(part[~gap] for part in rows))
    if not len(rows.time_s):
        raise DataError(f"{path}: no line has prices", next_step="fetch this file again, or: skip_broken = true")
    check_steps(rows, path, frame, span_s)
    closes_s = rows.time_s + span_s
    # Days of local time have 23 or 25 hours twice a year: such a bar lasts until the next one begins.
    steps_s = np.diff(rows.time_s)
    closes_s[:-1] = np.where(steps_s < 1.5 * span_s, rows.time_s[1:], closes_s[:-1])
    return Bars(span_s, rows.time_s, closes_s, rows.values_NV, figures_of(rows.values_NV))


def coarser(fine: Bars, frame: str) -> Bars:
    """The bars of a longer time frame, made from a shorter one's; each is over when the last bar in it is."""
    span_s = span_of(frame)
    if span_s <= fine.span_s or span_s % fine.span_s:
        raise DataError(
            f"{frame} bars cannot be made from bars of {fine.span_s} s",
            next_step=f"name the shortest frame first, or give a file of {frame} bars",
        )
    offset_s = MONDAY_S if span_s % SECONDS["w"] == 0 else 0
    begins_s = (fine.begins_s - offset_s) // span_s * span_s + offset_s
    first = np.flatnonzero(np.diff(begins_s, prepend=begins_s[0] - 1))
    last = np.append(first[1:], len(begins_s)) - 1
    open_, high, low, close, volume = fine.values_NV.T
    values_NV = np.stack(
        [
            open_[first], np.maximum.reduceat(high, first), np.minimum.reduceat(low, first), close[last],
            np.add.reduceat(volume, first),
        ],
        1,
    )  # fmt: skip
    closes_s = np.maximum(begins_s[first] + span_s, fine.closes_s[last])
    return Bars(span_s, begins_s[first], closes_s, values_NV, figures_of(values_NV))


def figures_of(values_NV: np.ndarray) -> np.ndarray:
    """float32 [N, C] from each bar and the one before: return, close over open, range, place in the range, log volume."""
    open_, high, low, close, volume = values_NV.T
    before = np.concatenate([close[:1], close[:-1]])
    width = np.maximum(high - low, 1e-9 * close)
    figures = (
        np.log(close / before), np.log(close / open_), np.log(high / low), (2 * close - high - low) / width, np.log1p(volume)
    )  # fmt: skip
    return np.stack(figures, 1).astype(np.float32)


# Checks


def check_values(rows: Rows, path: Path) -> None:
    """Raises DataError naming the first line that is no bar."""
    prices, volume = rows.values_NV[:, :4], rows.values_NV[:, 4]
    gap = np.isnan(prices).all(1)
    wrong = {
        "a price that is not above 0": ~gap & ~(np.isfinite(prices) & (prices > 0)).all(1),
        "a volume that is not 0 or more": ~gap & ~(np.isfinite(volume) & (volume >= 0)),
        "a high below its low": prices[:, 1] < prices[:, 2],
        "the same time as the line before": np.diff(rows.time_s, prepend=rows.time_s[:1] - 1) == 0,
        "a time before that of the line before": np.diff(rows.time_s, prepend=rows.time_s[:1]) < 0,
    }
    for what, lines in wrong.items():
        if lines.any():
            at = int(np.argmax(lines))
            found = ", ".join(f"{value:g}" for value in rows.values_NV[at])
            raise DataError(
                f"{path}:{rows.line[at]}: {what}",
                f"found time {utc(rows.time_s[at])}, open, high, low, close, volume {found}",
                next_step="correct or delete this line, or leave out such symbols: skip_broken = true",
            )


def check_steps(rows: Rows, path: Path, frame: str, span_s: int) -> None:
    """Raises DataError when the times are not those of bars of this frame: a longer bar would be read before its end."""
    steps_s = np.diff(rows.time_s)
    shortest_s = span_s - (3600 if span_s % 86400 == 0 else 0)  # a day of local time has 23 hours once a year
    next_step = "name the time frame as the bars are: frames in the plan, and the file's name"
    if (steps_s < shortest_s).any():
        at = int(np.argmax(steps_s < shortest_s))
        raise DataError(
            f"{path}:{rows.line[at + 1]}: {steps_s[at]} s after the bar before",
            f"expected {frame} bars, {span_s} s apart",
            next_step=next_step,
        )
    found, counts = np.unique(steps_s, return_counts=True)
    if len(found) and found[np.argmax(counts)] != span_s:
        raise DataError(
            f"{path}: most bars are {found[np.argmax(counts)]} s apart", f"expected {frame} bars, {span_s} s apart",
            next_step=next_step,
        )  # fmt: skip


def utc(at_s: int | np.integer) -> str:
    """An instant for people."""
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Files


def read(path: Path) -> dict[str, Rows]:
    """The lines of a CSV, or of the first CSV in a zip, by symbol; "" for a file without a column of symbols.

    Times may be seconds, milli-, micro- or nanoseconds since 1970 UTC, or text (UTC where it names no time zone).

    Raises: DataError.
    """
    try:
        with open_text(path) as file:
            names, first, columns, delimiter = header(file, path)
            symbols: dict[str, int] = {}
            as_number: dict[int, Callable[[str], float]] = {
                column: (lambda text: symbols.setdefault(text, len(symbols))) for column in columns[6:]
            }
            if not first.strip():
                raise ValueError("no line of values")
            sample = next(csv.reader([first], delimiter=delimiter))[columns[0]]
            lines: Iterable[str] = itertools.chain([first], file)
            if {"date", "time"} <= set(names):
                columns[0], sample, lines = joined_time(lines, names.index("date"), names.index("time"), delimiter)
            if is_text := not is_number(sample):
                as_number[columns[0]] = seconds_of
            table = np.loadtxt(
                with_nan(lines, delimiter), delimiter=delimiter, usecols=columns, ndmin=2,
                quotechar='"', comments=None, converters=as_number or None, encoding="utf-8",
            )  # fmt: skip
    except (OSError, ValueError, IndexError, csv.Error, zipfile.BadZipFile) as problem:
        raise DataError(
            f"{path.name} of {path.parent.name} cannot be read",
            f"{path}: expected a CSV of prices, found: {problem.__cause__ or problem}",
            next_step="fetch this file again, or leave such symbols out: skip_broken = true",
        ) from problem  # fmt: skip
    line = np.arange(len(table)) + (2 if names else 1)
    time_s = np.round(table[:, 0]).astype(np.int64) if is_text else whole_seconds(table[:, 0], line, path)
    rows = Rows(time_s, table[:, 1:6], line)
    if len(columns) == 6:
        return {"": rows}
    return {symbol: Rows(*(part[table[:, 6] == number] for part in rows)) for symbol, number in symbols.items()}


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """A text file, or the first one in a zip."""
    if path.suffix != ".zip":
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as member:
        yield io.TextIOWrapper(member, encoding="utf-8-sig", newline="")


def header(file: IO[str], path: Path) -> tuple[list[str], str, list[int], str]:
    """Names of the columns ([] without a header), the first line of values, places of time, the values and symbols, delimiter."""
    line = file.readline()
    delimiter = max(",;\t", key=line.count)
    names = [name.strip().strip("<>").lower() for name in next(csv.reader([line], delimiter=delimiter), [])]
    if len(names) >= 6 and all(
        is_number(name) for name in names[:6]
    ):  # klines as Binance's archives and ccxt have them
        return [], line, [0, 1, 2, 3, 4, 5], delimiter
    columns = []
    for name, aliases in NAMES.items():
        places = [names.index(alias) for alias in aliases if alias in names]
        if not places:
            raise DataError(
                f"{path} has no column {name!r}", f"found {', '.join(names)[:200]}",
                next_step="its first line names the columns: time,open,high,low,close,volume; or: skip_broken = true",
            )  # fmt: skip
        columns.append(places[0])
    columns += [names.index(name) for name in SYMBOLS if name in names][:1]
    return names, file.readline(), columns, delimiter


def has_symbols(path: Path) -> bool:
    """Whether a file holds several symbols, told apart by a column; False for one that cannot be read."""
    try:
        with open_text(path) as file:
            return len(header(file, path)[2]) > 6
    except (OSError, ValueError, DataError, zipfile.BadZipFile, IndexError):
        return False


def joined_time(lines: Iterable[str], date: int, time: int, delimiter: str) -> tuple[int, str, Iterator[str]]:
    """Place of the time, the first one, and the lines; a date and a time of day in two columns are joined in that of the date."""
    rows = csv.reader(lines, delimiter=delimiter)
    first = next(rows)
    is_split = re.fullmatch(r"\d\d?:\d\d(:\d\d)?", first[time].strip()) is not None

    def joined() -> Iterator[str]:
        for row in itertools.chain([first], rows):
            if is_split and len(row) > max(date, time):
                row[date] = f"{row[date].strip()} {row[time].strip()}"
            yield delimiter.join(f'"{field}"' if delimiter in field else field for field in row)

    place = date if is_split else time
    return place, f"{first[date]} {first[time]}" if is_split else first[time], joined()


def with_nan(lines: Iterable[str], delimiter: str) -> Iterator[str]:
    """The lines of values; what Yahoo writes as null, and what is empty, becomes nan."""
    empty = re.compile(rf"(?<={delimiter})\s*(?={delimiter}|$)")
    for line in lines:
        bare = line.rstrip()
        has_empty = delimiter * 2 in bare or bare.endswith(delimiter)
        yield empty.sub("nan", bare.replace("null", "nan")) if has_empty or "null" in bare else bare


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def seconds_of(text: str) -> float:
    """An ISO date or instant, also "2024.01.31 10:00", as seconds since 1970 UTC. Raises ValueError."""
    text = text.strip()
    if re.match(r"\d{4}[./]\d\d[./]\d\d", text):
        text = text[:4] + "-" + text[5:7] + "-" + text[8:]
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"expected a time such as 2024-01-31 or 2024-01-31 10:00:00, found {text!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def whole_seconds(time: np.ndarray, line: np.ndarray, path: Path) -> np.ndarray:
    """int64 [N] from numbers in any of UNITS, known by their size: 10^11 s is the year 5138, 10^11 ms is 1973.

    Raises: DataError when units are mixed, or a time is not a number.
    """
    if not np.isfinite(time).all():
        raise DataError(
            f"{path}:{line[np.argmin(np.isfinite(time))]}: a time that is not a number",
            next_step="correct or delete this line, or leave out such symbols: skip_broken = true",
        )
    unit = np.searchsorted([1e11, 1e14, 1e17], np.abs(time), side="right")
    if (unit != unit[0]).any():
        at = int(np.argmax(unit != unit[0]))
        names = list(UNITS)
        raise DataError(
            f"{path}:{line[at]}: a time in another unit", f"found {time[at]:.0f} ({names[unit[at]]}), before it {names[unit[0]]}",
            next_step="write all times of a file in the same unit",
        )  # fmt: skip
    return np.floor(time / list(UNITS.values())[unit[0]]).astype(np.int64)
