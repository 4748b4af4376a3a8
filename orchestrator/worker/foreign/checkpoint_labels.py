"""The metrics that were measured on the weights of a foreign program's checkpoints, in the manifests of their copies.

A checkpoint is the best one only by a value that was printed at its own step: before the save, or after the copy, as where the
evaluation follows the save. A program may print a value again and again while it measures: the last one at a step counts, once the
log has left the step. So a label is written once, for the supervisor verifies the whole checkpoint at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kgorch.checkpoint.folder import read_manifest, write_manifest
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import Message
from kgorch.protocol.snapshot_messages import CheckpointWritten


class _Copy(NamedTuple):
    folder: Path
    measured: Mapping[str, float]
    since_ns: int


def has_left(history: Sequence[tuple[int, int]], step: int) -> bool:
    """Whether the log has gone on from a step. Args: history: of ProgramPosition."""
    return bool(history) and history[-1][1] != step


class CheckpointLabels:
    """Of the copies that one start of a program has made, and of the one that it was handed.

    Args:
        send: hands a message to the supervisor.
    """

    def __init__(self, launch: LaunchSpec, send: Callable[[Message], None]) -> None:
        self._launch, self._send = launch, send
        self._copies: dict[int, _Copy] = {}

    def add(self, step: int, folder: Path, measured: Mapping[str, float], since_ns: int) -> None:
        """A copy of that step exists.

        Args:
            measured: what its manifest says was measured on its weights, by name.
            since_ns: Unix time at which the program was at this step, or beyond it.
        """
        self._copies[step] = _Copy(folder, measured, since_ns)

    def update(
        self, history: Sequence[tuple[int, int]], values: Mapping[int, Mapping[str, float]], *, is_last: bool = False
    ) -> None:
        """Write what has been measured since into the manifests; the other files stay as they are.

        What cannot be written now is written at the next call.

        Args:
            history, values: of ProgramPosition.
            is_last: the program has ended, and prints no more at the step where its log is.
        """
        for step, copy in list(self._copies.items()):
            measured = {**copy.measured, **values.get(step, {})}
            if measured == copy.measured or not (is_last or has_left(history, step)):
                continue
            if any(at_ns > copy.since_ns and logged < step for at_ns, logged in history):
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
