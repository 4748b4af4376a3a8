"""When to take a rung before memory runs out, and when to climb back, decided from samples about once a second.

Down: the peak since the last sample stays above `HIGH`, or the allocator had to flush its cache and retry again and again
(`num_alloc_retries`), which costs more than a smaller microbatch. Up: there was room for long. A rung back up may double the
activations, so it is taken only below `LOW`. What was climbed to twice and came down again is not tried a third time; the tries
are counted from the rows of the run on this device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

HIGH, LOW = 0.96, 0.45
"""Shares of the memory. Twice `LOW` is below `HIGH`, because a climb may double the activations."""

SAMPLES_ABOVE_HIGH = 3
"""Samples in a row above `HIGH` before a rung is taken: a single one may be a passing peak."""

RETRIES, RETRIES_WITHIN_S = 3, 60.0
"""Samples within a minute that showed allocator retries before a rung is taken."""

SETTLE_S = 20.0
"""Seconds after a change before the next one is considered."""

CLIMB_AFTER_S = 600.0
"""Default of `[memory] climb`: how long there must be room."""

TRIES = 2
"""Climbs to the same rung that came down again, after which it is not tried any more."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory at one moment.

    Attributes:
        used_share: of the fullest device, 0 to 1; None where it was not measured.
        retries: of the allocators of all ranks, since their start; None where it was not measured.
    """

    used_share: float | None
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class PressureState:
    """What is remembered from sample to sample. Instants in seconds.

    Attributes:
        changed_s: when a rung was last taken or undone, or training began.
        roomy_s: since when there has been room; None while there is none.
        full: samples above `HIGH` in a row.
        retries: of the newest sample that had any.
        retried_s: when the allocator retried within the last minute.
    """

    changed_s: float
    roomy_s: float | None = None
    full: int = 0
    retries: int | None = None
    retried_s: tuple[float, ...] = ()

    def changed(self, now_s: float) -> PressureState:
        """After a change of settings: all evidence is of the settings before it."""
        return PressureState(now_s, retries=self.retries)


def decide(
    state: PressureState, sample: MemorySample, now_s: float, *, climb_after_s: float | None, tries: int
) -> tuple[PressureState, str]:
    """The state after a sample, and the order for the ranks: "down", "up" or "".

    Args:
        climb_after_s: how long there must be room; None for never.
        tries: climbs to the rung above that came down again.
    """
    if sample.retries is not None:
        has_retried = state.retries is not None and sample.retries > state.retries
        recent = tuple(at_s for at_s in state.retried_s if now_s - at_s < RETRIES_WITHIN_S)
        state = replace(state, retries=sample.retries, retried_s=(*recent, now_s) if has_retried else recent)
    if sample.used_share is None and not state.retried_s:
        return state, ""
    used_share = sample.used_share or 0.0
    is_roomy = sample.used_share is not None and used_share <= LOW
    state = replace(
        state,
        full=state.full + 1 if used_share >= HIGH else 0,
        roomy_s=(now_s if state.roomy_s is None else state.roomy_s) if is_roomy else None,
    )
    if now_s - state.changed_s < SETTLE_S:
        return state, ""
    if state.full >= SAMPLES_ABOVE_HIGH or len(state.retried_s) >= RETRIES:
        return state.changed(now_s), "down"
    has_room = state.roomy_s is not None and climb_after_s is not None and now_s - state.roomy_s >= climb_after_s
    if has_room and tries < TRIES:
        return state.changed(now_s), "up"
    return state, ""


def memory_use(
    values: Mapping[str, float], *, device: str, gpus: Sequence[int | None], nodes: Sequence[int] = ()
) -> MemorySample:
    """The memory that a telemetry sample shows.

    On a GPU: the recent peaks of its ranks, and what other processes hold there. On the CPU: what the ranks hold of the host's
    memory. Other people's GPUs and the page cache do not count: they made a healthy run take rungs.

    NVML's total is used where it is available, because what others hold (NVML's figure, too) contains what the driver reserves
    for itself: some 265 of a T4's 15360 MiB. PyTorch's total is without that, and a training that fits would seem to fill it.

    Args:
        values: of one sample, by the names of orchestrator/hardware/telemetry.py.
        device: "cpu" or "cuda".
        gpus: NVML's index of each rank's GPU; None where it is not available. Ranks of the same GPU share it.
        nodes: the node of each rank, whose memory it has; by default all are on this one, node 0.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        if values.get(f"rank{rank}.total") and f"rank{rank}.peak" in values:
            # Without an index the rank counts as alone on its GPU. NVML's indices are never negative.
            ranks_of.setdefault(-1 - rank if gpu is None else gpu, []).append(rank)
    shares = []
    for index, members in ranks_of.items():
        total = values.get(f"gpu{index}.mem_total") or values[f"rank{members[0]}.total"]
        peak = sum(values[f"rank{rank}.peak"] for rank in members)
        reserved = sum(values.get(f"rank{rank}.reserved", 0.0) for rank in members)
        others = max(0.0, values.get(f"gpu{index}.mem_used", 0.0) - reserved)
        shares.append((peak + others) / total)
    ranks = range(len(gpus))
    if device == "cpu" and not shares:
        taken: dict[str, float] = {}
        for rank, node in zip(ranks, nodes or [0] * len(ranks), strict=True):
            host = f"node{node}.host.mem_total" if node else "host.mem_total"
            taken[host] = taken.get(host, 0.0) + values.get(f"rank{rank}.rss", 0.0)
        shares = [used / values[host] for host, used in taken.items() if values.get(host)]
    retries = [int(count) for rank in ranks if (count := values.get(f"rank{rank}.alloc_retries")) is not None]
    return MemorySample(max(shares, default=None), sum(retries) if retries else None)
