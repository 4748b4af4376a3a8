"""Steps and metrics of a foreign program, read from what it prints and from files that it writes.

Nothing of it is trusted: a line is cut at LINE_BYTES, a look reads at most LOOK_BYTES and goes on at the end, and a regular
expression that takes longer than MATCH_S on a line is interrupted, after TIMEOUTS of them for good. The interruption is a
signal, which Python's matcher looks out for; so `read` is called in the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from kgorch import untrusted_io
from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.core.checkpoint.log_order import LogLine
from kgorch.protocol.messages import is_metric
from kgorch.protocol.values import MAX_NUMBER
from kgorch.worker.foreign.candidates import expand

LINE_BYTES = 2000
LOOK_BYTES = 2 << 20
FILE_BYTES = 4 << 20
"""Of a JSON file, of which that much at its end is read where it has an object a line."""

MATCH_S, TIMEOUTS = 0.2, 3
MAX_FILES = 100
"""Files that a path with wildcards may match."""

THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
"""A number whose thousands are separated by commas."""


class MatchTimeout(Exception):
    """A regular expression took too long on a line."""


class Reading(NamedTuple):
    """What one look has found.

    Attributes:
        step: the newest one; None for none.
        steps_total: None where the program does not say.
        values: metrics, in the order in which they were printed: (name, value, step that was known by then; None where none
            was, or where that was the step of a checkpoint, which the program has left since).
        problems: what cannot be read, a sentence each; each is reported once.
        lines: of the log, those in which a step or a metric was read, oldest first.
    """

    step: int | None
    steps_total: int | None
    values: list[tuple[str, float, int | None]]
    problems: list[str]
    lines: list[LogLine]


class ProgramOutput:
    """Reads the log and the files of one program.

    Args:
        step, metrics, checkpoint: of LaunchSpec.foreign.

    Attributes:
        last_lines: the newest lines of the log that are not empty.
        step_place: the checkpoint in whose files the step was read; empty where it was read elsewhere, or not at all.
    """

    def __init__(
        self,
        log: Path,
        root: Path,
        step: Mapping[str, Any] | None,
        metrics: Mapping[str, Any],
        checkpoint: str | None = None,
    ) -> None:
        self._root, self._checkpoint = root, checkpoint
        self._log = LogTail(log)
        sources = ({"": step} if step else {}) | dict(metrics)
        self._patterns = {name: re.compile(source["log"]) for name, source in sources.items() if source["log"]}
        self._files = {name: source for name, source in sources.items() if source["file"]}
        self._read_files: dict[str, tuple[int, int, int]] = {}
        self._timeouts = dict.fromkeys(self._patterns, 0)
        self._step: int | None = None
        self._total: int | None = None
        self.step_place = ""
        self.last_lines: list[str] = []

    def read(self, *, is_last: bool = False) -> Reading:
        """What is new since the last look. In the main thread. Args: is_last: a line without an end counts, too."""
        reading: list[tuple[str, float, int | None]] = []
        problems: list[str] = []
        lines: list[LogLine] = []
        for line in self._log.lines(is_last=is_last):
            if line.strip():
                self.last_lines = [*self.last_lines[-19:], line]
            count = len(reading)
            if self._match(line, reading, problems):
                names = frozenset(name for name, _, _ in reading[count:])
                lines.append(LogLine(self._log.end, self._step, names, time.time_ns()))
        for name, source in self._files.items():
            self._read_file(name, source, reading, problems)
        return Reading(self._step, self._total, reading, problems, lines)

    def _match(self, line: str, values: list[tuple[str, float, int | None]], problems: list[str]) -> bool:
        """Whether a number was read."""
        is_read = False
        for name, pattern in list(self._patterns.items()):
            try:
                with _time_limit(MATCH_S):
                    match = pattern.search(line)
            except MatchTimeout:
                self._timeouts[name] += 1
                if self._timeouts[name] >= TIMEOUTS:
                    del self._patterns[name]
                    problems.append(
                        f"the expression for {name or 'the step'} took longer than {MATCH_S:g} s on {TIMEOUTS} lines and is not"
                        f" used any more: {pattern.pattern!r:.200}; write it without nested repetitions"
                    )
                continue
            if match is None or (number := _number(match[1])) is None:
                continue
            is_read = True
            if name:
                self._take(name, number, values)
            elif self._take_step(number) and pattern.groups > 1 and (total := _number(match[2])) is not None:
                self._total = int(total) if 0 < total < MAX_NUMBER else None
        return is_read

    def _read_file(
        self, name: str, source: Mapping[str, Any], values: list[tuple[str, float, int | None]], problems: list[str]
    ) -> None:
        try:
            paths = [path for _, path in zip(range(MAX_FILES), expand(self._root, source["file"]), strict=False)]
            places = [(status.st_mtime_ns, path, status) for path in paths if (status := (self._root / path).lstat())]
            if not places:
                return
            _, path, status = max(places, key=lambda place: place[:2])
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._read_files.get(name) == mark:
                return
            number = _number(_at(_document(self._root / path), source["key"]))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ):  # half written, or without the key: the next look may find it
            return
        self._read_files[name] = mark
        if number is None:
            return
        place = self._checkpoint_of(path)
        if name:
            self._take(name, number, values, place)
        elif self._take_step(number):
            self.step_place = place

    def _checkpoint_of(self, path: str) -> str:
        """The checkpoint that a file is, or lies in; empty for none."""
        if self._checkpoint is None:
            return ""
        place = "/".join(path.split("/")[: self._checkpoint.count("/") + 1])
        return place if foreign_checkpoint.matches(place, self._checkpoint) else ""

    def _take(self, name: str, number: float, values: list[tuple[str, float, int | None]], place: str = "") -> None:
        if is_metric(name, number):
            is_of_step = self.step_place in ("", place)
            values.append((name, number, self._step if is_of_step else None))

    def _take_step(self, number: float) -> bool:
        """A program that was restarted by its own means may count anew: the newest number counts, not the highest."""
        if not 0 <= number < MAX_NUMBER:
            return False
        self._step = int(number)
        return True


class LogTail:
    """The new lines of a file that grows, and whose beginning may be cut off (launch/log_rotation.py).

    Attributes:
        end: bytes of the file up to the end of the line that was read last, without what ends it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        self._at = self.end = path.stat().st_size if path.exists() else 0
        self._is_cut = False  # the rest of an overlong line is skipped

    def lines(self, *, is_last: bool = False) -> Iterator[str]:
        """Complete lines since the last call, each cut at LINE_BYTES. A carriage return ends a line, too: progress bars use it."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._at or size - self._at > LOOK_BYTES:
                    # its beginning was cut off, or it floods: what is between is not read
                    self._at, self._rest = max(0, size - LOOK_BYTES), b""
                content = os.pread(file.fileno(), LOOK_BYTES, self._at)
        except OSError:
            return
        begin = self._at - len(self._rest)
        self._at += len(content)
        *lines, rest = re.split(rb"[\r\n]", self._rest + content)
        for line in lines:
            self.end = begin + len(line)
            begin = self.end + 1
            if not self._is_cut:
                yield line[:LINE_BYTES].decode(errors="replace")
            self._is_cut = False
        self._rest, self.end = rest, self._at
        if len(rest) > LINE_BYTES:
            if not self._is_cut:
                yield rest[:LINE_BYTES].decode(errors="replace")
            self._rest, self._is_cut = b"", True
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise MatchTimeout in the block after so many seconds of this thread's time: a busy machine is no fault of it.

    In the main thread.
    """
    end_s = time.thread_time() + seconds

    def interrupt(_: int, __: FrameType | None) -> None:
        if (left_s := end_s - time.thread_time()) <= 0:
            raise MatchTimeout
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left_s, 0.001))  # other threads have computed

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _number(value: Any) -> float | None:
    """A number out of JSON or out of a text, which may be infinite or no number at all; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and THOUSANDS.fullmatch(value):
        value = value.replace(",", "")
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _document(path: Path) -> Any:
    """The JSON document in a file, or the last line of it that is one. Raises: OSError, ValueError."""
    with untrusted_io.open_file(path.parent, path.name) as file:
        size = os.fstat(file.fileno()).st_size
        content = untrusted_io.read_at(file, max(0, size - FILE_BYTES), min(size, FILE_BYTES))
    if size <= FILE_BYTES:
        with contextlib.suppress(ValueError):
            return untrusted_io.parse_json(content)
    for line in reversed(content.splitlines()):
        with contextlib.suppress(ValueError):
            return untrusted_io.parse_json(line)
    raise json.JSONDecodeError("no JSON in it", "", 0)


def _at(document: Any, key: str) -> Any:
    """The value under a dotted key; numbers are positions in lists. Raises: LookupError, TypeError, ValueError."""
    for part in key.split("."):
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document
