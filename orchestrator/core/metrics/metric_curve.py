"""The metrics of a run over its steps: the records that rank 0 writes, their format, and one curve from many attempts.

A record holds either the means of metrics over a few seconds of steps, or the exact values that were reported between two epochs.
Rank 0 appends records to a file of its attempt, one JSON line each, so that none is lost while no supervisor runs. The database
holds the same lines (db/curves.py). `decode` reads both and trusts neither: a line may be cut off, or from an untrusted source.

A mean never spans a saved step, because `MetricRecorder.flush` is called at each save. So an attempt that continues from a saved
step replaces whole records of the attempt before it, and the merged curve has every step exactly once.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FILE_NAME = "metrics.jsonl"
"""Of the file in an attempt's folder."""

INTERVAL_S = 5.0
"""Approximate length of a mean, seconds of steps: 6,480 records in nine hours."""

MOST_BYTES = 4 << 20
"""Largest size of an attempt's records, in its file and in the database. Nine hours with four metrics take about 0.8 MB. Beyond
it `thin` merges older means."""

LINE_BYTES, NAME_LENGTH, MOST_NAMES = 1 << 20, 200, 1000
"""Bounds of a line from an untrusted source: bytes, characters of a metric's name, metrics."""

UNTHINNED = 64
"""Newest records that `thin` leaves as they are, so that a resume from a recent checkpoint still finds the end of a record."""

LARGEST = 1 << 62
"""Bound of integers and instants in a line from an untrusted source."""


class Value(NamedTuple):
    """A metric in a record.

    Attributes:
        mean: of the reports; NaN where one of them was not finite.
        reports: how many; 1 for an exact value.
    """

    mean: float
    reports: int


class Record(NamedTuple):
    """Metrics that were reported together.

    Attributes:
        step: optimizer steps of the stage that were done at the measurement; of a mean its last step.
        first: the mean is over the steps after this one; equal to `step` for exact values, and for all of step 0.
        epoch: counted from 1; 0 before the first.
        at_s: Unix time, seconds.
        values: by the name of the metric.
    """

    step: int
    first: int
    epoch: int
    at_s: float
    values: Mapping[str, Value]

    @property
    def is_exact(self) -> bool:
        return self.first == self.step


class Mark(NamedTuple):
    """Where in the training a value was reported.

    Attributes:
        step: steps done, the running one included.
        epoch: counted from 1.
        is_exact: no step was running.
    """

    step: int
    epoch: int
    is_exact: bool


class MetricRecorder:
    """Collects single reports into records.

    Args:
        emit: called with each record once it is complete.
        interval_s: length of a mean.
    """

    def __init__(self, emit: Callable[[Record], None], *, interval_s: float = INTERVAL_S) -> None:
        self._emit, self._interval_s = emit, interval_s
        self._sums: dict[str, list[float]] = {}  # name → [sum, count]
        self._exact: dict[str, Value] = {}
        self._first = self._step = self._epoch = 0
        self._exact_at = Mark(0, 0, True)
        self._began_s = 0.0

    def add(self, name: str, value: float, mark: Mark, now_s: float) -> None:
        """Record one report. Args: now_s: Unix time; a clock that is set back ends the interval."""
        if mark.is_exact:
            if self._exact and self._exact_at != mark:
                self.flush(now_s)
            self._exact_at = mark
            self._exact[name] = Value(value, 1)
            return
        if self._exact or (self._sums and self._is_over(mark, now_s)):
            self.flush(now_s)
        if not self._sums:
            self._first, self._step, self._epoch, self._began_s = max(0, mark.step - 1), mark.step, mark.epoch, now_s
        elif mark.step > self._step:
            self._step = mark.step
        elif mark.step <= self._first:  # a value whose copy from the GPU arrived late
            self._first = max(0, mark.step - 1)
        if (total := self._sums.get(name)) is None:
            self._sums[name] = [value, 1.0]
        else:
            total[0] += value
            total[1] += 1.0

    def _is_over(self, mark: Mark, now_s: float) -> bool:
        """Whether a report begins another record. All reports of a step belong to one record, and no record spans two epochs."""
        if mark.step == self._step:
            return False
        return mark.epoch != self._epoch or not 0 <= now_s - self._began_s < self._interval_s

    def flush(self, now_s: float) -> None:
        """Emit the records begun. Called before each save: no mean may span a step that an attempt can continue from."""
        if self._sums:
            values = {name: Value(total / count, int(count)) for name, (total, count) in self._sums.items()}
            self._sums = {}
            self._emit(Record(self._step, self._first, self._epoch, now_s, values))
        if self._exact:
            exact, at, self._exact = self._exact, self._exact_at, {}
            self._emit(Record(at.step, at.step, at.epoch, now_s, exact))


