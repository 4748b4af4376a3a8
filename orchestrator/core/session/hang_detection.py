"""When a rank counts as hung: it has stayed in one place of its training for longer than that place can explain.

Each rank reports about once a second where it is, for how long, and for how long its main thread has stood at the same
instructions (`RankProgress`). A rank that falls silent stays where it last reported to be. The longest durations of each place in
this run, earlier sessions included, set the time-outs:

- `start`: from the launch until the first batch is requested; `first_step`: with its compilation; `step`; `evaluation`: what a
  script does between two epochs, or in a step with its model in eval(); `save`: as long as training waits for it; `data`: what
  session.cached computes on rank 0, from one report of its progress to the next.
- `wait`: of the other ranks for `data`, has no time-out: rank 0 is checked.
- `end`: after the session the script is on its own. No time-out, unless the plan names one.

The clock alone does not prove a hang where the script chose what takes so long: the first validation may take hours. So its main
thread must have stood still besides (`STILL_S`); a rank that has not attached yet cannot report that. A time-out that the plan
names counts by the clock alone.

Ranks wait for each other: while rank 0 validates alone, the others stand still in their next step. So a rank does not count as
hung while another one starts, evaluates or saves and has not hung there itself, and its time starts anew when that one goes on.

Considered: one time-out for all places, as in NCCL and Accelerate. It is too short for saves or too long for steps, and raised
false alarms elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kgorch.core.session.events import Hung, Instant

WAITED_FOR = ("start", "evaluation", "save", "data")
"""Places where one rank may be alone while all others wait for it in a collective."""

STILL_S = 60.0
"""Seconds that a main thread may stand still without being hung: it may wait for a disk or a network."""

ASLEEP_S = 5.0
"""The supervisor checks once a second. A gap longer than this means that the machine or the supervisor was suspended."""


@dataclass(frozen=True, slots=True)
class TimeoutRule:
    """How a place's time-out follows from its longest duration.

    Attributes:
        unseen_s: time-out before the place has had a duration.
        floor_s: smallest time-out after that.
        factor: time-out as a multiple of the longest duration. A longest duration may include a pause or a wait for another
            rank, so above `unseen_s` the time-out is at most twice the duration.
    """

    unseen_s: float
    floor_s: float
    factor: float


RULES: Mapping[str, TimeoutRule] = {
    # Imports, archives unpacked, checkpoints read: much the same each time, so three times the longest. An hour at first, for
    # a script may prepare its data before it attaches.
    "start": TimeoutRule(3600.0, 600.0, 3.0),
    "first_step": TimeoutRule(1800.0, 600.0, 3.0),
    # Ten times, for steps have a long tail (a cold disk, a loader's refill). Collectives have no time-out of their own under kgorch
    # (worker/ranks/process_group.py), so nothing ends the ranks and takes their stacks along before this does.
    "step": TimeoutRule(1800.0, 300.0, 10.0),
    "evaluation": TimeoutRule(3600.0, 900.0, 3.0),
    # A rank gives a last save up by itself after 600 s (worker/checkpoint/snapshot_writer.py).
    "save": TimeoutRule(1800.0, 900.0, 3.0),
    # Headers of a whole data set on a cold mount: no figure of an earlier session tells how long that takes.
    "data": TimeoutRule(3600.0, 1800.0, 3.0),
}

PLACES = (*RULES, "end")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank last reported to be.

    Attributes:
        where: the place.
        since_s: when it got there.
        still_since_s: since when its main thread stands still.
        waited_until_s: until when it may have waited for another rank; 0.0 for never.
    """

    where: str
    since_s: Instant
    still_since_s: Instant
    waited_until_s: Instant = 0.0


