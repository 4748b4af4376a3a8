"""Checkpoints of a program that saves by itself: which one is complete, which step it stands for, and how long a stop takes.

kgorch does not see such a program write. A checkpoint counts as complete when its names say so (the program renames what is
done), or when it has not changed for a while; for a long one where files are missing that earlier checkpoints had, and never where
the format of a file proves it cut off. A program that is killed in the middle of a write leaves a file that never changes
again, so that time counts only while the program lives; what it wrote last before a kill is *doubtful*, and is taken only where
the format of its files proves them whole (worker/foreign/file_formats.py) and no file is missing that earlier checkpoints had.

Newest means by the times of the files, never by name: a name sorts `checkpoint-1000` before `checkpoint-999`, and tools that go by
name pick half-written folders.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

WILDCARDS = re.compile(r"[*?\[]")

MAX_CANDIDATES = 1000
"""Checkpoints of one program that are looked at."""

MAX_FILES, MAX_DEPTH = 4096, 8
"""Of one checkpoint. A manifest that lists more files could not be read again."""

MAX_VALUES = 100
"""Metrics that are read from a program's output."""

MAX_PASSINGS = 1000
"""Entries that are kept of what a log has said: a claim file that is longer than it may be would disown all checkpoints."""

RECENT_STOPS = 8
"""Stops from which the next one is predicted."""

PROVEN_S = 0.5
"""Seconds without a change after which a proof by format is looked for."""

LACKING_S = 300.0
"""Seconds without a change after which a checkpoint counts as complete that lacks files: a model may have been written, and its
optimizer be gathered from all ranks."""

SAME_COUNT = 2
"""A number in a name is no step where the log is at more than this multiple of it: names may count epochs."""


class ForeignCandidate(NamedTuple):
    """What may be a checkpoint, as it was found on disk.

    Attributes:
        path: relative to the plan's folder, with slashes.
        is_folder: a folder of files, or one file.
        files: names relative to `path`; the name itself for a single file.
        bytes: of all files.
        newest_ns: the latest time at which one of its files was changed, Unix time in nanoseconds; where it has a problem, at which
            the folder itself was, too, for not all of its files were looked at.
        signature: differs whenever a file was changed.
        problem: why it can never be taken (a link in it, too many files); empty for none.
    """

    path: str
    is_folder: bool
    files: tuple[str, ...]
    bytes: int
    newest_ns: int
    signature: str
    problem: str = ""


class Unchanged(NamedTuple):
    """A candidate, and the instant since which it was seen unchanged."""

    candidate: ForeignCandidate
    since_s: float


class Handed(NamedTuple):
    """The checkpoint that a program was handed, until a newer one of it was copied.

    Attributes:
        path: empty where it was handed none.
        step: that it stands for; -1 for none.
        history: what its log has said since, as `logged_at` takes it; of it what `passings` leaves.
    """

    path: str = ""
    step: int = -1
    history: Sequence[tuple[int, int]] = ()


class Wholeness(Enum):
    """What the files of a candidate say of it."""

    WHOLE = "whole"  # the formats of all files prove it, and none is missing
    UNKNOWN = "unknown"
    LACKING = "lacking"  # files that earlier checkpoints had are missing
    TORN = "torn"  # the format of a file proves it cut off


class CompletenessRule(NamedTuple):
    """When a checkpoint is complete: `incomplete` names, or seconds without a change where there are none."""

    incomplete: Sequence[str]
    settled_s: float

    def is_named_incomplete(self, candidate: ForeignCandidate) -> bool:
        """Whether a name says that it is being written."""
        names = {part for name in (candidate.path.rpartition("/")[2], *candidate.files) for part in name.split("/")}
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in self.incomplete)

    @property
    def wait_s(self) -> float:
        """Seconds without a change after which a candidate counts as complete."""
        return 0.0 if self.incomplete else self.settled_s

    def wait_for(self, wholeness: Wholeness) -> float:
        """Seconds without a change after which a candidate of that wholeness counts as complete; infinite for never."""
        if wholeness is Wholeness.TORN:
            return math.inf
        if wholeness is Wholeness.LACKING and not self.incomplete:
            return max(LACKING_S, self.settled_s)
        return min(PROVEN_S, self.wait_s) if wholeness is Wholeness.WHOLE else self.wait_s


