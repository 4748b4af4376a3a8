"""What is known of a running foreign program, from what it prints and writes: steps, metrics, and the messages of a rank."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kgorch.core.checkpoint.log_order import LogLine, LogOrder
from kgorch.core.codes import EventKind
from kgorch.core.metrics.metric_curve import Mark
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Heartbeat, Hello, JournalEntry, Message, RankProgress
from kgorch.system.clock import boottime_s
from kgorch.worker.foreign.checkpoint_labels import ProgramPosition
from kgorch.worker.foreign.checkpoint_watch import CheckpointWatch
from kgorch.worker.foreign.log_length import LogLengths
from kgorch.worker.foreign.program_output import ProgramOutput
from kgorch.worker.telemetry.metric_log import MetricLog

HISTORY = 1000
"""Steps whose times and metrics are remembered, to tell which one a checkpoint was written at, and what was measured there."""

MAX_LINES = 10_000
"""Of the log, with steps and metrics, whose places in it are remembered."""

RECENT = 0.2
"""Weight of the newest time of a step in the usual one."""


class ProgramStatus:
    """Of one start of a program. The main thread reads; the link's thread makes messages.

    Attributes:
        watch: its checkpoints; None where the plan names no place of them. Set after this is made, for it needs `position`.
        is_ready: the program was started.
        step: the newest that was read; None for none.
        metrics: reported last, by name.
    """

    def __init__(self, launch: LaunchSpec, foreign: Mapping[str, Any], log: Path) -> None:
        self._launch, self._foreign = launch, foreign
        self.watch: CheckpointWatch | None = None
        self.is_ready = False
        self.step: int | None = None
        self.metrics: dict[str, float] = {}
        self._measured: dict[str, int] = {}
        self._values: dict[int, dict[str, float]] = {}
        self._output = ProgramOutput(
            log, Path(launch.workdir), foreign["step"], foreign["metrics"], foreign.get("checkpoint")
        )
        self._lengths = LogLengths(log)
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._is_cut = False
        self._log_metrics = frozenset(name for name, source in foreign["metrics"].items() if source["log"])
        self._metric_log = MetricLog(launch)
        self._history: deque[tuple[int, int]] = deque(maxlen=HISTORY)
        self._steps_total = 0
        self._step_s, self._stepped_s = 0.0, boottime_s()
        self._longest = dict[str, float]()
        self._ticks, self._moved_s = 0, boottime_s()
        self._cut_step = -1

    @property
    def last_lines(self) -> list[str]:
        """The newest lines of its output."""
        return self._output.last_lines

    @property
    def last_words(self) -> str:
        """The last line that names an error, else the last one with a letter or a digit, which a ruled line has not; quoted."""
        lines = [line for line in self.last_lines if any(letter.isalnum() for letter in line)]
        errors = [line for line in lines if line.split(":")[0].rpartition(" ")[2].endswith(("Error", "Exception"))]
        return repr((errors or lines or ["nothing"])[-1].strip())[:300]

    @property
    def known_step(self) -> int:
        """The step that its output says, else that of its newest checkpoint."""
        if self.step is not None:
            return self.step
        return max(self.watch.step, 0) if self.watch else 0

    @property
    def is_saved(self) -> bool:
        """Whether its newest checkpoint is at the step that its output says; False where that is read in a checkpoint itself."""
        if self.watch is None or self.step is None or self._output.step_place:
            return False
        return self.watch.step >= self.step

    def position(self) -> ProgramPosition:
        """For its checkpoints. From any thread."""
        is_in_log = bool(self._foreign["step"] and self._foreign["step"]["log"])
        order = LogOrder(self._lengths.found(), list(self._lines), self._is_cut, self._log_metrics)
        return ProgramPosition(
            list(self._history),
            dict(self.metrics),
            dict(self._measured),
            dict(self._values),
            order if is_in_log else LogOrder(),
        )

    def rest(self, seconds: float) -> None:
        """Wait, and see meanwhile how long the log is."""
        if self.watch and self._foreign["metrics"]:
            self._lengths.watch(seconds)
        else:
            time.sleep(seconds)

    def read(self, send: Callable[[Message], None], *, is_last: bool = False) -> None:
        """Read what is new. In the main thread. Args: is_last: the program has ended."""
        began_ns = time.time_ns()  # not after it: what the program wrote meanwhile may be of later steps
        step_before = self.known_step
        reading = self._output.read(is_last=is_last)
        if reading.step is not None and reading.step != self.step:
            self._take_step(reading.step, began_ns)
        for line in reading.lines:
            self._take_line(line)
        self._steps_total = reading.steps_total or self._steps_total
        for name, value, step in reading.values:
            self._take_metric(name, value, step)
            self._metric_log.add(name, value, Mark(step_before if step is None else step, 0, False))
        for what in reading.problems:
            send(JournalEntry(self._launch.attempt, EventKind.FOREIGN_NOTE, {"what": what}))
        if self.watch and self.watch.step != self._cut_step:  # no mean of a metric spans a saved step
            self._cut_step = self.watch.step
            self._metric_log.cut()

    def _take_line(self, line: LogLine) -> None:
        newest = self._lines[-1] if self._lines else None
        if newest and line.end < newest.end:  # the beginning of the log was cut off
            self._lines.clear()
            self._is_cut = True
        line = line._replace(at_ns=self._lengths.since(line.end) or line.at_ns)
        if line.metrics or newest is None or line.step != newest.step:
            self._is_cut |= len(self._lines) == MAX_LINES
            self._lines.append(line)

    def _take_metric(self, name: str, value: float, step: int | None) -> None:
        self.metrics[name] = value
        if step is None:
            self._measured.pop(name, None)
            return
        self._measured[name] = step
        self._values[step] = {**self._values.pop(step, {}), name: value}  # replaced: another thread may read the former
        if len(self._values) > HISTORY:
            del self._values[next(iter(self._values))]

    def _take_step(self, step: int, read_ns: int) -> None:
        now_s = boottime_s()
        gap_s = now_s - self._stepped_s
        if self.step is not None:
            self._longest["step"] = max(self._longest.get("step", 0.0), gap_s)
            if step > self.step:
                each_s = gap_s / (step - self.step)
                self._step_s = (1 - RECENT) * self._step_s + RECENT * each_s if self._step_s else each_s
        if (
            self.step is not None and step < self.step
        ):  # it counts anew: what comes at the steps above is measured anew, too
            self._values = {at: values for at, values in self._values.items() if at <= step}
            self._measured = {name: at for name, at in self._measured.items() if at <= step}
        self.step, self._stepped_s = step, now_s
        self._history.append((read_ns, step))

    def note_processor_time(self, ticks: int) -> None:
        """Args: ticks: that all its processes have used."""
        if ticks != self._ticks:
            self._ticks, self._moved_s = ticks, boottime_s()

    def close(self) -> None:
        """Complete the records of its metrics."""
        self._metric_log.close()

    # Messages

    def hello(self) -> Hello:
        """See SupervisorLink."""
        stop_s = self._foreign["lead_s"] + (self.watch.copy_s if self.watch else 0.0)
        return Hello(self._launch.attempt, 0, os.getpid(), self.known_step, 0, ready=self.is_ready, stop_s=stop_s)

    def messages(self) -> Iterator[Message]:
        """What is sent about once a second."""
        attempt, now_s = self._launch.attempt, boottime_s()
        # A program whose steps are not read is nowhere that has a time-out (core/session/hang_detection.py).
        where = "end" if not self._foreign["step"] else "first_step" if self.step is None else "step"
        where = where if self.is_ready else "start"
        yield RankProgress(attempt, 0, where, now_s - self._stepped_s, now_s - self._moved_s, dict(self._longest))
        yield Heartbeat(
            attempt,
            0,
            self.known_step,
            0,
            gap_s=self._step_s,
            step_s=self._step_s,
            steps_total=self._steps_total,
            metrics=dict(self.metrics),
        )
