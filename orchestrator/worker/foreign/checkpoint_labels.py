"""The metrics that were measured on the weights of a foreign program's checkpoints, in the manifests of their copies.

A checkpoint is the best one only by a value that was printed at its own step: before the save, or after the copy, as where the
evaluation follows the save. Its own step is the number in its name, else the step that the log was at when it was written
(core/checkpoint/foreign_checkpoint.py, `measured_at`), and not that of its copy, which may be ahead. A program may print a value
again and again while it measures: the last one at a step counts, once the log has left the step. So a label is written once, for
the supervisor verifies the whole checkpoint at each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kgorch.checkpoint.folder import read_manifest, write_manifest
from kgorch.core.checkpoint import foreign_checkpoint
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Message
from kgorch.protocol.snapshot_messages import CheckpointWritten


class ProgramPosition(NamedTuple):
    """Where the program is, as far as its output says.

    Attributes:
        history: (Unix time in nanoseconds, step) of the log, as foreign_checkpoint.logged_at_most takes it.
        metrics: reported last, by name.
        measured: the step at which each of these was printed; absent where that is not known.
        values: metrics by the step at which they were printed.
        printed: by name, (time, step) of the values, as foreign_checkpoint.measured_at takes it.
    """

    history: Sequence[tuple[int, int]]
    metrics: Mapping[str, float]
    measured: Mapping[str, int] = {}
    values: Mapping[int, Mapping[str, float]] = {}
    printed: Mapping[str, Sequence[tuple[int, int]]] = {}


class Saved(NamedTuple):
    """What tells which values were measured on a checkpoint: the step of its name (None for none), and when it was written."""

    named: int | None
    newest_ns: int

    def step_of(self, name: str, position: ProgramPosition, others_ns: Collection[int], now_ns: float) -> int | None:
        """The step at which a metric is printed that is measured on it; None where that is not known, as in `measured_at`.

        Args: others_ns: when other checkpoints were written, of which one at the same step may be nearer to the value.
        """
        if self.named is not None:
            return self.named
        history, printed = position.history, position.printed.get(name, ())
        step = foreign_checkpoint.measured_at(history, printed, self.newest_ns, now_ns)
        value_ns = max((at_ns for at_ns, at in printed if at == step), default=self.newest_ns)
        before_ns = max((at_ns for at_ns in others_ns if at_ns < self.newest_ns), default=0)
        after_ns = min((at_ns for at_ns in others_ns if at_ns > self.newest_ns), default=0)
        for other_ns in (before_ns, after_ns):
            is_nearer = abs(value_ns - other_ns) < abs(value_ns - self.newest_ns)
            if is_nearer and foreign_checkpoint.measured_at(history, printed, other_ns, math.inf) == step:
                return None
        return step


class _Copy(NamedTuple):
    folder: Path
    saved: Saved
    measured: Mapping[str, float]
    since_ns: int


class CheckpointLabels:
    """Of the copies that one start of a program has made, and of the one that it was handed.

    Args:
        send: hands a message to the supervisor.
    """

    def __init__(self, launch: LaunchSpec, send: Callable[[Message], None]) -> None:
        self._launch, self._send = launch, send
        self._copies: dict[int, _Copy] = {}
        self._written_ns: set[int] = set()

    def note(self, newest_ns: int) -> None:
        """A checkpoint was written then, whether it can be copied or not."""
        self._written_ns.add(newest_ns)

    def measured(
        self, saved: Saved, position: ProgramPosition, *, has_ended: bool, is_done: bool
    ) -> dict[str, tuple[int, float]]:
        """The final values that were measured on a checkpoint, by name, with the step at which each was printed.

        Args:
            has_ended: the program prints no more at the step where its log is. is_done: it has ended by itself.
        """
        now_ns = math.inf if is_done else time.time_ns()
        found = {}
        for name in {name for values in position.values.values() for name in values}:
            step = saved.step_of(name, position, self._written_ns, now_ns)
            has_left = bool(position.history) and position.history[-1][1] != step
            if step is not None and name in position.values.get(step, {}) and (has_ended or has_left):
                found[name] = step, position.values[step][name]
        return found

    def add(self, step: int, folder: Path, saved: Saved, measured: Mapping[str, float], since_ns: int) -> None:
        """A copy exists that is called by that step.

        Args:
            measured: what its manifest says was measured on its weights, by name.
            since_ns: Unix time at which the program was at this step, or beyond it.
        """
        self._copies[step] = _Copy(folder, saved, measured, since_ns)

    def update(self, position: ProgramPosition, *, has_ended: bool = False, is_done: bool = False) -> None:
        """Write what has been measured since into the manifests; the other files stay as they are.

        What cannot be written now is written at the next call. Args: has_ended, is_done: as for `measured`.
        """
        for step, copy in list(self._copies.items()):
            if not copy.folder.exists():  # retention has deleted it
                del self._copies[step]
                continue
            found = self.measured(copy.saved, position, has_ended=has_ended, is_done=is_done)
            measured = {**copy.measured, **{name: value for name, (_, value) in found.items()}}
            if measured == copy.measured:
                continue
            own = min(at for at, _ in found.values())
            if any(at_ns > copy.since_ns and logged < own for at_ns, logged in position.history):
                del self._copies[step]  # the program has gone back: these are other weights at the same step
            elif self._write(step, copy.folder, measured):
                self._copies[step] = copy._replace(measured=measured)

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
