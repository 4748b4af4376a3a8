"""The metrics that were measured on the weights of a foreign program's checkpoints, in the manifests of their copies.

A checkpoint is the best one only by a value that was measured on it, before the save, or after the copy, as where the evaluation
follows the save: by one that was printed at the step of its name, or, where its name has none, as for a file that is written over
again and again, by the one that is nearest to it in time (core/checkpoint/measured_value.py). A program may print a value again and
again while it measures: the last one at a step counts, once the log has left the step. So a label is written once, for the
supervisor verifies the whole checkpoint at each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kgorch.checkpoint.folder import read_manifest, write_manifest
from kgorch.core.checkpoint.measured_value import Printed, measured_on
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Message
from kgorch.protocol.snapshot_messages import CheckpointWritten

SURE_NS = 2_000_000_000
"""Nanoseconds before a save at which the log must have been at a step, to count as before it: looks are a second apart."""

MOST_SAVES = 1000


class ProgramPosition(NamedTuple):
    """Where the program is, as far as its output says.

    Attributes:
        history: (time of the look, step) of each look that found another step, oldest first.
        metrics: reported last, by name.
        measured: the step at which each of these was printed; absent where that is not known.
        values: metrics by the step at which they were printed.
        printed: the same by name, with their times, oldest first.
    """

    history: Sequence[tuple[int, int]]
    metrics: Mapping[str, float]
    measured: Mapping[str, int] = {}
    values: Mapping[int, Mapping[str, float]] = {}
    printed: Mapping[str, Sequence[Printed]] = {}

    def has_left(self, step: int) -> bool:
        """Whether the log has gone on from a step."""
        return bool(self.history) and self.history[-1][1] != step


class Saved(NamedTuple):
    """When a checkpoint was written that is named by no step, and the step that the log was at for certain before."""

    at_ns: int
    logged: int | None


class _Copy(NamedTuple):
    folder: Path
    place: Saved | int
    measured: Mapping[str, float]
    since_ns: int


class CheckpointLabels:
    """Of the copies that one start of a program has made, and of the one that it was handed.

    Args:
        send: hands a message to the supervisor.
    """

    def __init__(self, launch: LaunchSpec, send: Callable[[Message], None]) -> None:
        self._launch, self._send, self._began_ns = launch, send, time.time_ns()
        self._copies: dict[int, _Copy] = {}
        self._saves = deque[int](maxlen=MOST_SAVES)

    def note_save(self, at_ns: int) -> None:
        """A checkpoint was written then, whether it is copied or not."""
        if at_ns not in self._saves:
            self._saves.append(at_ns)

    def saved(self, at_ns: int, position: ProgramPosition) -> Saved:
        """What tells which values are measured on a checkpoint that was written just now, and is named by no step."""
        before = (step for at, step in reversed(position.history) if at + SURE_NS <= at_ns)
        return Saved(at_ns, next(before, None))

    def measured(self, place: Saved | int, position: ProgramPosition, *, is_last: bool = False) -> dict[str, float]:
        """The final values that were measured on a checkpoint, by name, as far as they are known by now.

        Args:
            place: of the checkpoint in the log; the step of its name, if that has one.
            is_last: the program has ended, and prints no more at the step where its log is.
        """
        if isinstance(place, int):
            return dict(position.values.get(place, {})) if is_last or position.has_left(place) else {}
        if place.at_ns < self._began_ns:  # by an earlier start, whose log is not read
            return {}
        now_ns, saves = math.inf if is_last else time.time_ns(), list(self._saves)
        found = {
            name: measured_on(place.at_ns, saves, printed, place.logged, now_ns)
            for name, printed in position.printed.items()
        }
        return {name: item.value for name, item in found.items() if item and (is_last or position.has_left(item.step))}

    def add(self, step: int, folder: Path, place: Saved | int, measured: Mapping[str, float], since_ns: int) -> None:
        """A copy of that step exists, which may be ahead of that of the name.

        Args:
            place: see `measured`.
            measured: what its manifest says was measured on its weights, by name.
            since_ns: Unix time at which the program was at this step, or beyond it.
        """
        self._copies[step] = _Copy(folder, place, measured, since_ns)

    def update(self, position: ProgramPosition, *, is_last: bool = False) -> None:
        """Write what has been measured since into the manifests; the other files stay as they are.

        What cannot be written now is written at the next call. Args: is_last: as for `measured`.
        """
        for step, copy in list(self._copies.items()):
            place, measured = copy.place, self.measured(copy.place, position, is_last=is_last)
            # by its time a value is found once; at a step it may be printed again
            measured = {**copy.measured, **measured} if isinstance(place, int) else {**measured, **copy.measured}
            if measured == copy.measured:
                continue
            if isinstance(place, int) and any(
                at_ns > copy.since_ns and logged < place for at_ns, logged in position.history
            ):
                del self._copies[step]  # the program has gone back: these are other weights at the same step
            elif self._write(step, copy.folder, measured):
                self._copies[step] = copy._replace(measured=measured)
            elif not copy.folder.exists():  # retention has deleted it
                del self._copies[step]

    def _write(self, step: int, folder: Path, measured: Mapping[str, float]) -> bool:
        try:
            manifest = read_manifest(folder)
            steps = {**manifest.measured, **dict.fromkeys(measured, step)}
            write_manifest(folder, replace(manifest, metrics={**manifest.metrics, **measured}, measured=steps))
        except (OSError, CheckpointBroken, CheckpointUnreadable):
            return False
        # The supervisor compares the checkpoints then. It reads this one back for it, so not for other metrics.
        best = str((self._launch.best or {}).get("metric"))
        if best in measured and (manifest.measured.get(best), manifest.metrics.get(best)) != (step, measured[best]):
            self._send(CheckpointWritten(self._launch.attempt, str(folder), step, manifest.total_bytes, 0.0, 0.0))
        return True