@dataclass(frozen=True, slots=True)
class HangDetector:
    """The ranks of an attempt and their time-outs. A value: each method returns the next one.

    Attributes:
        timeouts: the plan's time-outs by place, seconds.
        longest: longest duration of each place in this run, seconds.
        patience: factor of all time-outs. It doubles with each attempt without progress, so that a false hang (a long step of a
            new kind) does not end the run.
        ranks: by rank.
        checked_s: when the detector last checked.
    """

    timeouts: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    patience: int = 1
    ranks: Mapping[int, RankPosition] = field(default_factory=dict)
    checked_s: Instant = 0.0

    def with_attempt(self, ranks: int, now: Instant, *, without_progress: int) -> HangDetector:
        """A new attempt, of which no rank has reported yet.

        Args:
            without_progress: attempts in a row before this one that made no progress.
        """
        positions = {rank: RankPosition("start", now, now) for rank in range(ranks)}
        return replace(self, ranks=positions, patience=2**without_progress, checked_s=now)

    def with_report(self, rank: int, where: str, for_s: float, still_s: float, now: Instant) -> HangDetector:
        """After the report of a rank: in which place it is, and for how long it and its main thread have stood there."""
        before = self.ranks.get(rank)
        since_s, longest = now - for_s, self.longest
        if before and before.where == "start":
            # A rank's start begins with the launch, before it could report.
            if where == "start":
                since_s = before.since_s
            else:
                longest = _longer(longest, {"start": since_s - before.since_s})
        position = RankPosition(where, since_s, now - still_s, before.waited_until_s if before else 0.0)
        return replace(self, ranks={**self.ranks, rank: position}, longest=longest)

    def with_durations(self, longest: Mapping[str, float]) -> HangDetector:
        """After longest durations of places, of a rank or of an earlier session."""
        return replace(self, longest=_longer(self.longest, longest))

    def at_check(self, now: Instant) -> HangDetector:
        """Before each check: neither a suspension nor a time in which another rank was busy alone counts against a rank."""
        # Where nobody checked, the ranks may have been suspended as well: their times move along.
        asleep_s = now - self.checked_s if now - self.checked_s > ASLEEP_S else 0.0
        awake = {
            rank: RankPosition(
                at.where, at.since_s + asleep_s, at.still_since_s + asleep_s, at.waited_until_s + asleep_s
            )
            for rank, at in self.ranks.items()
        }
        busy = {rank for rank, at in awake.items() if at.where in WAITED_FOR and not self._is_over(at, now)}
        waiting = {rank: replace(awake[rank], waited_until_s=now) for rank in awake.keys() - busy if busy}
        return replace(self, ranks=awake | waiting, checked_s=now)

    def limit_s(self, where: str) -> float | None:
        """The time-out of a place in seconds; None for none."""
        if where in self.timeouts:
            return self.timeouts[where]
        if (rule := RULES.get(where)) is None:
            return None
        longest_s = self.longest.get(where)
        if longest_s is None:
            return rule.unseen_s * self.patience
        usual_s = max(rule.floor_s, rule.factor * longest_s)
        return min(usual_s, max(rule.unseen_s, 2 * longest_s)) * self.patience

    def first_hung(self, now: Instant) -> Hung | None:
        """Of the ranks that hang, the one that has been in its place longest: the others may only wait for it."""
        hung = [rank for rank, position in self.ranks.items() if self._has_hung(position, now)]
        if not hung:
            return None
        rank = min(hung, key=lambda rank: (self.ranks[rank].since_s, rank))
        return Hung(rank, self.ranks[rank].where, round(now - self.ranks[rank].since_s, 1))

    def _has_hung(self, position: RankPosition, now: Instant) -> bool:
        return self._is_over(replace(position, since_s=max(position.since_s, position.waited_until_s)), now)

    def _is_over(self, position: RankPosition, now: Instant) -> bool:
        """Whether the rank has used up its time there, whichever rank it may wait for."""
        limit_s = self.limit_s(position.where)
        if limit_s is None or now - position.since_s < limit_s:
            return False
        return position.where in self.timeouts or now - position.still_since_s >= STILL_S


def _longer(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The longer duration of each place. What comes from a rank or a journal may name places that do not exist."""
    return {place: max(one.get(place, 0.0), other.get(place, 0.0)) for place in {*one, *other} if place in RULES}
