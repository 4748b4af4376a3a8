"""How an attempt ended, from what its ranks wrote down: one event for the lifecycle.

torchrun's exit code tells nothing. Each rank leaves a record; the earliest failure is the cause, what follows in the
other ranks (a broken connection, the launcher's SIGTERM) is collateral. A rank without a record was killed: by the kernel
for want of memory when the kernel has counted that, and only then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core import memory_ladder, training_health
from orchestrator.core.codes import RankError, RankOutcome
from orchestrator.core.lifecycle import (
    AttemptCrashed,
    AttemptSuspended,
    AttemptUnsaved,
    Event,
    OutOfMemory,
    RetriesExhausted,
    RunFinished,
    StageFinished,
    Unwell,
)
from orchestrator.core.training_health import Remedy, Taken, Trouble

ATTEMPTS_WITHOUT_PROGRESS = 3
SAME_ERRORS = 2
"""So many attempts that end of the same exception, at the same line and step, are enough to know that a third one would."""

EVALUATING = "evaluation"
"""Of the places of core/hang_detection.py."""

_HOPELESS = (RankError.USAGE, RankError.CHECKPOINT)
_CAUGHT_ELSEWHERE, _AN_ERROR = re.compile(r"Caught \w+ in "), re.compile(r"[A-Za-z_][\w.]*(: |$)")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank wrote down last.

    Attributes:
        code: what kind of error ended it. began: the user's code was reached.
        trouble: with the loss or the weights, for which it ended.
        memory: that ran out, as core/memory_ladder.py names it; empty when none did.
        step: in which it failed; None where that is not known.
        place: of core/hang_detection.py, in which it failed; empty where that is not known.
        is_collateral: it failed of what another rank's end did to it (worker/peers.py).
        line: of the person's code that raised, as `train.py:42`; empty where that is not known.
        final_step: of the stage's last save; None for a rank that tracked nothing, or did not come so far.
        at: the clock's time, ISO 8601.
    """

    rank: int
    outcome: RankOutcome
    at_s: float
    began: bool = True
    code: RankError = RankError.OTHER
    error_type: str = ""
    message: str = ""
    memory: str = ""
    step: int | None = None
    place: str = ""
    is_collateral: bool = False
    line: str = ""
    final_step: int | None = None
    at: str = ""
    traceback: str = ""
    trouble: Trouble | None = None

    @property
    def was_evaluating(self) -> bool:
        """It failed in an evaluation; what ends the ladder does so in a step, whatever mode its modules are in."""
        return self.place == EVALUATING and self.code is not RankError.LADDER_EXHAUSTED

    @property
    def lost_a_worker(self) -> bool:
        return self.code is RankError.LOADER_KILLED


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt whose processes are gone.

    Attributes:
        launcher: how torchrun ended, in words.
        gained: it came to a step that no attempt of the run had come to.
        without_progress: attempts in a row before this one that gained nothing.
        kernel_kills: processes of its control group that the kernel has killed meanwhile, for want of memory.
        sigkilled: torchrun, or a rank of it, was ended by SIGKILL.
        rung: that is taken when memory ran out; empty when none is left.
        repeats: the attempt before it ended of the same exception, at the same line and step.
        has_final: the final checkpoint that the ranks left is verified; True where they track nothing.
        can_read_another: the checkpoint of an earlier stage that no rank could read is out of the way: that stage is trained to its
            end again first, or its next best one is taken.
        remedies: the plan's, for a loss or weights gone bad. past: those taken, oldest first.
    """

    ranks: int
    records: Sequence[RankRecord]
    launcher: str
    gained: bool
    without_progress: int
    more_stages: bool
    kernel_kills: int = 0
    sigkilled: bool = False
    rung: str = ""
    repeats: bool = False
    has_final: bool = True
    can_read_another: bool = False
    remedies: Sequence[Remedy] = ()
    past: Sequence[Taken] = ()


def failed_in(ended: Ended, furthest: int) -> int:
    """The step that has to be done in another way. `furthest`: the newest that any rank has told of; one whose optimizer finds
    no room is still in the step that the others have done."""
    return min((record.step for record in ended.records if record.step is not None), default=max(furthest - 1, 0))


def memory_that_ran_out(ended: Ended) -> str:
    """Which memory ended the attempt, as core/memory_ladder.py names it; empty when none did."""
    first = _first_failure(ended)
    if first and not first.lost_a_worker:
        return (
            memory_ladder.EVALUATION if first.memory == memory_ladder.DEVICE and first.was_evaluating else first.memory
        )
    was_killed = first is not None or (len(ended.records) < ended.ranks and ended.sigkilled)
    return memory_ladder.HOST if was_killed and ended.kernel_kills else ""


def verdict(ended: Ended) -> Event:
    """The end of an attempt as one event."""
    outcomes = {record.outcome for record in ended.records}
    if len(ended.records) == ended.ranks and RankOutcome.FAILED not in outcomes:
        if outcomes == {RankOutcome.FINISHED}:
            return _done(ended)
        return AttemptUnsaved("the last save failed") if RankOutcome.UNSAVED in outcomes else AttemptSuspended()
    troubles = [(record.at_s, record.trouble) for record in ended.records if record.trouble]
    if troubles:
        return _remedied(min(troubles, key=lambda item: item[0])[1], ended)
    cause = first_cause(ended)
    if where := memory_that_ran_out(ended):
        if ended.rung:
            return OutOfMemory(cause, ended.rung)
        if not ended.gained:
            advice = "; give the evaluation smaller batches" if where == memory_ladder.EVALUATION else ""
            return RetriesExhausted(f"{cause} (the ladder is exhausted: no rung of it is left{advice})")
    if any(_is_hopeless(record) for record in ended.records) and not ended.can_read_another:
        return RetriesExhausted(cause)
    if ended.repeats and not ended.gained:
        return RetriesExhausted(f"{cause} ({SAME_ERRORS} attempts in a row ended of the same error in the same step)")
    return exhausted(cause, ended.gained, ended.without_progress) or AttemptCrashed(cause)


def is_same_error(one: Sequence[RankRecord], other: Sequence[RankRecord]) -> bool:
    """Whether two attempts ended of the same exception, at the same line and step, whatever it says: a third would end of it, too.
    Not where that line is not known, where a rank was killed, or where memory ran out."""
    signs = [_sign(records) for records in (one, other)]
    return signs[0] is not None and signs[0] == signs[1]


def _sign(records: Sequence[RankRecord]) -> tuple[str, str, int | None] | None:
    first = next(iter(in_order(records)), None)
    if first is None or first.is_collateral or first.memory or first.trouble or not first.line:
        return None
    return first.error_type, first.line, first.step


def _done(ended: Ended) -> Event:
    """A stage is done when its script is, on all ranks, and what it made can be read: else its last steps are done again."""
    if not ended.has_final:
        cause = "the stage is done, but its final checkpoint is not: it could not be written, or was read back broken"
        return exhausted(cause, ended.gained, ended.without_progress) or AttemptCrashed(cause)
    return StageFinished() if ended.more_stages else RunFinished()


def final_step(records: Sequence[RankRecord]) -> int | None:
    """Of the stage's final checkpoint, by the word of its ranks; None where they track nothing."""
    return max((record.final_step for record in records if record.final_step is not None), default=None)


