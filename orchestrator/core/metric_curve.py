"""A run's metrics over its steps: the records that rank 0 writes, how they are read back, and one curve from many attempts.

A record is either the mean of a metric over a few seconds of steps, or values that were reported between two epochs, exactly.
Rank 0 appends records to a file of its attempt, one JSON line each, so nothing is lost while no supervisor lives. The same lines
travel in the database (db/curves.py). Both are read by `decode`, which trusts nobody: a line may be cut, or written by a stranger.

A mean never reaches over a saved step (`Recorder.flush` is called at each save). So an attempt that goes on from a saved step
replaces whole records of the attempt before it, and the merged curve has every step once.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

FILE_NAME = "metrics.jsonl"
"""In an attempt's folder."""

INTERVAL_S = 5.0
"""Seconds of steps in one mean, about: 6,480 records in nine hours."""

MOST_BYTES = 4 << 20
"""Of one attempt's records, in its file and in the database. Nine hours with four metrics take about 0.8 MB. Where there is more,
older means are merged by pairs (`thinned`)."""

LINE_BYTES, NAME_LENGTH, MOST_NAMES = 1 << 20, 200, 1000
"""Bounds on what is read."""

NEWEST_KEPT = 64
"""Records that `thinned` leaves as they are: a resume from a recent checkpoint still meets the end of a record."""

LARGEST = 1 << 62


class Value(NamedTuple):
    """`mean` of so many `reports`, 1 for an exact value. It is NaN where any of them was no finite number."""

    mean: float
    reports: int


class Record(NamedTuple):
    """Attributes:
    step: optimizer steps of the stage that were done when this was measured; of a mean its last step.
    first: a mean is over the steps after this one; equal to `step` for exact values.
    epoch: counted from 1; 0 before the first.
    at_s: Unix time, seconds.
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
    """Where a value was reported. `step`: done steps, the one that runs included; `is_exact`: no step was running."""

    step: int
    epoch: int
    is_exact: bool


class Recorder:
    """Makes records of single reports.

    Args:
        emit: takes each record once it is complete.
    """

    def __init__(self, emit: Callable[[Record], None], *, interval_s: float = INTERVAL_S) -> None:
        self._emit, self._interval_s = emit, interval_s
        self._sums: dict[str, list[float]] = {}  # of a name the sum and the count
        self._exact: dict[str, Value] = {}
        self._first = self._step = self._epoch = 0
        self._exact_at = Mark(0, 0, True)
        self._began_s = 0.0

    def add(self, name: str, value: float, mark: Mark, now_s: float) -> None:
        """One report. `now_s`: Unix time; a clock that was put back ends the interval."""
        if mark.is_exact:
            if self._exact and self._exact_at != mark:
                self.flush(now_s)
            self._exact_at = mark
            self._exact[name] = Value(value, 1)
            return
        if self._exact or (self._sums and self._is_over(mark, now_s)):
            self.flush(now_s)
        if not self._sums:
            self._first, self._step, self._epoch, self._began_s = mark.step - 1, mark.step, mark.epoch, now_s
        elif mark.step > self._step:
            self._step = mark.step
        elif mark.step <= self._first:  # a copy from a GPU that was long on its way
            self._first = mark.step - 1
        if (known := self._sums.get(name)) is None:
            self._sums[name] = [value, 1.0]
        else:
            known[0] += value
            known[1] += 1.0

    def _is_over(self, mark: Mark, now_s: float) -> bool:
        """All reports of one step are in one record, and none is of two epochs."""
        if mark.step == self._step:
            return False
        return mark.epoch != self._epoch or not 0 <= now_s - self._began_s < self._interval_s

    def flush(self, now_s: float) -> None:
        """Emit what there is: before a save, so that no mean reaches over the step that an attempt may go on from."""
        if self._sums:
            values = {name: Value(total / count, int(count)) for name, (total, count) in self._sums.items()}
            self._sums = {}
            self._emit(Record(self._step, self._first, self._epoch, now_s, values))
        if self._exact:
            exact, at, self._exact = self._exact, self._exact_at, {}
            self._emit(Record(at.step, at.step, at.epoch, now_s, exact))


# Lines


def encode(record: Record) -> str:
    """One line, without its end."""
    document: dict[str, Any] = {"s": record.step, "e": record.epoch, "t": round(record.at_s, 1)}
    if record.is_exact:
        document["v"] = {name: _finite(value.mean) for name, value in record.values.items()}
    else:
        document["f"] = record.first
        document["v"] = {name: [_finite(value.mean, 9), value.reports] for name, value in record.values.items()}
    return json.dumps(document, separators=(",", ":"))


def _finite(value: float, digits: int = 0) -> float | None:
    """JSON has no NaN. `digits`: how many of a mean are kept, 0 for all."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}") if digits else value


