"""What a plan will cost, from what a probe of each of its stages measured: time, sessions, hours, disk.

A stage's epoch is its steps, what they wait for their batches, and the evaluation after it; the first epoch reads what nobody
has read before. The stages' seconds are laid into sessions by core/eta.py, with a second of training in place of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from orchestrator.core import eta
from orchestrator.core.eta import Ahead, End, Hours, Stretch


class Loop(NamedTuple):
    """`epochs`: a fraction where part of one is done."""

    epochs: float
    batches: int


class Measured(NamedTuple):
    """A stage that was probed. Seconds; `step_s` and `wait_s` of a batch read before, `cold_…` of one read for the first time.

    Attributes:
        startup_s: from its launch to its first step. evaluation_s: after an epoch. end_s: after the last one.
        save_s: of a save with all that waits for it; state_bytes: what it writes.
    """

    stage: str
    loops: tuple[Loop, ...]
    step_s: float
    wait_s: float
    cold_step_s: float
    cold_wait_s: float
    startup_s: float
    evaluation_s: float
    end_s: float
    save_s: float
    state_bytes: int

    @property
    def batches(self) -> int:
        return self.loops[0].batches if self.loops else 0

    @property
    def epochs(self) -> float:
        return sum(loop.epochs for loop in self.loops)

    @property
    def epoch_s(self) -> float:
        return self.batches * (self.step_s + self.wait_s) + self.evaluation_s

    @property
    def first_epoch_s(self) -> float:
        return max(self.epoch_s, self.batches * (self.step_s + self.cold_wait_s) + self.evaluation_s)

    @property
    def training_s(self) -> float:
        """From the first step to the last byte, without walls."""
        loops = sum(
            loop.epochs * (loop.batches * (self.step_s + self.wait_s) + self.evaluation_s) for loop in self.loops
        )
        return loops + self.end_s + self.save_s + (self.first_epoch_s - self.epoch_s if self.loops else 0.0)


class Reached(NamedTuple):
    """Where a start goes on with a run.

    Attributes:
        stage, loop, epoch, batch, step: of a checkpoint (Position); empty where there is none.
        finished: names of the stages that are done.
    """

    stage: str = ""
    loop: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    finished: frozenset[str] = frozenset()


def left(stages: Sequence[Measured], reached: Reached) -> list[Measured]:
    """The stages that are still to do, that of the checkpoint as far as it is."""
    found = [stage for stage in stages if stage.stage not in reached.finished]
    return [_left_of(stage, reached) if stage.stage == reached.stage else stage for stage in found]


def _left_of(stage: Measured, at: Reached) -> Measured:
    """A plan may have fewer epochs now than the checkpoint has done; then none is left."""
    loops = list(stage.loops[at.loop :])
    if loops:
        done = at.epoch + (at.batch / loops[0].batches if loops[0].batches else 0.0)
        loops[0] = loops[0]._replace(epochs=max(0.0, loops[0].epochs - done))
    return stage._replace(loops=tuple(loop for loop in loops if loop.epochs))


class Outlay(NamedTuple):
    """Attributes:
    training_s: of all stages, without what sessions add. end: when, with how many sessions.
    epochs_a_session: of the stage that takes longest; None without walls or epochs.
    quota_s: of the pool, by the middling course. disk_bytes: that checkpoints hold at most.
    """

    training_s: float
    end: End
    sessions: int | None
    epochs_a_session: float | None
    quota_s: float | None
    disk_bytes: int


def lay_out(
    stages: Sequence[Measured],
    now: datetime,
    *,
    wall_s: float | None,
    lead_s: float,
    pause_s: float = 0.0,
    hours: Hours | None = None,
    factor: float = 1.0,
    kept: int,
    reached: Reached | None = None,
) -> Outlay:
    """Args:
    stages: all of a plan. reached: where it goes on; None where it begins.
    lead_s: before the wall, for the last save. pause_s: between two sessions.
    factor: pool seconds that a second of a session costs. kept: checkpoints of a stage that stay.
    """
    disk = sum(kept * stage.state_bytes for stage in stages)
    stages = left(stages, reached) if reached else stages
    startup_s = max((stage.startup_s for stage in stages), default=0.0)
    launches_s = sum(stage.startup_s for stage in stages) - startup_s
    work_s = sum(stage.training_s for stage in stages) + launches_s
    cold_s = max((stage.first_epoch_s - stage.epoch_s for stage in stages), default=0.0)
    warm_s = max(0.01, work_s - cold_s)  # each session pays for what is cold, the first one, too
    units = max(1, math.ceil(warm_s * 10))  # tenths of a second, so that a short demo is not rounded away
    ahead = Ahead(wall_s, startup_s, cold_s, lead_s, pause_s, hours)
    pace = eta.pace([Stretch(units, warm_s)], steps_left=units)
    end = eta.end(units, pace, now, None, ahead) if pace else End(None, None, None)
    usual = end.usual
    sessions = usual.sessions if usual else None
    longest = max(stages, key=lambda stage: stage.training_s, default=None)
    room_s = None if wall_s is None else wall_s - startup_s - cold_s - lead_s
    epochs = None
    if room_s is not None and longest and longest.loops and longest.epoch_s > 0:
        epochs = max(0.0, room_s / longest.epoch_s)
    spent_s = None
    if sessions is not None:
        spent_s = factor * (warm_s + sessions * (startup_s + cold_s) + max(0, sessions - 1) * lead_s)
    return Outlay(work_s, end, sessions, epochs, spent_s, disk)