def exhausted(cause: str, gained: bool, without_progress: int) -> RetriesExhausted | None:
    """The end of the run where an attempt that failed of `cause` is one too many that came no step further."""
    if gained or without_progress + 1 < ATTEMPTS_WITHOUT_PROGRESS:
        return None
    return RetriesExhausted(f"{cause} ({ATTEMPTS_WITHOUT_PROGRESS} attempts in a row came no step further)")


def in_order(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Those that failed, the cause first: by time, what others did to them last."""
    failed = (record for record in records if record.outcome is RankOutcome.FAILED)
    return sorted(failed, key=lambda record: (record.is_collateral, record.at_s))


def _remedied(trouble: Trouble, ended: Ended) -> Event:
    remedy = training_health.next_remedy(ended.remedies, ended.past, trouble.kind, trouble.begins)
    if remedy is None:
        return RetriesExhausted(training_health.exhausted(ended.past, trouble))
    return Unwell(trouble.said(), remedy.name, training_health.change_of(remedy, trouble))


def first_cause(ended: Ended) -> str:
    """One line: which rank failed first, and of what."""
    kernel = "; the kernel has killed for want of memory" if ended.kernel_kills else ""
    if first := _first_failure(ended):
        said = _in_a_line(first.message)
        if first.code is RankError.LADDER_EXHAUSTED:
            return said  # it names the rank and the error itself
        place = " in an evaluation" if first.was_evaluating else ""
        line = f" ({first.line})" if first.line else ""
        return f"rank {first.rank}{place}: {first.error_type}: {said}{line}{kernel if first.lost_a_worker else ''}"
    killed = sorted(set(range(ended.ranks)) - {record.rank for record in ended.records})
    if len(killed) == ended.ranks:
        return f"no rank left a word ({ended.launcher}{kernel})"
    return f"rank {', '.join(map(str, killed))} was killed ({ended.launcher}{kernel})"


def _in_a_line(message: str) -> str:
    """Its first line. PyTorch puts the error of a loading process at the end, below that process's traceback."""
    lines = message.strip().splitlines() or ["no message"]
    if _CAUGHT_ELSEWHERE.match(lines[0]) and _AN_ERROR.match(lines[-1]):
        return f"{lines[0].rstrip('.')}: {lines[-1]}"
    return lines[0]


def _first_failure(ended: Ended) -> RankRecord | None:
    """The record of the cause; None when it is a rank that was killed."""
    failed = in_order(ended.records)
    anyone_killed = len(ended.records) < ended.ranks
    return None if not failed or (anyone_killed and failed[0].is_collateral) else failed[0]


def _is_hopeless(record: RankRecord) -> bool:
    return record.outcome is RankOutcome.FAILED and (not record.began or record.code in _HOPELESS)