def decode(text: str) -> list[Record]:
    """The records of these lines. A line that is none, cut or written by a stranger, is passed over."""
    return [record for line in text.split("\n") if (record := _decoded(line)) is not None]


def _decoded(line: str) -> Record | None:
    if not line or len(line) > LINE_BYTES:
        return None
    try:
        return record_of(json.loads(line))
    except (ValueError, RecursionError):
        return None


def record_of(document: Any) -> Record | None:
    """A record from JSON that anybody may have written; None for what is none."""
    if not isinstance(document, dict) or not isinstance(values := document.get("v"), dict):
        return None
    step, epoch, at_s = _whole(document.get("s")), _whole(document.get("e")), _number(document.get("t"))
    first = _whole(document["f"]) if "f" in document else step
    if step is None or epoch is None or first is None or not math.isfinite(at_s) or not 0 <= at_s < LARGEST:
        return None
    if first > step or len(values) > MOST_NAMES:
        return None
    read = {plain_name(name): _value(value, is_exact=first == step) for name, value in values.items()}
    known = {name: value for name, value in read.items() if value is not None}
    return Record(step, first, epoch, at_s, known) if known else None


def plain_name(name: str) -> str:
    """A name that moves no cursor and breaks no table."""
    return "".join(letter if letter.isprintable() else "?" for letter in name[:NAME_LENGTH])


def _value(given: Any, *, is_exact: bool) -> Value | None:
    count: int | None = 1
    if not is_exact:
        if not isinstance(given, list) or len(given) != 2:
            return None
        given, count = given[0], _whole(given[1])
    if not count or not (given is None or isinstance(given, int | float)) or isinstance(given, bool):
        return None
    return Value(_number(given), count)


def _whole(given: Any) -> int | None:
    return given if type(given) is int and 0 <= given < LARGEST else None


