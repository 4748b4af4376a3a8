"""Which checkpoints are retained and which are deleted. The newest verified one, each stage's newest final one and those
that a user has pinned always stay.

The best checkpoint is the best of those whose own weights were measured: a metric that was reported earlier says nothing about
weights that were trained on since. Of equal ones the first wins, which is trained least; values that are not finite never win. A
checkpoint of an older kgorch, which did not record the step of a measurement, competes only while its stage has none that was
measured. Else such a run would have no best one before its next evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RetentionCandidate:
    """A checkpoint as retention sees it.

    Attributes:
        key: what `to_drop` returns.
        order: position in time.
        verified: it was read back.
        number: counts the checkpoints of its stage from 0, deleted ones included.
        final: the stage ended with it.
        metrics: newest values by name.
        measured: by metric, the step of the weights on which it was measured.
        pinned: a user keeps it.
    """

    key: str
    stage: str
    step: int
    bytes: int
    order: float
    verified: bool
    number: int = 0
    final: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Which checkpoints of each stage a plan retains.

    Attributes:
        last: the newest n.
        every: each k-th one; None for none.
        best: metric, and whether its highest value is the best; None for none.
        disk_bytes: limit of all stages together, for which even the best are deleted, last of all; None for none.
        room_bytes: limit beyond which no next checkpoint finds room on the disk. For it each k-th and the best are not deleted,
            and the last but one only where that makes enough room. None for none.
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, bool] | None = None
    disk_bytes: int | None = None
    room_bytes: int | None = None


def to_drop(checkpoints: Sequence[RetentionCandidate], rule: RetentionRule) -> tuple[str, ...]:
    """Keys of the checkpoints to delete, oldest first.

    An unverified checkpoint is neither deleted nor does it replace a verified one: it may be the newest in a moment, or broken.
    """
    verified = sorted((item for item in checkpoints if item.verified), key=lambda item: item.order)
    if not verified:
        return ()
    # An extended stage has an older final checkpoint, too: the newest one wins.
    finals = {item.stage: item.key for item in verified if item.final}
    permanent = {verified[-1].key, *finals.values(), *(item.key for item in verified if item.pinned)}
    wanted, best, each = set(permanent), set[str](), set[str]()
    for stage in {item.stage for item in verified}:
        of_stage = [item for item in verified if item.stage == stage]
        if rule.best and (best_one := best_of(of_stage, *rule.best)):
            best.add(best_one.key)
        each |= {item.key for item in of_stage if rule.every and item.number % rule.every == rule.every - 1}
        wanted |= {item.key for item in of_stage[-max(rule.last, 1) :]} | best | each
    spare = wanted - best - each - permanent
    last_two = {item.key for item in verified[-2:]}
    wanted -= _beyond(verified, wanted, spare - last_two, rule.room_bytes)
    # two that take most of the disk would keep every further one from it; files of others that fill it cost only older ones
    if rule.room_bytes is not None and _size(verified, wanted - (spare & last_two)) <= rule.room_bytes:
        wanted -= _beyond(verified, wanted, spare & last_two, rule.room_bytes)
    wanted -= _beyond(verified, wanted, wanted - permanent - best, rule.disk_bytes)
    wanted -= _beyond(verified, wanted, wanted - permanent, rule.disk_bytes)
    return tuple(item.key for item in verified if item.key not in wanted)


def _size(checkpoints: Sequence[RetentionCandidate], keys: set[str]) -> int:
    return sum(item.bytes for item in checkpoints if item.key in keys)


def best_of(of_stage: Sequence[RetentionCandidate], metric: str, highest: bool) -> RetentionCandidate | None:
    """The best of a stage's verified checkpoints; None when none was measured."""
    rated = [item for item in of_stage if math.isfinite(item.metrics.get(metric, math.nan))]
    exact = [item for item in rated if item.measured.get(metric) == item.step]
    candidates = exact or [item for item in rated if metric not in item.measured]
    return max(candidates, key=lambda item: (item.metrics[metric] * (1 if highest else -1), -item.order), default=None)


def _beyond(
    verified: Sequence[RetentionCandidate], wanted: set[str], spare: set[str], limit_bytes: int | None
) -> set[str]:
    """Of `spare` the oldest ones, until the rest fits into the limit; all of them where that is not enough."""
    used, excess = _size(verified, wanted), set[str]()
    for item in verified:
        if limit_bytes is None or used <= limit_bytes:
            break
        if item.key in spare:
            excess.add(item.key)
            used -= item.bytes
    return excess
