"""Which checkpoints stay and which may go. The newest verified one always stays, and so does each stage's final one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint as retention sees it.

    `order` is its place in time; `number` counts those of its stage from 0, dropped ones too.
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


@dataclass(frozen=True, slots=True)
class Rule:
    """What a plan wants kept of each stage: the last n, each k-th (`every`), and the best by a metric (`("dice", True)` for
    the highest).

    All stages together stay within `disk_bytes`.
    """

    last: int = 3
    every: int | None = None
    best: tuple[str, bool] | None = None
    disk_bytes: int | None = None


def to_drop(checkpoints: Sequence[Kept], rule: Rule) -> tuple[str, ...]:
    """Keys of the checkpoints that may go, oldest first.

    Nothing goes that is not older than a verified one: an unverified checkpoint neither counts nor protects.
    """
    verified = sorted((item for item in checkpoints if item.verified), key=lambda item: item.order)
    if not verified:
        return ()
    sacred = {verified[-1].key} | {item.key for item in verified if item.final}
    wanted = set(sacred)
    for stage in {item.stage for item in verified}:
        of_stage = [item for item in verified if item.stage == stage]
        wanted |= {item.key for item in of_stage[-max(rule.last, 1) :]} | _best(of_stage, rule)
        wanted |= {item.key for item in of_stage if rule.every and item.number % rule.every == rule.every - 1}
    going = [item for item in verified if item.key not in wanted]
    if rule.disk_bytes is not None:
        used = sum(item.bytes for item in verified if item.key in wanted)
        for item in verified:  # oldest first, until what stays fits; what is sacred stays whatever it takes
            if used <= rule.disk_bytes:
                break
            if item.key in wanted - sacred:
                going.append(item)
                used -= item.bytes
    return tuple(item.key for item in sorted(going, key=lambda item: item.order))


def _best(of_stage: Sequence[Kept], rule: Rule) -> set[str]:
    if rule.best is None:
        return set()
    metric, highest = rule.best
    rated = [item for item in of_stage if math.isfinite(item.metrics.get(metric, math.nan))]
    best = max(rated, key=lambda item: (item.metrics[metric] * (1 if highest else -1), item.order), default=None)
    return {best.key} if best else set()