Watched = Mapping[str, Unchanged]


def observe(watched: Watched, found: Iterable[ForeignCandidate], now_s: float) -> dict[str, Unchanged]:
    """The candidates of a look, by path, each with the instant since which it is unchanged."""
    after = {}
    for candidate in found:
        before = watched.get(candidate.path)
        same = before is not None and before.candidate.signature == candidate.signature
        after[candidate.path] = Unchanged(candidate, before.since_s if same and before else now_s)
    return after


def newest_complete(
    items: Iterable[Unchanged],
    rule: CompletenessRule,
    now_s: float,
    *,
    wholeness_of: Callable[[ForeignCandidate], Wholeness],
) -> ForeignCandidate | None:
    """The newest of the eligible candidates that is complete; None for none.

    Args:
        items: as `eligible` returns them.
        wholeness_of: what its files say. Asked after a moment without a change: a program that overwrites one file more often
            than `settled` would otherwise never have a complete one.
    """
    for item in items:
        unchanged_s = now_s - item.since_s
        if unchanged_s >= rule.wait_for(Wholeness.WHOLE) and unchanged_s >= rule.wait_for(wholeness_of(item.candidate)):
            return item.candidate
    return None


def eligible(
    watched: Watched,
    rule: CompletenessRule,
    *,
    after_ns: int,
    excluded: Collection[str],
    with_problems: bool = False,
) -> list[Unchanged]:
    """The candidates that may become complete, newest first. Args: with_problems: and those that can never be taken."""
    chosen = [
        item
        for item in watched.values()
        if item.candidate.newest_ns > after_ns
        and item.candidate.signature not in excluded
        and (with_problems or not item.candidate.problem)
        and not rule.is_named_incomplete(item.candidate)
    ]
    return sorted(chosen, key=lambda item: item.candidate.newest_ns, reverse=True)


def lacks_files(candidate: ForeignCandidate, earlier: Collection[str]) -> list[str]:
    """Files that earlier checkpoints had and this one has not. Of a single file the name may differ.

    Numbers in names may differ, as in `global_step500/`; there must be as many files of a name without its numbers.
    """
    if not candidate.is_folder:
        return []
    here, before = Counter(map(shape_of, candidate.files)), Counter(map(shape_of, earlier))
    scarce = {shape for shape, count in before.items() if here[shape] < count}
    return sorted(name for name in set(earlier) - set(candidate.files) if shape_of(name) in scarce)


def shape_of(name: str) -> str:
    """A name or path without its numbers."""
    return re.sub(r"\d+", "0", name)


def logged_at(history: Sequence[tuple[int, int]], newest_ns: int) -> int | None:
    """The step that the log was at when a checkpoint was written; None where none was read.

    Args:
        history: (time of the look, step) of each look that found another step, oldest first.
    """
    return next((step for at_ns, step in history if at_ns >= newest_ns), history[-1][1] if history else None)


def passings(history: Sequence[tuple[int, int]], step: int) -> list[tuple[int, int]]:
    """What of a history tells when the log was beyond a step: of each stretch the first entry, and the last if another follows.

    The newest MAX_PASSINGS of them.
    """
    beyond = [logged > step for _, logged in history]
    kept = [
        entry
        for number, entry in enumerate(history)
        if number == 0
        or beyond[number] is not beyond[number - 1]
        or (number + 1 < len(history) and beyond[number] is not beyond[number + 1])
    ]
    return kept[-MAX_PASSINGS:]


def number_of(path: str, pattern: str, *, logged: int | None) -> int | None:
    """The last number in the part of a checkpoint's path that a wildcard stands for, if it is a step as the log counts them.

    None where there is none, or the log shows that names count something else. Args: logged: see `step_of`.
    """
    number = next(reversed(numbers_in(path, pattern)), None)
    return None if number is not None and logged is not None and logged > SAME_COUNT * number else number


