"""At which step of a program's log a checkpoint was saved, by the order of what was printed and saved.

A log has no times. How long it is, is looked at many times a second, and a file has the time of its last write: so it is known
which lines were there before a save and which were not, but for those of about one look.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

MTIME_NS = 10_000_000
"""Nanoseconds by which the time of a file may be behind: that of the last clock tick, of which Linux has 100 a second or more."""

AT_ONCE, LONG = 0.1, 0.67
"""Time from a value to the save after it, as a part of that from the value before to this one. Below the first, the value was
printed at once before the save; above the second, a training lies between them."""

SAME_NS = 2_000_000_000
"""Nanoseconds within which files that are written are one save: the last checkpoint and the best one."""

MAX_SAVES = 1000
"""That are remembered."""


class LogLength(NamedTuple):
    """A length of a log, and when looks have found it.

    Attributes:
        bytes: the length.
        first_ns, last_ns: end of the first look that found it, begin of the last one; Unix time.
    """

    bytes: int
    first_ns: int
    last_ns: int


class LogLine(NamedTuple):
    """A line that another step or a metric was read in.

    Attributes:
        end: bytes of the log up to its end.
        step: known then; None for none.
        metrics: names of those that were read in it.
        at_ns: Unix time at which it was there.
    """

    end: int
    step: int | None
    metrics: frozenset[str]
    at_ns: int


class LogPlace(NamedTuple):
    """Where in a log a save was.

    Attributes:
        at_ns: Unix time of the save.
        begin, end: bytes that the log had before it for certain, and at most.
        beside: the lines between these.
        since: the line that began the step which the log was at before; None where there was no line.
    """

    at_ns: int
    begin: int
    end: int
    beside: Sequence[LogLine]
    since: LogLine | None


class LogOrder(NamedTuple):
    """What a log had said when.

    Attributes:
        lengths, lines: oldest first.
        is_cut: older lines were forgotten.
        metrics: all that were read in it.
    """

    lengths: Sequence[LogLength] = ()
    lines: Sequence[LogLine] = ()
    is_cut: bool = False
    metrics: frozenset[str] = frozenset()

    def place_of(self, saved_ns: int) -> LogPlace | None:
        """Where a save was; None where that is not known."""
        begin = next((length.bytes for length in reversed(self.lengths) if length.first_ns <= saved_ns), None)
        if begin is None:
            return None
        end = next((length.bytes for length in self.lengths if length.last_ns >= saved_ns + MTIME_NS), math.inf)
        before = [line for line in self.lines if line.end <= begin]
        beside = [line for line in self.lines if begin < line.end <= end]
        if not before and self.is_cut:
            return None
        since = None
        for line in reversed(before):
            if since and line.step != since.step:
                break
            since = line
        return LogPlace(saved_ns, begin, max([begin, *(line.end for line in beside)]), beside, since)

    def after(self, place: LogPlace) -> Sequence[LogLine]:
        """The lines that were not there before a save; none where they are not known."""
        lines = [line for line in self.lines if line.end > place.begin]
        return [] if self.is_cut and len(lines) == len(self.lines) else lines


class SaveOrder:
    """Whether a program prints a metric before its save or after it, where no line says that a step begins.

    The first save tells: it comes before the first value where values follow saves. Not so where a program saves the weights that
    it begins with, or measures them: so the time between a value and the save after it is compared with that between values.
    """

    def __init__(self) -> None:
        self._saves: deque[LogPlace] = deque(maxlen=MAX_SAVES)
        self._follows: dict[str, bool] = {}
        self._is_first: set[str] = set()  # the first save came before the first value of it

    def note(self, saved_ns: int, order: LogOrder) -> LogPlace | None:
        """A checkpoint was saved at that Unix time in nanoseconds. Returns: where; None where that is not known."""
        if known := next((other for other in reversed(self._saves) if other.at_ns == saved_ns), None):
            return known
        place = order.place_of(saved_ns)
        if place is None:
            return None
        if self._saves and place.end < self._saves[-1].begin:  # the beginning of the log was cut off
            self._saves.clear()
        self._saves.append(place)
        for metric in order.metrics:
            self._compare(metric, place, order)
        return place

    def _compare(self, metric: str, place: LogPlace, order: LogOrder) -> None:
        """See whether a value was printed at once before a save, or a training lies between."""
        follows = self.follows(metric, order)
        values = [line for line in order.lines if metric in line.metrics and line.end <= place.end]
        if not values or any(other.end >= values[-1].end for other in self._before(place)):
            return
        begins = (line.at_ns for line in reversed(values) if line.step != values[-1].step)
        begin_ns = next(begins, self._saves[0].at_ns if metric in self._is_first else order.lengths[0].first_ns)
        since_ns, between_ns = place.at_ns - values[-1].at_ns, values[-1].at_ns - begin_ns
        if since_ns < AT_ONCE * between_ns:
            self._follows[metric] = False
        elif since_ns > LONG * between_ns and not follows:
            self._follows[metric] = True

    def follows(self, metric: str, order: LogOrder) -> bool:
        """Whether a metric's value comes after its save, as far as is known."""
        if metric not in self._follows:
            first = next((line for line in order.lines if metric in line.metrics), None)
            if first is None or not self._saves:
                return True
            self._follows[metric] = first.end > self._saves[0].end and not order.is_cut
            self._is_first |= {metric} if self._follows[metric] else set()
        return self._follows[metric]

    def step_of(
        self, place: LogPlace, metric: str, order: LogOrder, values: Mapping[int, Mapping[str, float]]
    ) -> int | None:
        """The step at which a metric's values are those of a save; None for none, or not yet. Args: values: by step."""
        at_once = {line.step for line in place.beside if metric in line.metrics}
        if at_once:  # before the save or after it, and training is on neither side; several, and the program keeps its output back
            return at_once.pop() if len(at_once) == 1 else None
        since, follows = place.since, self.follows(metric, order)
        has_begun = since is not None and metric in since.metrics
        if since and not (has_begun and follows):
            steps = [step for step in (since.step, *(line.step for line in place.beside)) if step is not None]
            measured = next((step for step in steps if metric in values.get(step, ())), None)
            if measured is not None:
                is_taken = has_begun and any(other.end >= since.end for other in self._before(place))
                return None if is_taken else measured
        following = next((line for line in order.after(place) if since is None or line.step != since.step), None)
        if not follows or following is None or metric not in following.metrics:
            return None
        later = (other for other in self._saves if other.at_ns > place.at_ns + SAME_NS)
        return None if any(other.begin < following.end for other in later) else following.step  # a value is of one save

    def _before(self, place: LogPlace) -> Iterator[LogPlace]:
        return (other for other in self._saves if other.at_ns < place.at_ns - SAME_NS)
