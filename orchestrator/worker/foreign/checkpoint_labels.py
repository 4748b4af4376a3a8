"""The metrics that were measured on the weights of a foreign program's checkpoints, in the manifests of their copies.

A checkpoint is the best one only by a value that was printed at its own step: before the save, or after the copy, as where the
evaluation follows the save. A program may print a value again and again while it measures: the last one at a step counts, once the
log has left the step. So a label is written once, for the supervisor verifies the whole checkpoint at each.

Its own step is what the log says of the save (core/checkpoint/log_order.py). The step of a copy differs from it where epochs are
counted from 0, or where the log has gone on before the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kgorch.checkpoint.folder import read_manifest, write_manifest
from kgorch.core.checkpoint.log_order import LogOrder, LogPlace, SaveOrder
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Message
from kgorch.protocol.snapshot_messages import CheckpointWritten


class ProgramPosition(NamedTuple):
    """Where the program is, as far as its output says.

    Attributes:
        history: (Unix time in nanoseconds, step) of each look that found another step, oldest first.
        metrics: reported last, by name.
        measured: the step at which each of these was printed; absent where that is not known.
        values: metrics by the step at which they were printed.
        order: what the log had said when; empty where it says no steps.
    """

    history: Sequence[tuple[int, int]]
    metrics: Mapping[str, float]
    measured: Mapping[str, int] = {}
    values: Mapping[int, Mapping[str, float]] = {}
    order: LogOrder = LogOrder()


class Saved(NamedTuple):
    """A checkpoint of the program.

    Attributes:
        step: of its copy.
        number: in its name; None where that is no step.
        is_next: the number is one above that of the checkpoint before.
        place: where in the log it was saved; None where that is not known.
        since_ns: Unix time at which the program was at this step, or beyond it.
    """

    step: int
    number: int | None
    is_next: bool
    place: LogPlace | None
    since_ns: int


class _Copy(NamedTuple):
    folder: Path
    saved: Saved
    measured: Mapping[str, float]


class CheckpointLabels:
    """Of the copies that one start of a program has made, and of the one that it was handed.

    Args:
        send: hands a message to the supervisor.
    """

    def __init__(self, launch: LaunchSpec, send: Callable[[Message], None]) -> None:
        self._launch, self._send = launch, send
        self._copies: dict[int, _Copy] = {}
        self._saves = SaveOrder()
        self._names_are_ahead = False

    def note(self, saved_ns: int, position: ProgramPosition) -> LogPlace | None:
        """A checkpoint was saved at that Unix time in nanoseconds; before `update`, for it may tell of earlier ones.

        Returns: where in the log; None where that is not known.
        """
        return self._saves.note(saved_ns, position.order)

    def measured(
        self, saved: Saved, position: ProgramPosition, *, is_last: bool = False, is_followed: bool = False
    ) -> dict[str, float]:
        """What was measured on a checkpoint, by name, once the program prints no more at its step.

        Args:
            is_last: the program has ended, and prints no more at the step where its log is.
            is_followed: it has saved again.
        """
        found = {}
        for name in position.metrics:
            step = self._own_step(saved, name, position)
            if step is None or name not in position.values.get(step, {}):
                continue
            has_left = bool(position.history) and position.history[-1][1] != step
            if is_last or has_left or (is_followed and saved.place and self._saves.follows(name, position.order)):
                found[name] = position.values[step][name]
        return found

    def _own_step(self, saved: Saved, metric: str, position: ProgramPosition) -> int | None:
        """The step at which its values are printed; None for none, or not yet."""
        if saved.place is None or metric not in position.order.metrics:
            return saved.step
        place, number = saved.place, saved.number
        step = self._saves.step_of(place, metric, position.order, position.values)
        if number in (None, step):
            return step
        if step is None:
            return saved.step
        # names and log may count from 0 and from 1; else the log has gone on before the save was complete, or prints not all steps
        self._names_are_ahead |= number == step + 1 and saved.is_next
        values = (line for line in position.order.lines if line.step == step and metric in line.metrics)
        is_behind = number == step - 1 and any(line.end <= place.end for line in values)
        return step if is_behind or (number == step + 1 and self._names_are_ahead) else saved.step

    def add(self, folder: Path, saved: Saved, measured: Mapping[str, float]) -> None:
        """A copy exists. Args: measured: what its manifest says was measured on its weights, by name."""
        self._copies[saved.step] = _Copy(folder, saved, measured)

    def update(self, position: ProgramPosition, *, is_last: bool = False) -> None:
        """Write what has been measured since into the manifests; the other files stay as they are.

        Called after a further save, or at the end. What cannot be written now is written at the next call.

        Args:
            is_last: see `measured`.
        """
        for step, copy in list(self._copies.items()):
            if _is_gone(copy.folder):  # retention has deleted it
                del self._copies[step]
                continue
            # what has come to be unknown stays as it was
            measured = {**copy.measured, **self.measured(copy.saved, position, is_last=is_last, is_followed=True)}
            if measured == copy.measured:
                continue
            if self._has_gone_back(copy, measured, position):
                del self._copies[step]  # these are other weights at the same step
            elif self._write(step, copy.folder, measured):
                self._copies[step] = copy._replace(measured=measured)

    def _has_gone_back(self, copy: _Copy, measured: Mapping[str, float], position: ProgramPosition) -> bool:
        """Whether the program has come to the steps of a copy's metrics, or to earlier ones, once more since."""
        steps = (self._own_step(copy.saved, name, position) for name in measured)
        own = min((step for step in steps if step is not None), default=0)
        history = position.history
        return any(
            at_ns > copy.saved.since_ns and (logged < own or (logged == own and before > own + 1))
            for (_, before), (at_ns, logged) in zip([(0, -1), *history], history, strict=False)
        )

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


def _is_gone(folder: Path) -> bool:
    try:
        folder.stat()
    except FileNotFoundError:
        return True
    except OSError:  # a disk that fails now
        pass
    return False