def _number(given: Any) -> float:
    """NaN for what is no finite number."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return math.nan
    try:
        value = float(given)
    except OverflowError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def thinned(records: Sequence[Record], most_bytes: int) -> list[Record]:
    """At most so many bytes of lines: older means merged by pairs, until that is enough; then every second of the older exact
    ones left out. The newest stay as they are."""
    kept = list(records)
    while sum(len(encode(record)) + 1 for record in kept) > most_bytes:
        before = len(kept)
        kept = [*_halved(kept[:-NEWEST_KEPT]), *kept[-NEWEST_KEPT:]]
        if len(kept) == before:
            older = kept[:-NEWEST_KEPT]
            kept = [*older[1::2], *kept[-NEWEST_KEPT:]] if older else kept[len(kept) // 2 + 1 :]
    return kept


def _halved(records: Sequence[Record]) -> list[Record]:
    """Each two means in a row as one, whatever exact values lie between them."""
    made: list[Record] = []
    waiting: int | None = None  # where the first of a pair is
    for record in records:
        if record.is_exact:
            made.append(record)
        elif waiting is None:
            waiting = len(made)
            made.append(record)
        else:
            joined = _joined(made.pop(waiting), record)
            made.append(joined)
            waiting = None
    return made


def _joined(one: Record, other: Record) -> Record:
    values = dict(one.values)
    for name, value in other.values.items():
        if (known := values.get(name)) is None:
            values[name] = value
        else:
            reports = known.reports + value.reports
            values[name] = Value((known.mean * known.reports + value.mean * value.reports) / reports, reports)
    return Record(other.step, min(one.first, other.first), other.epoch, other.at_s, values)


# Many attempts


class Stretch(NamedTuple):
    """What one attempt recorded that went on from `first_step` (0: it began the stage)."""

    first_step: int
    records: Sequence[Record]


def merged(stretches: Iterable[Stretch]) -> list[Record]:
    """One curve from a stage's attempts, oldest first. What an attempt did beyond the step that the next one went on from is
    undone, so it is not shown."""
    kept: list[Record] = []
    for first_step, records in stretches:
        del kept[bisect_right(kept, first_step, key=_step) :]
        mine = {(record.first, record.step, *record.values): record for record in records if record.step >= first_step}
        kept += sorted(mine.values(), key=lambda record: (record.step, record.is_exact))
    return list(_without_doubles(kept))


def _step(record: Record) -> int:
    return record.step


def _without_doubles(records: Iterable[Record]) -> Iterator[Record]:
    """Exact values of one step as one record: a resumed attempt may report again what the one before it had reported there."""
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


# What a person looks at


class Point(NamedTuple):
    """All that is known of one step. `steps`: how many the means are over, 0 where all values are exact."""

    step: int
    epoch: int
    at_s: float
    steps: int
    values: Mapping[str, float]


def points(records: Iterable[Record]) -> list[Point]:
    """One a step, in order. An exact value goes before a mean of the same name."""
    found: dict[int, Point] = {}
    for record in records:
        values = {name: value.mean for name, value in record.values.items()}
        steps = record.step - record.first
        if known := found.get(record.step):
            values = {**known.values, **values} if record.is_exact else {**values, **known.values}
            steps = max(steps, known.steps)
        found[record.step] = Point(record.step, record.epoch, record.at_s, steps, values)
    return [found[step] for step in sorted(found)]


def by_epoch(records: Iterable[Record]) -> list[tuple[int, dict[str, float]]]:
    """Each epoch's values: the mean over its steps, or the last exact one."""
    means: dict[int, dict[str, list[float]]] = {}
    exact: dict[int, dict[str, float]] = {}
    for record in records:
        of_epoch = means.setdefault(record.epoch, {})
        for name, value in record.values.items():
            if record.is_exact:
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
"""In the name of a metric of which less is better, unless the plan says otherwise."""


def is_falling(name: str) -> bool:
    return any(part in name.lower() for part in FALLING)


class Summary(NamedTuple):
    """`mode`: `min` or `max`, which of the values is the best. `values`: how many are known."""

    name: str
    mode: str
    values: int
    last: float
    last_step: int
    best: float
    best_step: int


def summaries(curve: Sequence[Point], modes: Mapping[str, str]) -> list[Summary]:
    """Of each metric, in the order of first reports. `modes`: `min` or `max` by name, where the plan says it. The first of equals
    is the best; a metric that never was a number has NaN."""
    series: dict[str, list[tuple[int, float]]] = {}
    for point in curve:
        for name, value in point.values.items():
            series.setdefault(name, []).append((point.step, value))
    made = []
    for name, items in series.items():
        mode = modes.get(name) or ("min" if is_falling(name) else "max")
        known = [(step, value) for step, value in items if math.isfinite(value)] or items[-1:]
        best_step, best = (min if mode == "min" else max)(known, key=lambda item: item[1])
        last_step, last = items[-1]
        made.append(Summary(name, mode, len(items), last, last_step, best, best_step))
    return made