# The format: one JSON line a record


def encode(record: Record) -> str:
    """The record as a line, without the newline.

    Keys: s step, e epoch, t Unix time, f first step of a mean, v values. One letter each: there are thousands of lines.
    """
    document: dict[str, Any] = {"s": record.step, "e": record.epoch, "t": round(record.at_s, 1)}
    if record.is_exact:
        document["v"] = {name: _finite(value.mean) for name, value in record.values.items()}
    else:
        document["f"] = record.first
        document["v"] = {name: [_finite(value.mean, 9), value.reports] for name, value in record.values.items()}
    return json.dumps(document, separators=(",", ":"))


def _finite(value: float, digits: int = 0) -> float | None:
    """The value, None for NaN, which JSON does not have. Args: digits: to round to, significant ones; 0 for all."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if digits else value


def decode(text: str) -> list[Record]:
    """The records of lines, which may come from an untrusted source. A line that is not a record is skipped."""
    return [record for line in text.split("\n") if (record := _decoded(line)) is not None]


def _decoded(line: str) -> Record | None:
    if not line or len(line) > LINE_BYTES:
        return None
    try:
        return record_of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def record_of(document: Any) -> Record | None:
    """A record from JSON of an untrusted source; None for what is not a record."""
    if not isinstance(document, dict) or not isinstance(values := document.get("v"), dict):
        return None
    step, epoch, at_s = _whole(document.get("s")), _whole(document.get("e")), _number(document.get("t"))
    first = _whole(document["f"]) if "f" in document else step
    if step is None or epoch is None or first is None or not math.isfinite(at_s) or not 0 <= at_s < LARGEST:
        return None
    if first > step or len(values) > MOST_NAMES:
        return None
    read = {plain_name(name): _value(value, is_exact=first == step) for name, value in values.items()}
    valid = {name: value for name, value in read.items() if value is not None}
    return Record(step, first, epoch, at_s, valid) if valid else None


def plain_name(name: str) -> str:
    """The name without control characters, which a terminal would obey, and of bounded length."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:NAME_LENGTH])


def _value(item: Any, *, is_exact: bool) -> Value | None:
    count: int | None = 1
    if not is_exact:
        if not isinstance(item, list) or len(item) != 2:
            return None
        item, count = item[0], _whole(item[1])
    if not count or not (item is None or isinstance(item, int | float)) or isinstance(item, bool):
        return None
    return Value(_number(item), count)


def _whole(item: Any) -> int | None:
    return item if type(item) is int and 0 <= item < LARGEST else None


