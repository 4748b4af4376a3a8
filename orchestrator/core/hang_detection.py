"""When a rank counts as hung: it has been in one place of its training for longer than that place can explain.

Each rank tells about once a second where it is, for how long, and for how long its main thread has stood on the same
instructions (RankProgress). A rank that falls silent stays where it was last heard of. What each place has taken at most in this
run, earlier sessions included, sets the time-out:

- `start`, from the launch until the first batch is asked for; `first_step`, with its compilation; `step`; `evaluation`, what a
  script does between two epochs, or in a step with its model in eval(); `save`, for as long as training stands still for it;
  `data`, what session.cached computes on rank 0, from one word of its progress to the next.
- `wait`, of the other ranks meanwhile, has none: rank 0 is looked at.
- After the session (`end`) the script is on its own: no time-out, unless the plan names one.

The clock alone does not make a hang where the script chose what takes so long: the first validation may take hours. So its
main thread must have stood still besides (STILL_S); a rank that has not attached yet cannot tell that. A time-out that the plan
names counts by the clock alone.

Ranks wait for each other: while rank 0 validates alone, the others stand still in their next step. So a rank does not count
as hung while another starts, evaluates or saves and has not hung there itself, and its time begins anew when that one goes on.

Considered: one time-out for all, as NCCL and Accelerate have it; it is too short for saves or too long for steps, and raised
false alarms elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.lifecycle import Hung, Instant

WAITED_FOR = ("start", "evaluation", "save", "data")
"""Where a rank may be alone while all others wait for it in a collective."""

STILL_S = 60.0
"""A main thread that waits for a disk or a network may stand so long without having hung."""

ASLEEP_S = 5.0
"""The supervisor looks twice a second. Where it has not for so long, the machine was suspended, or itself stopped."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Seconds that a place may take while none has been seen, and at least; once seen, `factor` times the longest.

    What was seen may have been a pause or a wait for another rank; of more than `unseen_s` twice as much is enough.
    """

    unseen_s: float
    floor_s: float
    factor: float


RULES: Mapping[str, Rule] = {
    # Imports, archives unpacked, checkpoints read: much the same each time, so three times the longest. An hour at first, for
    # a script may prepare its data before it attaches.
    "start": Rule(3600.0, 600.0, 3.0),
    "first_step": Rule(1800.0, 600.0, 3.0),
    # Ten times, for steps have a long tail (a cold disk, a loader's refill). Collectives have no time-out of their own under kgorch
    # (worker/group.py), so nothing ends the ranks and takes their stacks along before this does.
    "step": Rule(1800.0, 300.0, 10.0),
    "evaluation": Rule(3600.0, 900.0, 3.0),
    # A rank gives a last save up by itself after 600 s (worker/save.py).
    "save": Rule(1800.0, 900.0, 3.0),
    # Headers of a whole data set on a cold mount: no figure of an earlier session tells how long that takes.
    "data": Rule(3600.0, 1800.0, 3.0),
}

PLACES = (*RULES, "end")


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank where it was heard of last: since when it is there, since when its main thread stands still, and until when it
    may have waited for another rank."""

    where: str
    since_s: Instant
    still_since_s: Instant
    waited_until_s: Instant = 0.0


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of an attempt's ranks.

    Attributes:
        given: the plan's time-outs by place.
        longest: what each place has taken at most, seconds.
        patience: time-outs are so many times as long; it doubles with each attempt that came no step further, so a hang that
            was none (a long step never seen before) does not end the run.
    """

    given: Mapping[str, float] = field(default_factory=dict)
    longest: Mapping[str, float] = field(default_factory=dict)
    patience: int = 1
    ranks: Mapping[int, Seen] = field(default_factory=dict)
    looked_s: Instant = 0.0

    def launched(self, ranks: int, now: Instant, *, without_progress: int) -> Watch:
        """A new attempt: nobody has said a word."""
        seen = {rank: Seen("start", now, now) for rank in range(ranks)}
        return replace(self, ranks=seen, patience=2**without_progress, looked_s=now)

    def heard(self, rank: int, where: str, for_s: float, still_s: float, now: Instant) -> Watch:
        """A rank has told where it is. Its start began with the launch, before it could tell."""
        before = self.ranks.get(rank)
        since_s, longest = now - for_s, self.longest
        if before and before.where == "start":
            if where == "start":
                since_s = before.since_s
            else:
                longest = _longer(longest, {"start": since_s - before.since_s})
        seen = Seen(where, since_s, now - still_s, before.waited_until_s if before else 0.0)
        return replace(self, ranks={**self.ranks, rank: seen}, longest=longest)

    def learning(self, longest: Mapping[str, float]) -> Watch:
        return replace(self, longest=_longer(self.longest, longest))

    def looking(self, now: Instant) -> Watch:
        """Time in which nobody looked counts for nobody: the ranks may have slept as well. Nor does time in which another rank
        was busy alone."""
        slept_s = now - self.looked_s if now - self.looked_s > ASLEEP_S else 0.0
        awake = {
            rank: Seen(
                seen.where, *(at_s + slept_s for at_s in (seen.since_s, seen.still_since_s, seen.waited_until_s))
            )
            for rank, seen in self.ranks.items()
        }
        busy = {rank for rank, seen in awake.items() if seen.where in WAITED_FOR and not self._is_over(seen, now)}
        waiting = {rank: replace(awake[rank], waited_until_s=now) for rank in awake.keys() - busy if busy}
        return replace(self, ranks=awake | waiting, looked_s=now)

    def limit_s(self, where: str) -> float | None:
        if where in self.given:
            return self.given[where]
        if (rule := RULES.get(where)) is None:
            return None
        seen_s = self.longest.get(where)
        if seen_s is None:
            return rule.unseen_s * self.patience
        usual_s = max(rule.floor_s, rule.factor * seen_s)
        return min(usual_s, max(rule.unseen_s, 2 * seen_s)) * self.patience

    def hung(self, now: Instant) -> Hung | None:
        """The rank that has been in its place longest, of those that have been there for too long."""
        found = [rank for rank, seen in self.ranks.items() if self._has_hung(seen, now)]
        if not found:
            return None
        rank = min(found, key=lambda rank: (self.ranks[rank].since_s, rank))
        return Hung(rank, self.ranks[rank].where, round(now - self.ranks[rank].since_s, 1))

    def _has_hung(self, seen: Seen, now: Instant) -> bool:
        return self._is_over(replace(seen, since_s=max(seen.since_s, seen.waited_until_s)), now)

    def _is_over(self, seen: Seen, now: Instant) -> bool:
        """Whether it has used up its time there, whoever it may wait for."""
        limit_s = self.limit_s(seen.where)
        if limit_s is None or now - seen.since_s < limit_s:
            return False
        return seen.where in self.given or now - seen.still_since_s >= STILL_S


def _longer(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {place: max(one.get(place, 0.0), other.get(place, 0.0)) for place in {*one, *other} if place in RULES}
