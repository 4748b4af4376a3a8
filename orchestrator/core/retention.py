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

    All stages together stay within `disk_bytes`; as far as the last two, each k-th and the best allow, within `room_bytes`,
    so that the next one finds room on the disk.
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
    sacred = {verified[-1].key} | {item.key for item in verified if item.final}
    wanted, best = set(sacred), set[str]()
    for stage in {item.stage for item in verified}:
        of_stage = [item for item in verified if item.stage == stage]
        best |= _best(of_stage, rule)
        best |= {item.key for item in of_stage if rule.every and item.number % rule.every == rule.every - 1}
        wanted |= {item.key for item in of_stage[-max(rule.last, 1) :]} | best
    spare = {item.key for item in verified[:-2]} & wanted - best - sacred  # what others' files on the disk may cost
    wanted -= _beyond(verified, wanted, spare, rule.room_bytes)
    wanted -= _beyond(verified, wanted, wanted - sacred, rule.disk_bytes)
    return tuple(item.key for item in verified if item.key not in wanted)


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


def _best(of_stage: Sequence[Kept], rule: Rule) -> set[str]:
    if rule.best is None:
        return set()
    metric, highest = rule.best
    rated = [item for item in of_stage if math.isfinite(item.metrics.get(metric, math.nan))]
    best = max(rated, key=lambda item: (item.metrics[metric] * (1 if highest else -1), item.order), default=None)
    return {best.key} if best else set()
