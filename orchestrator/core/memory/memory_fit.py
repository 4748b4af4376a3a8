"""Whether a training fits into memory, and if not, with which settings: computed from a few steps that were measured.

The memory of a rank grows in a line with the microbatch: weights, gradients and optimizer are its base, activations its slope.
Activation checkpointing has a line of its own. Settings that were tried count as measured; all others are read off the lines.
From the plan's settings the plan's own ladder (core/memory/memory_ladder.py) is walked down until it fits, as a run out of memory
would do it. So the verdict is what the run will do, and nothing in the plan has to be changed. Considered: a search for the
fastest settings; the table of trials is there for who wants others. What a rung that sets an argument saves was not measured:
the walk ends there and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kgorch.core.codes import Fit
from kgorch.core.memory import memory_ladder
from kgorch.core.memory.memory_ladder import MemoryFacts, Rung, Settings

MAX_SHARE = 0.96
"""Of the memory, that may be used. Above it the supervisor takes a rung before memory runs out (core/memory/memory_pressure.py)."""

CONTEXT = 512 << 20
"""Bytes that CUDA takes of a device besides PyTorch's allocator, where no device was at hand to be measured. Source: the memory
budget of the reference systems counts 0.5 GB."""


class Trial(NamedTuple):
    """One setting that was tried.

    Attributes:
        microbatch: samples.
        checkpointing: with activation checkpointing.
        held: bytes that a rank held at most.
        step_s: seconds of an optimizer step.
        ran_out: it did not fit.
    """

    microbatch: int
    checkpointing: bool
    held: int
    step_s: float
    ran_out: bool = False


class Need(NamedTuple):
    """What settings need.

    Attributes:
        held: bytes that a rank holds at most.
        step_s: seconds of an optimizer step.
        is_measured: by a trial of these settings, not read off a line.
    """

    held: int
    step_s: float
    is_measured: bool


class Verdict(NamedTuple):
    """Whether a stage fits, and how.

    Attributes:
        settings: with which it fits; None where it does not.
        need: of these settings.
        planned: need of the plan's own settings.
        rungs: of the plan's ladder that lead to the settings.
        largest: microbatch that fits, with activations as planned; 0 for none.
        why: in words.
    """

    word: Fit
    settings: Settings | None
    need: Need | None
    planned: Need
    rungs: tuple[str, ...]
    largest: int
    why: str


class MemoryLine(NamedTuple):
    """Bytes as a line over the microbatch."""

    base: float
    slope: float

    def at(self, microbatch: int) -> int:
        return round(self.base + self.slope * microbatch)


def fit_line(trials: Sequence[Trial], fixed_bytes: int) -> MemoryLine:
    """The line through at least one trial, by least squares; it never falls, because noise must not make room.

    One microbatch alone says nothing about the base: `fixed_bytes` is taken for it, and the rest for slope.
    """
    sizes, helds = [trial.microbatch for trial in trials], [trial.held for trial in trials]
    if len(set(sizes)) < 2:
        lowest = min(fixed_bytes, max(helds))
        return MemoryLine(lowest, (max(helds) - lowest) / max(sizes[0], 1))
    slope, base = statistics.linear_regression(sizes, helds)
    if slope < 0:
        return MemoryLine(max(helds), 0.0)
    return MemoryLine(base, slope)


def need(trials: Sequence[Trial], microbatch: int, checkpointing: bool, fixed_bytes: int = 0) -> Need | None:
    """What a setting needs; None where no trial with or without checkpointing, as asked, has fitted."""
    alike = [trial for trial in trials if trial.checkpointing == checkpointing and not trial.ran_out]
    if not alike:
        return None
    for trial in alike:
        if trial.microbatch == microbatch:
            return Need(trial.held, trial.step_s, is_measured=True)
    nearest = min(alike, key=lambda trial: abs(trial.microbatch - microbatch))
    return Need(fit_line(alike, fixed_bytes).at(microbatch), nearest.step_s, is_measured=False)


def judge(
    trials: Sequence[Trial], *, share: int, base: Settings, ladder: Sequence[Rung], facts: MemoryFacts, limit: int, where: str,
    fixed_bytes: int = 0,
) -> Verdict:  # fmt: skip
    """Whether a stage fits, and with which settings.

    Args:
        share: samples of a rank's share of a step.
        base: settings of the plan.
        limit: bytes that a rank may hold.
        where: whose memory that is, in words.
        fixed_bytes: that are held whatever the microbatch is: weights, gradients, optimizer.
    """

    def need_of(settings: Settings) -> Need | None:
        microbatch = min(settings.microbatch or share, share)
        return need(trials, microbatch, settings.activation_checkpointing, fixed_bytes)

    def fits(settings: Settings) -> bool:
        microbatch = min(settings.microbatch or share, share)
        # What ran out with checkpointing does so without it, too. A trial that ran out outweighs any line.
        failures = [
            trial
            for trial in trials
            if trial.ran_out and (trial.checkpointing or not settings.activation_checkpointing)
        ]
        if any(trial.microbatch <= microbatch for trial in failures):
            return False
        needed = need_of(settings)
        return needed is not None and needed.held <= MAX_SHARE * limit

    planned = need_of(base) or Need(limit, 0.0, is_measured=False)
    largest = next((size for size in range(share, 0, -1) if fits(Settings(size, base.activation_checkpointing))), 0)
    if fits(base):
        return Verdict(Fit.FITS, base, planned, planned, (), largest, f"{_percent(planned.held, limit)} of {where}")
    ran_out = any(trial.ran_out and trial.microbatch == min(base.microbatch or share, share) for trial in trials)
    as_planned = f"as planned {'more than there is' if ran_out else _percent(planned.held, limit)} of {where}"
    settings, rungs = base, list[str]()
    while step := memory_ladder.next_rung(ladder, settings, base, facts):
        rung, settings = step
        if rung.kind == "set":
            why = f"what {rung.name!r} would spare was not weighed; kgorch takes it when memory runs out"
            return Verdict(Fit.DOES_NOT_FIT, None, None, planned, (*rungs, rung.name), largest, why)
        rungs.append(rung.name)
        if fits(settings):
            needed = need_of(settings)
            assert needed is not None
            why = f"{as_planned}, so {_percent(needed.held, limit)}"
            return Verdict(Fit.FITS_WITH, settings, needed, planned, tuple(dict.fromkeys(rungs)), largest, why)
    why = f"{as_planned}, and no rung of the plan's ladder makes enough room"
    return Verdict(Fit.DOES_NOT_FIT, None, None, planned, tuple(dict.fromkeys(rungs)), largest, why)


def even_microbatch(share: int, largest: int, facts: MemoryFacts) -> int:
    """The microbatch to start with where `largest` fits: the fewest parts of a share, all of one size.

    Parts of `largest` would leave a small last one, at the memory of the largest.

    Returns:
        0 where kgorch must not choose: splitting a batch changes BatchNorm's statistics, and a batch that does not go through
        `session.backward` cannot be split.
    """
    if largest >= share or not largest:
        return largest
    return 0 if facts.batchnorm or not facts.batch or not facts.divides else -(-share // -(-share // largest))


def _percent(held: int, limit: int) -> str:
    return f"{held / max(limit, 1):.0%}"
