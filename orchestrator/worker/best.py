"""The plan's `keep.best` in a training: which report has the state saved, and at which step.

A checkpoint may call itself the best only by a figure that was measured on its own weights, so the state is saved at the very
step of the report, before a further step changes it. The board's requests cannot do that: they take effect two steps later.
There are two places where weights are measured, and each has an agreement of its own:

- Between two epochs (an evaluation after the last step, or before the first). All ranks come to the same place whoever
  evaluates and reports, so they vote there: once at an epoch's end and once before its first step, and nowhere else.
- In the midst of an epoch, right after the optimizer's step. A vote at each step would have each rank wait for the slowest at
  each step, for the sake of a report that almost never comes. So a rank that has reported compares with the others at the
  step's boundary, and one that has not passes by: it writes one word of shared memory and waits for nobody. The state is
  saved if all have reported; what one rank alone reports there cannot be saved, for the others may be a step further.

Rank 0 decides: its figures are those that the checkpoint keeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.checkpoint.folder import read_checkpoint, write_manifest
from orchestrator.checkpoint.manifest import checkpoint_folder_name
from orchestrator.core.codes import EventKind
from orchestrator.errors import CheckpointBroken, CheckpointUnreadable
from orchestrator.protocol.launch_spec import LaunchSpec
from orchestrator.protocol.messages import JournalEntry
from orchestrator.protocol.snapshot_messages import CheckpointWritten
from orchestrator.worker.board import SAVE, SLOT, STOP, Board
from orchestrator.worker.metrics import Metrics
from orchestrator.worker.save import Saver, is_on_disk

SERIES = 100
"""A figure that comes with every step, a training loss perhaps, is looked at every so many steps: looking waits for the
other ranks and for the device."""

SHARE, FREE_S = 0.05, 10.0
"""What saves of the best in the midst of epochs may take: of the training's time, and besides. A figure of every few steps
improves most times at first."""


class Best:
    """Args:
    tell: sends a word to the supervisor.
    Attributes:
    metric: its name.
    """

    def __init__(
        self, launch: LaunchSpec, rank: int, board: Board, saver: Saver, metrics: Metrics,
        tell: Callable[[JournalEntry | CheckpointWritten], None],
    ) -> None:  # fmt: skip
        assert launch.best
        self._launch, self._rank, self._board, self._saver, self._metrics = launch, rank, board, saver, metrics
        self._tell = tell
        self.metric = str(launch.best["metric"])
        self._sign = 1.0 if launch.best["highest"] else -1.0
        self._value: float | None = launch.best["value"]
        self._before: float | None = self._value  # the best that is on disk for sure
        self._at: int | None = None  # the step of the save that set the value
        self._reported = self._last = -1  # steps of the newest report and of the one before it
        self._is_alone = False
        self._began_s, self._spent_s = time.monotonic(), 0.0

    def hear(self, step: int) -> None:
        """The metric was reported within a step, of the weights after so many steps."""
        if step != self._reported:
            self._last, self._reported = self._reported, step

    def between_epochs(self, step: int, saved_at: int | None) -> int:
        """What all ranks do now: SAVE, with the SLOT that it goes to, and a STOP that was asked for; almost always 0.

        Args:
            saved_at: the step that was saved last.
        Raises: PeersLost.
        """
        return self._board.vote(self._wanted(step, saved_at))

    def after_step(self, step: int, saved_at: int | None) -> int:
        """The same at the boundary behind a step, where only those wait that have reported. Raises: PeersLost."""
        in_series = self._last == step - 1 and step % SERIES
        if self._reported != step or in_series or self._is_alone:
            self._board.pass_step(step)
            return 0
        looked_s = time.monotonic()
        in_budget = self._spent_s <= SHARE * (looked_s - self._began_s) + FREE_S
        wanted = self._wanted(step, saved_at) if in_budget else 0
        self._spent_s += time.monotonic() - looked_s  # it may wait for the device, and for a save that is being written
        agreed = self._board.compare(step, wanted)
        if agreed is None:
            self._is_alone = True
            why = f"{self.metric} was reported on some ranks only, in the midst of an epoch"
            self._tell(JournalEntry(self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": why}))
        return agreed or 0

    def spent(self, seconds: float) -> None:
        """What a save in the midst of an epoch held the training up."""
        self._spent_s += seconds

    def saved(self, step: int) -> None:
        """A save of this step is on its way to disk, with the figures as they are now."""
        if (value := self._measured_at(step)) is not None and self._is_better(value):
            self._before, self._value, self._at = self._reached(), value, step

    def _wanted(self, step: int, saved_at: int | None) -> int:
        if self._rank != 0:
            return 0
        self._metrics.collect(wait=True)
        value = self._measured_at(step)
        if value is None or not self._is_better(value):
            return 0
        self._saver.wait()  # nothing is filled that is being written, and a save of this very step is seen
        if saved_at == step and is_on_disk(self._launch, step, final=False):
            self._label(step)
            return 0
        stop = STOP if self._board.stop_asked else 0  # the state that is saved now is the last one then
        return SAVE | stop | (SLOT if self._saver.own_slot() else 0)

    def _measured_at(self, step: int) -> float | None:
        if self._metrics.measured.get(self.metric) != step:
            return None
        value = float(self._metrics.values[self.metric])
        return value if math.isfinite(value) else None

    def _is_better(self, value: float) -> bool:
        """Strictly: of equals the first stays."""
        best = self._reached()
        return best is None or self._sign * value > self._sign * best

    def _reached(self) -> float | None:
        """The best value that has a checkpoint; the one before where the newest save of a best has failed since."""
        if self._at is not None and self._saver.error and not is_on_disk(self._launch, self._at, final=False):
            return self._before
        return self._value

    def _label(self, step: int) -> None:
        """This step was saved before its weights were measured: its manifest learns the figures, its files stay as they are."""
        folder = Path(self._launch.checkpoints, checkpoint_folder_name(step, final=False))
        try:
            found = read_checkpoint(folder)
            write_manifest(folder, replace(found, metrics=self._metrics.values, measured=self._metrics.measured))
        except (OSError, CheckpointBroken, CheckpointUnreadable) as error:
            self._tell(
                JournalEntry(
                    self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": str(error)[:500]}
                )
            )
            return
        self.saved(step)
        self._tell(CheckpointWritten(self._launch.attempt, str(folder), step, found.total_bytes, 0.0, 0.0))
