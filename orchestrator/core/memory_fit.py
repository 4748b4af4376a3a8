"""Whether a training fits into memory, and if not, with which settings: from a few steps that were weighed.

What a rank holds grows in a straight line with the microbatch: weights, gradients and optimizer at its foot, activations in
its slope; dropping activations makes a line of its own. What was weighed is taken as it is, the rest read off the lines. From
the plan's settings the plan's own ladder is walked down (core/memory_ladder.py), as a run out of memory would, until it fits: so
what is foretold is what would happen. What a rung that sets an argument would spare nobody has weighed; the walk ends there,
and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.core import memory_ladder
from orchestrator.core.codes import Fit
from orchestrator.core.memory_ladder import Facts, Rung, Settings

FULL = 0.96
"""Of what there is; above it the ladder is taken before memory runs out (core/memory_pressure.py)."""

CONTEXT = 512 << 20
"""What CUDA takes of a device besides PyTorch's allocator, where no device was at hand to be asked. Source: the memory budget
of the reference systems counts 0.5 GB."""


class Trial(NamedTuple):
    """One setting that was tried: what a rank held at most, and the seconds of an optimizer step. `ran_out`: it did not fit."""

    microbatch: int
    checkpointing: bool
    held: int
    step_s: float
    ran_out: bool = False


class Need(NamedTuple):
    """`weighed`: not read off a line."""

    held: int
    step_s: float
    weighed: bool


class Verdict(NamedTuple):
    """Whether a stage fits, and how.

    Attributes:
        settings: with which it fits; need: what they take. planned: what the plan's own take.
        rungs: of the plan's ladder that lead there. why: in words.
        largest: microbatch that fits, with activations as planned; 0 for none.
    """

    word: Fit
    settings: Settings | None
    need: Need | None
    planned: Need
    rungs: tuple[str, ...]
    largest: int
    why: str


class Line(NamedTuple):
    foot: float
    slope: float

    def at(self, microbatch: int) -> int:
        return round(self.foot + self.slope * microbatch)


def line(trials: Sequence[Trial], standing: int) -> Line:
    """By least squares through at least one trial; it never falls, for noise must not make room. One trial alone tells no
    foot: what is known to be `standing` is one, and the rest is taken for slope.
    """
    sizes, helds = [trial.microbatch for trial in trials], [trial.held for trial in trials]
    if len(set(sizes)) < 2:
        known = min(standing, max(helds))
        return Line(known, (max(helds) - known) / max(sizes[0], 1))
    slope, foot = statistics.linear_regression(sizes, helds)
    if slope < 0:
        return Line(max(helds), 0.0)
    return Line(foot, slope)


def need(trials: Sequence[Trial], microbatch: int, checkpointing: bool, standing: int = 0) -> Need | None:
    """None where nothing of that kind was tried."""
    alike = [trial for trial in trials if trial.checkpointing == checkpointing and not trial.ran_out]
    if not alike:
        return None
    for trial in alike:
        if trial.microbatch == microbatch:
            return Need(trial.held, trial.step_s, weighed=True)
    nearest = min(alike, key=lambda trial: abs(trial.microbatch - microbatch))
    return Need(line(alike, standing).at(microbatch), nearest.step_s, weighed=False)


def judge(
    trials: Sequence[Trial], *, share: int, base: Settings, ladder: Sequence[Rung], facts: Facts, limit: int, where: str,
    standing: int = 0,
) -> Verdict:  # fmt: skip
    """Args:
    share: samples of a rank's share of a step. base: as the plan begins.
    limit: bytes that a rank may hold. where: whose they are, in words.
    standing: bytes that are held whatever the microbatch is: weights, gradients, optimizer.
    """

    def needed(settings: Settings) -> Need | None:
        microbatch = min(settings.microbatch or share, share)
        return need(trials, microbatch, settings.activation_checkpointing, standing)

    def fits(settings: Settings) -> bool:
        microbatch = min(settings.microbatch or share, share)
        ran_out = [
            trial
            for trial in trials
            if trial.ran_out and (trial.checkpointing or not settings.activation_checkpointing)
        ]
        if any(trial.microbatch <= microbatch for trial in ran_out):
            return False
        found = needed(settings)
        return found is not None and found.held <= FULL * limit

    planned = needed(base) or Need(limit, 0.0, weighed=False)
    largest = next((size for size in range(share, 0, -1) if fits(Settings(size, base.activation_checkpointing))), 0)
    if fits(base):
        return Verdict(Fit.FITS, base, planned, planned, (), largest, f"{_of(planned.held, limit)} of {where}")
    ran_out = any(trial.ran_out and trial.microbatch == min(base.microbatch or share, share) for trial in trials)
    tried = f"as planned {'more than there is' if ran_out else _of(planned.held, limit)} of {where}"
    now, taken = base, list[str]()
    while found := memory_ladder.next_rung(ladder, now, base, facts):
        rung, now = found
        if rung.kind == "set":
            why = f"what {rung.name!r} would spare was not weighed; kgorch takes it when memory runs out"
            return Verdict(Fit.DOES_NOT_FIT, None, None, planned, (*taken, rung.name), largest, why)
        taken.append(rung.name)
        if fits(now):
            said = needed(now)
            assert said is not None
            why = f"{tried}, so {_of(said.held, limit)}"
            return Verdict(Fit.FITS_WITH, now, said, planned, tuple(dict.fromkeys(taken)), largest, why)
    why = f"{tried}, and no rung of the plan's ladder makes enough room"
    return Verdict(Fit.DOES_NOT_FIT, None, None, planned, tuple(dict.fromkeys(taken)), largest, why)


def even(share: int, largest: int, facts: Facts) -> int:
    """The microbatch to begin with where `largest` fits: as few parts of a share as it allows, all of one size; 0 where that is not
    for kgorch to choose.

    Parts of `largest` would leave a small last one, at the memory of the largest. What splits a batch changes BatchNorm's
    statistics, and a batch that `session.backward` is not given cannot be split.
    """
    if largest >= share or not largest:
        return largest
    return 0 if facts.batchnorm or not facts.batch else -(-share // -(-share // largest))


def _of(held: int, limit: int) -> str:
    return f"{held / max(limit, 1):.0%}"