def _number(item: Any) -> float:
    """NaN for what is not a finite number."""
    if isinstance(item, bool) or not isinstance(item, int | float):
        return math.nan
    try:
        value = float(item)
    except OverflowError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def thin(records: Sequence[Record], most_bytes: int) -> list[Record]:
    """At most so many bytes of lines, the newest records unchanged.

    Older means are merged by pairs until that is enough. Then every second one of the older exact values is dropped.
    """
    result = list(records)
    while sum(len(encode(record)) + 1 for record in result) > most_bytes:
        before = len(result)
        result = [*_halve(result[:-UNTHINNED]), *result[-UNTHINNED:]]
        if len(result) == before:
            older = result[:-UNTHINNED]
            # Without older ones the first half of the newest goes, or the loop would not end.
            result = [*older[1::2], *result[-UNTHINNED:]] if older else result[len(result) // 2 + 1 :]
    return result


def _halve(records: Sequence[Record]) -> list[Record]:
    """Merge each two means in a row, whatever exact values lie between them."""
    result: list[Record] = []
    first: int | None = None  # index of the first mean of a pair
    for record in records:
        if record.is_exact:
            result.append(record)
        elif first is None:
            first = len(result)
            result.append(record)
        else:
            result.append(_join(result.pop(first), record))
            first = None
    return result


def _join(one: Record, other: Record) -> Record:
    """The mean over both, weighted by their reports."""
    values = dict(one.values)
    for name, value in other.values.items():
        if (earlier := values.get(name)) is None:
            values[name] = value
        else:
            reports = earlier.reports + value.reports
            values[name] = Value((earlier.mean * earlier.reports + value.mean * value.reports) / reports, reports)
    return Record(other.step, min(one.first, other.first), other.epoch, other.at_s, values)


# One curve from many attempts


class AttemptRecords(NamedTuple):
    """The records of one attempt.

    Attributes:
        first_step: that the attempt continued from; 0 where it began the stage.
    """

    first_step: int
    records: Sequence[Record]


def merge(attempts: Iterable[AttemptRecords]) -> list[Record]:
    """One curve from the attempts of a stage, oldest first.

    What an attempt did beyond the step that the next one continued from is undone, and left out.
    """
    curve: list[Record] = []
    for first_step, records in attempts:
        del curve[bisect_right(curve, first_step, key=_step) :]
        own = {(record.first, record.step, *record.values): record for record in records if record.step >= first_step}
        curve += sorted(own.values(), key=lambda record: (record.step, record.is_exact))
    return list(_without_doubles(curve))


def _step(record: Record) -> int:
    return record.step


def _without_doubles(records: Iterable[Record]) -> Iterator[Record]:
    """Join the exact values of a step: a resumed attempt may report again what the one before it reported there."""
    before: Record | None = None
    for record in records:
        if before and before.is_exact and record.is_exact and before.step == record.step:
            before = record._replace(values={**before.values, **record.values})
            continue
        if before:
            yield before
        before = record
    if before:
        yield before


# What is displayed


class CurvePoint(NamedTuple):
    """All metrics of one step.

    Attributes:
        epoch: counted from 1.
        at_s: Unix time, seconds.
        steps: how many the means are over; 0 where all values are exact.
    """

    step: int
    epoch: int
    at_s: float
    steps: int
    values: Mapping[str, float]


def points(records: Iterable[Record]) -> list[CurvePoint]:
    """One point a step, in order. An exact value takes precedence over a mean of the same name."""
    by_step: dict[int, CurvePoint] = {}
    for record in records:
        values = {name: value.mean for name, value in record.values.items()}
        steps = record.step - record.first
        if point := by_step.get(record.step):
            values = {**point.values, **values} if record.is_exact else {**values, **point.values}
            steps = max(steps, point.steps)
        by_step[record.step] = CurvePoint(record.step, record.epoch, record.at_s, steps, values)
    return [by_step[step] for step in sorted(by_step)]


def by_epoch(records: Iterable[Record]) -> list[tuple[int, dict[str, float]]]:
    """The values of each epoch, in order: the last exact one, else the mean over its steps.

    What was measured at step 0 may be the loss of the first batch, and counts as one value of the mean.
    """
    means: dict[int, dict[str, list[float]]] = {}
    exact: dict[int, dict[str, float]] = {}
    for record in records:
        of_epoch = means.setdefault(record.epoch, {})
        for name, value in record.values.items():
            if record.is_exact and record.step:
                exact.setdefault(record.epoch, {})[name] = value.mean
            else:
                total = of_epoch.setdefault(name, [0.0, 0.0])
                total[0] += value.mean * value.reports
                total[1] += value.reports
    return [
        (epoch, {name: total / count for name, (total, count) in means[epoch].items()} | exact.get(epoch, {}))
        for epoch in sorted(means)
    ]


FALLING = ("loss", "err", "mae", "mse", "nll", "perplexity", "ppl", "wer", "cer", "divergence")
"""Parts of the names of metrics of which less is better, unless the plan says otherwise."""


def is_falling(name: str) -> bool:
    return any(part in name.lower() for part in FALLING)


RISING = (
    "acc",
    "dice",
    "f1",
    "iou",
    "auc",
    "precision",
    "recall",
    "map",
    "bleu",
    "rouge",
    "r2",
    "psnr",
    "ssim",
    "reward",
    "score",
)
"""Parts of the names of metrics of which more is better."""


def has_known_direction(name: str) -> bool:
    """Whether the name says which values are better. Of a learning rate or a norm none is."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return is_falling(name) or any(word.startswith(part) for word in words for part in RISING)


class Summary(NamedTuple):
    """A metric in one line.

    Attributes:
        mode: `min` or `max`, whichever value is the best.
        values: how many there are.
        is_judged: the plan or the name says which values are better; else `best` is the highest, and no achievement.
    """

    name: str
    mode: str
    values: int
    last: float
    last_step: int
    best: float
    best_step: int
    is_judged: bool


def summaries(curve: Sequence[CurvePoint], modes: Mapping[str, str]) -> list[Summary]:
    """Each metric in one line, in the order of their first reports. Of equal values the first is the best.

    Args:
        modes: `min` or `max` by name, where the plan says so.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for point in curve:
        for name, value in point.values.items():
            series.setdefault(name, []).append((point.step, value))
    lines = []
    for name, items in series.items():
        mode = modes.get(name) or ("min" if is_falling(name) else "max")
        finite = [(step, value) for step, value in items if math.isfinite(value)] or items[
            -1:
        ]  # NaN where nothing else is
        best_step, best = (min if mode == "min" else max)(finite, key=lambda item: item[1])
        last_step, last = items[-1]
        is_judged = name in modes or has_known_direction(name)
        lines.append(Summary(name, mode, len(items), last, last_step, best, best_step, is_judged))
    return lines
