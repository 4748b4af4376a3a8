"""What a plan will cost, from what a probe of each of its stages measured: time, sessions, hours of quota, disk.

An epoch of a stage is its steps, their waits for batches, and the evaluation after it. The first epoch of a session reads data
that is not in the page cache. The seconds of all stages are laid into sessions by core/forecast/eta.py, with a tenth of a second
of training in place of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from kgorch.core.forecast import eta
from kgorch.core.forecast.eta import EtaRange, SessionModel, TrainingSpan

UNITS_PER_S = 10
"""Steps of the forecast in a second of training. Whole seconds would round a demo of a few seconds away."""


class Loop(NamedTuple):
    """One `session.epochs` of a stage.

    Attributes:
        epochs: how many; a fraction where part of one is done.
        batches: of an epoch.
    """

    epochs: float
    batches: int


class StageMeasurement(NamedTuple):
    """What the probe of a stage measured, in seconds.

    Attributes:
        step_s: an optimizer step.
        wait_s: wait for a batch that is in the page cache.
        cold_step_s: the first step.
        cold_wait_s: wait for a batch that is read for the first time.
        startup_s: from the launch to the first step.
        evaluation_s: after an epoch.
        end_s: after the last epoch.
        save_s: a save with all that waits for it.
        state_bytes: size of a checkpoint.
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
        """From the first step to the last byte of the final checkpoint, in one session without a time limit."""
        loops = sum(
            loop.epochs * (loop.batches * (self.step_s + self.wait_s) + self.evaluation_s) for loop in self.loops
        )
        return loops + self.end_s + self.save_s + (self.first_epoch_s - self.epoch_s if self.loops else 0.0)


class ResumePosition(NamedTuple):
    """Where a run continues.

    Attributes:
        stage, loop, epoch, batch, step: position of the checkpoint; zeros and "" without one.
        finished: names of the stages that are finished.
    """

    stage: str = ""
    loop: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    finished: frozenset[str] = frozenset()


def remaining_stages(stages: Sequence[StageMeasurement], position: ResumePosition) -> list[StageMeasurement]:
    """The stages that are still to do, that of the checkpoint without the epochs that it has done."""
    pending = [stage for stage in stages if stage.stage not in position.finished]
    return [_remainder(stage, position) if stage.stage == position.stage else stage for stage in pending]


def _remainder(stage: StageMeasurement, position: ResumePosition) -> StageMeasurement:
    loops = list(stage.loops[position.loop :])
    if loops:
        epochs_done = position.epoch + (position.batch / loops[0].batches if loops[0].batches else 0.0)
        # A changed plan may have fewer epochs now than the checkpoint has done.
        loops[0] = loops[0]._replace(epochs=max(0.0, loops[0].epochs - epochs_done))
    return stage._replace(loops=tuple(loop for loop in loops if loop.epochs))


def disk_bytes(stages: Sequence[StageMeasurement], checkpoints: int) -> int:
    """Bytes of the checkpoints of all stages, where so many of each stage are retained."""
    return sum(checkpoints * stage.state_bytes for stage in stages)


class CostEstimate(NamedTuple):
    """What the remaining stages cost.

    Attributes:
        training_s: seconds of all stages, without what further sessions add.
        end: when they are done, and in how many sessions.
        sessions: in the usual case; None where no end can be computed.
        epochs_a_session: of the longest stage; None without a time limit or without epochs.
        quota_s: pool seconds in the usual case; None where no end can be computed.
    """

    training_s: float
    end: EtaRange
    sessions: int | None
    epochs_a_session: float | None
    quota_s: float | None


def estimate_cost(
    stages: Sequence[StageMeasurement],
    now: datetime,
    model: SessionModel,
    *,
    factor: float = 1.0,
    position: ResumePosition | None = None,
) -> CostEstimate:
    """Lay what is left of a plan into sessions.

    Args:
        stages: all of the plan.
        model: of a session, without `startup_s` and `cold_s`, which follow from the stages.
        factor: pool seconds that a second of a session costs.
        position: where the run continues; None where it begins.
    """
    if position:
        stages = remaining_stages(stages, position)
    # Every session launches a stage and reads cold data at its start. Which stage it will be is not known: the worst is assumed.
    startup_s = max((stage.startup_s for stage in stages), default=0.0)
    cold_s = max((stage.first_epoch_s - stage.epoch_s for stage in stages), default=0.0)
    # The launches of the other stages come on top, once each.
    launches_s = sum(stage.startup_s for stage in stages) - startup_s
    work_s = sum(stage.training_s for stage in stages) + launches_s
    warm_s = max(0.01, work_s - cold_s)  # the model adds the cold epoch to each session, to the first one, too
    model = model._replace(startup_s=startup_s, cold_s=cold_s)

    units = max(1, math.ceil(warm_s * UNITS_PER_S))
    step_time = eta.step_time([TrainingSpan(units, warm_s)], steps_left=units)
    end = eta.estimate_end(units, step_time, now, None, model) if step_time else EtaRange(None, None, None)
    sessions = end.usual.sessions if end.usual else None
    quota_s = None
    if sessions is not None:
        # The last session ends with its work; the others end one save lead before their time limit, which is charged, too.
        quota_s = factor * (warm_s + sessions * (startup_s + cold_s) + max(0, sessions - 1) * model.ending_s)
    return CostEstimate(work_s, end, sessions, _epochs_a_session(stages, model), quota_s)


def _epochs_a_session(stages: Sequence[StageMeasurement], model: SessionModel) -> float | None:
    """How many epochs of the longest stage a session holds; None without a time limit or without epochs."""
    longest = max(stages, key=lambda stage: stage.training_s, default=None)
    if model.length_s is None or not longest or not longest.loops or longest.epoch_s <= 0:
        return None
    return max(0.0, (model.length_s - model.startup_s - model.cold_s - model.ending_s) / longest.epoch_s)