def step_of(number: int | None, *, logged: int | None, taken: int) -> int:
    """The step that a checkpoint stands for: the number in its name, or the step of the log where that is none.

    A step is larger than that of the checkpoint before, whatever the names say: it is the order in which they were written.

    Args:
        number: see `number_of`.
        logged: the newest step of the log; None where none is read.
        taken: step of the checkpoint that was taken last; -1 for none.
    """
    step = number if number is not None else logged
    # at least 1: a run that has come to step 0 has made no progress
    return max(taken + 1, 1) if step is None or step <= taken else max(step, 1)


def has_started_over(candidate: ForeignCandidate, handed: Handed, pattern: str) -> bool:
    """Whether a checkpoint shows that the program did not continue from the one that it was handed, and trains anew.

    No number in its name is above that of the other one, and the log had not come further: names may be slots that are written in
    turn, or hold a loss.
    """
    new, old = numbers_in(candidate.path, pattern), numbers_in(handed.path, pattern)
    is_behind = len(new) == len(old) and new != old and all(one <= other for one, other in zip(new, old, strict=True))
    logged = logged_at(handed.history, candidate.newest_ns)
    return is_behind and (logged is None or logged <= handed.step)


def numbers_in(path: str, pattern: str) -> list[int]:
    """The numbers of at most 15 digits in the parts of `path` that wildcards of `pattern` match."""
    numbers: list[int] = []
    for part, shape in zip(path.split("/"), pattern.split("/"), strict=False):
        if not WILDCARDS.search(shape):
            continue
        prefix, suffix = WILDCARDS.split(shape)[0], WILDCARDS.split(shape)[-1].rpartition("]")[2]
        varying = part.removeprefix(prefix).removesuffix(suffix)
        numbers += [int(digits) for digits in re.findall(r"\d+", varying) if len(digits) <= 15]
    return numbers


def matches(path: str, pattern: str) -> bool:
    """Whether a path fits the plan's pattern, part by part; a wildcard matches no leading dot."""
    parts, shapes = path.split("/"), pattern.split("/")
    return len(parts) == len(shapes) and all(
        fnmatch.fnmatchcase(part, shape) and (not part.startswith(".") or shape.startswith("."))
        for part, shape in zip(parts, shapes, strict=True)
    )


def stop_times_s(stops: Iterable[Mapping[str, Any]], *, grace_s: float) -> list[float]:
    """Seconds that former stops took, of those that say how long the next one may take.

    One that ended with a kill took at least the grace time. One that saved nothing before the first checkpoint of its attempt
    says nothing: a program that is still loading ends at once, and later saves for a minute.

    Args:
        stops: facts of FOREIGN_STOPPED, oldest first.
    """
    times_s = []
    for facts in stops:
        if facts.get("killed") == "yes":
            times_s.append(max(float(facts["took_s"]), grace_s))
        elif facts.get("saved") == "yes" or facts.get("had_checkpoint") != "no":
            times_s.append(float(facts["took_s"]))
    return times_s


def stop_lead_s(stops_s: Sequence[float], *, grace_s: float, copy_s: float) -> float:
    """Seconds before the wall (without the margin) at which the program is asked to stop.

    The slowest of the last stops, with what a save's prediction adds for small numbers (save_deadline.save_s); at most what the
    plan grants and a copy takes.

    Args:
        stops_s: seconds from the request until the last checkpoint was copied, of former stops, oldest first (`stop_times_s`).
        grace_s: the plan's `stop.grace`, which is the answer, with the copy, while there are none.
        copy_s: what copying a checkpoint takes.
    """
    recent, longest_s = stops_s[-RECENT_STOPS:], grace_s + copy_s
    if not recent:
        return longest_s
    return min(max(recent) * (1 + 1 / math.sqrt(len(recent))) + 0.5, longest_s)
