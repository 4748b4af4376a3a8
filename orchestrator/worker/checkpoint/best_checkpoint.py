"""The plan's `keep.best` in a training: which report has the state saved, and at which step.

A checkpoint is the best only by a value that was measured on its own weights. So the state is saved at the very step of the report,
before a further step changes it. The board's requests cannot do that, because they take effect two steps later. Weights are
measured in two places, and each has its own agreement:

- Between two epochs (an evaluation after the last step, or before the first). All ranks reach this place, whichever of them
  evaluates and reports. So they vote here: once at an epoch's end and once before its first step, and nowhere else.
- Within an epoch, right after the optimizer's step. A vote at each step would make each rank wait for the slowest at each
  step, for a report that almost never comes. So a rank that has reported compares with the others at the step's boundary, and
  one that has not
  passes: it writes one word of shared memory and does not wait. The state is saved if all ranks have reported. What one rank alone
  reports here cannot be saved, because the others may be a step further.

Rank 0 decides: the checkpoint holds its metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kgorch.checkpoint.folder import read_checkpoint, write_manifest
from kgorch.checkpoint.manifest import checkpoint_folder_name
from kgorch.core.codes import EventKind
from kgorch.errors import CheckpointBroken, CheckpointUnreadable
from kgorch.protocol.launch_spec import LaunchSpec
from kgorch.protocol.messages import JournalEntry
from kgorch.protocol.snapshot_messages import CheckpointWritten
from kgorch.worker.checkpoint.snapshot_writer import SnapshotWriter, is_on_disk
from kgorch.worker.ranks.consensus_board import SAVE, SLOT, STOP, Board
from kgorch.worker.telemetry.reported_metrics import ReportedMetrics

SERIES = 100
"""Steps between two looks at a metric that is reported at every step, such as a training loss: a look waits for the other ranks and
for the device."""

SHARE, FREE_S = 0.05, 10.0
"""Budget of saves within epochs: a share of the training's time, plus seconds. A metric that is reported every few steps improves
most times at first."""


class BestCheckpoint:
    """The best value so far, and the decision to save.

    Args:
        tell: sends a message to the supervisor.

    Attributes:
        metric: name of the plan's metric.
    """

    def __init__(
        self, launch: LaunchSpec, rank: int, board: Board, saver: SnapshotWriter, metrics: ReportedMetrics,
        tell: Callable[[JournalEntry | CheckpointWritten], None],
    ) -> None:  # fmt: skip
        assert launch.best
        self._launch, self._rank, self._board, self._saver, self._metrics = launch, rank, board, saver, metrics
        self._tell = tell
        self.metric = str(launch.best["metric"])
        self._sign = 1.0 if launch.best["highest"] else -1.0
        self._value: float | None = launch.best["value"]
        self._before: float | None = self._value  # the best value whose checkpoint is on disk for certain
        self._at: int | None = None  # the step of the save that set the value
        self._reported = self._last = -1  # steps of the newest report and of the one before it
        self._is_alone = self._has_missed = False
        self._began_s, self._spent_s = time.monotonic(), 0.0

    def note_report(self, step: int) -> None:
        """Record that the metric was reported within a step, measured on the weights after `step` steps."""
        if step != self._reported:
            self._last, self._reported = self._reported, step

    def between_epochs(self, step: int, saved_at: int | None) -> int:
        """Vote between two epochs on what all ranks do now.

        Args:
            saved_at: the step that was saved last.

        Returns:
            SAVE with the SLOT to fill, and a STOP that is pending; almost always 0.

        Raises:
            PeersLost: a rank has died.
        """
        return self._board.vote_everywhere(self._decide(step, saved_at))

    def miss(self, step: int) -> None:
        """Tell, once, that the best weights cannot be saved: gradients are summed over the end of the epoch."""
        if self._rank != 0 or self._has_missed:
            return
        self._metrics.collect(wait=True)
        if (value := self._measured_at(step)) is not None and self._is_better(value):
            self._has_missed = True
            why = (
                "gradients of the epoch's last batches wait for their optimizer, and a checkpoint holds none: step the"
                " optimizer after the last batch, too, or evaluate right after a step"
            )
            self._tell(JournalEntry(self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": why}))

    def after_step(self, step: int, saved_at: int | None) -> int:
        """The same at the boundary after a step, where only the ranks that have reported wait. Raises: PeersLost.

        Over several nodes nothing is saved here: the ranks would wait for the network at each report.
        """
        if self._rank == 0:
            self._tell_of_late(step - 1)
        if self._board.spans_nodes:
            return 0
        in_series = self._last == step - 1 and step % SERIES
        if self._reported != step or in_series or self._is_alone:
            self._board.pass_step(step)
            return 0
        looked_s = time.monotonic()
        in_budget = self._spent_s <= SHARE * (looked_s - self._began_s) + FREE_S
        flag = self._decide(step, saved_at) if in_budget else 0
        self._spent_s += time.monotonic() - looked_s  # a look may wait for the device and for a save
        agreed = self._board.compare(step, flag)
        if agreed is None:
            self._is_alone = True
            why = (
                f"{self.metric} was reported on some ranks only, in the midst of an epoch; report it between epochs, or on all"
                " ranks right after the optimizer's step"
            )
            self._tell(JournalEntry(self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": why}))
        return agreed or 0

    def _tell_of_late(self, step: int) -> None:
        """Tell, once, of a better value that came after the boundary of the step that it was measured on, in no vote."""
        if self._has_missed or step in (self._reported, self._at) or (value := self._measured_at(step)) is None:
            return
        if self._is_better(value):
            self._has_missed = True
            why = (
                f"{self.metric} was reported after the end of its step, where this loop saves nothing: evaluate and report in the"
                " loop over the batches, right after the optimizer's step, on all ranks"
            )
            self._tell(JournalEntry(self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": why}))

    def add_cost(self, seconds: float) -> None:
        """Count a save within an epoch, which has held up the training, against the budget."""
        self._spent_s += seconds

    def record_save(self, step: int) -> None:
        """A save of this step with the current metrics is on its way to disk."""
        if (value := self._measured_at(step)) is not None and self._is_better(value):
            self._before, self._value, self._at = self._reached(), value, step

    def _decide(self, step: int, saved_at: int | None) -> int:
        if self._rank != 0:
            return 0
        self._metrics.collect(wait=True)
        value = self._measured_at(step)
        if value is None or not self._is_better(value):
            return 0
        self._saver.wait()  # so that no buffer is being written, and a save of this step is known
        if saved_at == step and is_on_disk(self._launch, step, final=False):
            self._label(step)
            return 0
        stop = STOP if self._board.stop_asked else 0  # then the state that is saved now is the last one
        return SAVE | stop | (SLOT if self._saver.own_slot() else 0)

    def _measured_at(self, step: int) -> float | None:
        if self._metrics.measured.get(self.metric) != step:
            return None
        value = float(self._metrics.values[self.metric])
        return value if math.isfinite(value) else None

    def _is_better(self, value: float) -> bool:
        """Strictly better: of equal values the first one stays."""
        best = self._reached()
        return best is None or self._sign * value > self._sign * best

    def _reached(self) -> float | None:
        """The best value that has a checkpoint; the one before it if its save has failed since."""
        if self._at in self._saver.failed_steps and not is_on_disk(self._launch, self._at, final=False):
            return self._before
        return self._value

    def _label(self, step: int) -> None:
        """Add the metrics to the manifest of a step that was saved before it was measured; its files stay as they are."""
        folder = Path(self._launch.checkpoints, checkpoint_folder_name(step, final=False))
        try:
            manifest = read_checkpoint(folder)
            write_manifest(folder, replace(manifest, metrics=self._metrics.values, measured=self._metrics.measured))
        except (OSError, CheckpointBroken, CheckpointUnreadable) as error:
            self._tell(
                JournalEntry(
                    self._launch.attempt, EventKind.BEST_NOT_SAVED, {"step": str(step), "why": str(error)[:500]}
                )
            )
            return
        self.record_save(step)
        self._tell(CheckpointWritten(self._launch.attempt, str(folder), step, manifest.total_bytes, 0.0, 0.0))
