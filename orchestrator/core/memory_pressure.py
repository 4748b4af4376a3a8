"""When to go down a rung before memory runs out, and when to climb back: from what was measured about once a second.

Down: the most that was taken since the last look, against what there is, stays above `HIGH`, or the allocator had to throw
its cache away again and again (`num_alloc_retries`), which costs more than a smaller microbatch. Up: there was room for
long; the rung before took twice the activations, so only where less than `LOW` is taken. What was tried twice and came
down again is not tried a third time: the tries are counted from what is remembered of the plan on this device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

HIGH, LOW = 0.96, 0.45
LOOKS = 3
"""So many looks in a row above HIGH, for one may fall into a moment that passes."""

RETRIES = 3
"""Looks of the last minute in which the allocator had to try again."""

SETTLE_S = 20.0
"""After a change, before another is thought of."""

CLIMB_AFTER_S = 600.0
TRIES = 2


@dataclass(frozen=True, slots=True)
class Look:
    """taken: of what there is, 0 to 1, on the fullest device. retries: of the allocator, counted up since the start."""

    taken: float | None
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered from look to look.

    Attributes:
        changed_s: when a rung was last taken or undone, or training began.
        roomy_s: since when there has been room.
    """

    changed_s: float
    roomy_s: float | None = None
    full: int = 0
    retries: int | None = None
    retried_s: tuple[float, ...] = ()

    def changed(self, now_s: float) -> Watch:
        return Watch(now_s, retries=self.retries)


def look(watch: Watch, seen: Look, now_s: float, *, climb_after_s: float | None, tries: int) -> tuple[Watch, str]:
    """The watch after a look, and "down", "up" or "" for what is to be done.

    Args:
        climb_after_s: None for never. tries: how often the rung above was climbed to already.
    """
    if seen.retries is not None:
        rose = watch.retries is not None and seen.retries > watch.retries
        recent = tuple(at_s for at_s in watch.retried_s if now_s - at_s < 60.0) + ((now_s,) if rose else ())
        watch = replace(watch, retries=seen.retries, retried_s=recent)
    if seen.taken is None and not watch.retried_s:
        return watch, ""
    taken = seen.taken or 0.0
    watch = replace(
        watch,
        full=watch.full + 1 if taken >= HIGH else 0,
        roomy_s=(now_s if watch.roomy_s is None else watch.roomy_s)
        if taken <= LOW and seen.taken is not None
        else None,
    )
    if now_s - watch.changed_s < SETTLE_S:
        return watch, ""
    if watch.full >= LOOKS or len(watch.retried_s) >= RETRIES:
        return watch.changed(now_s), "down"
    has_room = watch.roomy_s is not None and climb_after_s is not None and now_s - watch.roomy_s >= climb_after_s
    if has_room and tries < TRIES:
        return watch.changed(now_s), "up"
    return watch, ""


def taken(values: Mapping[str, float], *, device: str, gpus: Sequence[int | None]) -> Look:
    """From a sample of telemetry: of each rank's GPU its own greatest need lately and what others hold there; of a training on the
    CPU what its ranks hold of the host's memory.

    A GPU's whole memory is NVML's figure where that is known: what others hold there contains what the driver reserves for itself
    (some 265 of a T4's 15360 MiB), and PyTorch's total is without that. Held against PyTorch's total a training that fits would
    seem to fill the memory.

    Args:
        gpus: NVML's index of each rank's; None where it is not known. Ranks of the same GPU share it.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if values.get(f"rank{rank}.total") and f"rank{rank}.peak" in values:
            ranks_of.setdefault(-1 - rank if gpu is None else gpu, []).append(rank)  # no GPU of NVML's is negative
    shares = []
    for index, members in ranks_of.items():
        total = values.get(f"gpu{index}.mem_total") or values[f"rank{members[0]}.total"]
        peak = sum(values[f"rank{rank}.peak"] for rank in members)
        reserved = sum(values.get(f"rank{rank}.reserved", 0.0) for rank in members)
        shares.append((peak + max(0.0, values.get(f"gpu{index}.mem_used", 0.0) - reserved)) / total)
    ranks, host = range(len(gpus)), values.get("host.mem_total")
    if device == "cpu" and host and not shares:
        shares = [sum(values.get(f"rank{rank}.rss", 0.0) for rank in ranks) / host]
    told = [int(retries) for rank in ranks if (retries := values.get(f"rank{rank}.alloc_retries")) is not None]
    return Look(max(shares, default=None), sum(told) if told else None)
