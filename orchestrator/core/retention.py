"""Which checkpoints stay and which may go. The newest verified one always stays, and so does each stage's newest final one.

The best is the best of those whose weights were measured: a figure that was reported last says nothing of weights that were
trained on since. Of equals the first wins, which is the least trained; what is no number, or infinite, never does. A checkpoint
of a kgorch that did not keep the step of a measurement competes only while its stage has none that was measured: such a run
would have no best at all otherwise, and from the first evaluation on it has a true one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint as retention sees it.

    `order` is its place in time; `number` counts those of its stage from 0, dropped ones too. `measured`: the step on whose weights
    each of its metrics was measured.
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


@dataclass(frozen=True, slots=True)
class Rule:
    """What a plan wants kept of each stage: the last n, each k-th (`every`), and the best by a metric (`("dice", True)` for
    the highest).

    All stages together stay within `disk_bytes`, for which the best go last; as far as the last two, each k-th and the best allow,
    within `room_bytes`, so that the next one finds room on the disk.
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, bool] | None = None
    disk_bytes: int | None = None
    room_bytes: int | None = None


def to_drop(checkpoints: Sequence[Kept], rule: Rule) -> tuple[str, ...]:
    """Keys of the checkpoints that may go, oldest first.

    Nothing goes that is not older than a verified one: an unverified checkpoint neither counts nor protects.
    """
    verified = sorted((item for item in checkpoints if item.verified), key=lambda item: item.order)
    if not verified:
        return ()
    finals = {
        item.stage: item.key for item in verified if item.final
    }  # the newest: an extended stage has an older one, too
    sacred = {verified[-1].key, *finals.values()}
    wanted, best, each = set(sacred), set[str](), set[str]()
    for stage in {item.stage for item in verified}:
        of_stage = [item for item in verified if item.stage == stage]
        if rule.best and (found := best_of(of_stage, *rule.best)):
            best.add(found.key)
        each |= {item.key for item in of_stage if rule.every and item.number % rule.every == rule.every - 1}
        wanted |= {item.key for item in of_stage[-max(rule.last, 1) :]} | best | each
    spare = {
        item.key for item in verified[:-2]
    } & wanted - best - each - sacred  # what others' files on the disk may cost
    wanted -= _beyond(verified, wanted, spare, rule.room_bytes)
    wanted -= _beyond(verified, wanted, wanted - sacred - best, rule.disk_bytes)
    wanted -= _beyond(verified, wanted, wanted - sacred, rule.disk_bytes)
    return tuple(item.key for item in verified if item.key not in wanted)


def best_of(of_stage: Sequence[Kept], metric: str, highest: bool) -> Kept | None:
    """The best of a stage's verified checkpoints; None when none was measured."""
    rated = [item for item in of_stage if math.isfinite(item.metrics.get(metric, math.nan))]
    known = [item for item in rated if item.measured.get(metric) == item.step]
    chosen = known or [item for item in rated if metric not in item.measured]
    return max(chosen, key=lambda item: (item.metrics[metric] * (1 if highest else -1), -item.order), default=None)


def _beyond(verified: Sequence[Kept], wanted: set[str], spare: set[str], limit_bytes: int | None) -> set[str]:
    """The oldest of the spare ones, until what stays fits; all of them, should that not be enough."""
    used, going = sum(item.bytes for item in verified if item.key in wanted), set[str]()
    for item in verified:
        if limit_bytes is None or used <= limit_bytes:
            break
        if item.key in spare:
            going.add(item.key)
            used -= item.bytes
    return going
