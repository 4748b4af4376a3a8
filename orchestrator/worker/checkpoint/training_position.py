"""Where a training is: the counters that a checkpoint holds, and the totals that status shows."""

from __future__ import annotations

from dataclasses import dataclass

from kgorch.checkpoint.manifest import Position


@dataclass(slots=True)
class TrainingPosition:
    """The counters of a stage. The training's thread writes them; the link's thread reads them.

    Attributes:
        loop: number of the script's `session.epochs` loop, from 0.
        epoch: epochs of that loop that are done.
        batch: global batches of the current epoch that are done.
        step: optimizer steps of the stage that are done.
        samples: training samples of all ranks that are done.
        steps_total: steps of the stage up to the end of the loop; 0 where the loader does not know its length.
        epochs_total: epochs of the loop.
        epochs_done: epochs of the newest loop that has ended.
    """

    loop: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    steps_total: int = 0
    epochs_total: int = 0
    epochs_done: int = 0

    def as_manifest(self) -> Position:
        """The part that a checkpoint holds."""
        return Position(self.loop, self.epoch, self.batch, self.step, self.samples)

    def restore(self, position: Position) -> None:
        """Continue from a checkpoint; the totals are set by the loop."""
        self.loop, self.epoch, self.batch = position.loop, position.epoch, position.batch
        self.step, self.samples = position.step, position.samples
