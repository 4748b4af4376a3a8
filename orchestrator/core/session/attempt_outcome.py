"""How an attempt ended, from the records of its ranks: one event for the lifecycle.

torchrun's exit code does not say how, so each rank leaves a record. The earliest failure is the cause. What
follows in the other ranks (a broken connection, torchrun's SIGTERM) is collateral. A rank without a record was killed. The kernel's
OOM killer counts as the cause only if the kernel has counted a kill: a SIGKILL may come from anyone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kgorch.core.codes import RankError, RankOutcome
from kgorch.core.health import training_health
from kgorch.core.health.training_health import HealthIssue, PastRemedy, Remedy
from kgorch.core.memory import memory_ladder
from kgorch.core.session.events import (
    AttemptCrashed,
    AttemptDiverged,
    AttemptSuspended,
    AttemptUnsaved,
    Event,
    OutOfMemory,
    RetriesExhausted,
    RunFinished,
    StageFinished,
)

ATTEMPTS_WITHOUT_PROGRESS = 3
"""Attempts in a row that reach no new step before the run fails."""

SAME_ERRORS = 2
"""Attempts in a row with the same exception at the same line and step before the run fails: a third one would end alike."""

EVALUATING = "evaluation"
"""The place of an evaluation (core/session/hang_detection.py)."""

_PERMANENT = (RankError.USAGE, RankError.CHECKPOINT)
"""Errors that the next attempt would meet again."""

_WORKER_ERROR, _ERROR_LINE = re.compile(r"Caught \w+ in "), re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The first line of an error that PyTorch raises again from a loading process, and a traceback's line with the error."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The last record of a rank. Its fields are those of its status file, so they keep their names.

    Attributes:
        at_s: when it ended, seconds of CLOCK_BOOTTIME.
        began: the user's code was reached.
        code: kind of the error that ended it.
        error_code: of kgorch's own error that ended it (kgorch/errors.py); empty for an error of the script.
        error_type: name of the exception's class.
        message: text of the exception.
        memory: kind of memory that ran out (core/memory/memory_ladder.py); empty for none.
        step: in which it failed; None where that is not known.
        place: in which it failed (core/session/hang_detection.py); empty where that is not known.
        is_collateral: it failed because another rank ended (worker/ranks/peer_errors.py).
        line: of the user's code that raised, as `train.py:42`; empty where that is not known.
        final_step: step of the stage's final checkpoint; None for a rank that tracks nothing or did not get that far.
        at: when it ended, ISO 8601.
        trouble: the health issue for which it ended; None for none.
    """

    rank: int
    outcome: RankOutcome
    at_s: float
    began: bool = True
    code: RankError = RankError.OTHER
    error_code: str = ""
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
    trouble: HealthIssue | None = None

    @property
    def was_evaluating(self) -> bool:
        """Whether it failed in an evaluation. The end of the ladder is always in a step, even with modules in eval()."""
        return self.place == EVALUATING and self.code is not RankError.LADDER_EXHAUSTED

    @property
    def lost_a_worker(self) -> bool:
        """Whether it failed because one of its loading processes was killed."""
        return self.code is RankError.LOADER_KILLED


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The facts about an attempt whose processes have ended.

    Attributes:
        ranks: number of ranks that were started.
        records: of the ranks that left one.
        torchrun_exit: how torchrun ended, as text.
        made_progress: it reached a step that no attempt of the run had reached.
        without_progress: attempts in a row before this one that reached no new step.
        more_stages: the stage is not the last one.
        kernel_kills: processes of its control group that the kernel's OOM killer has killed during the attempt.
        was_sigkilled: torchrun or a rank of it was ended by SIGKILL.
        rung: to take where memory ran out; empty when none is left.
        repeats: the attempt before it ended with the same exception at the same line and step.
        has_final: the final checkpoint that the ranks left is verified; True where they track nothing.
        can_read_another: the checkpoint of an earlier stage that no rank could read is out of the way: that stage is trained to
            its end again first, or its next best checkpoint is used.
        remedies: the plan's, against health issues.
        past: the remedies applied so far, oldest first.
    """

    ranks: int
    records: Sequence[RankRecord]
    torchrun_exit: str
    made_progress: bool
    without_progress: int
    more_stages: bool
    kernel_kills: int = 0
    was_sigkilled: bool = False
    rung: str = ""
    repeats: bool = False
    has_final: bool = True
    can_read_another: bool = False
    remedies: Sequence[Remedy] = ()
    past: Sequence[PastRemedy] = ()


def failed_step(end: AttemptEnd, reported_step: int) -> int:
    """The step that has to be repeated with other settings: the earliest in which a rank failed.

    A rank whose optimizer ran out of memory is still in the step that the others have finished.

    Args:
        reported_step: the newest step that any rank has reported; for ranks that left no record.
    """
    # Without a record the failed step may be the one before the reported one, so that is repeated, too.
    return min((record.step for record in end.records if record.step is not None), default=max(reported_step - 1, 0))


def exhausted_memory(end: AttemptEnd) -> str:
    """The kind of memory whose exhaustion ended the attempt (core/memory/memory_ladder.py); empty for another cause."""
    first = _first_failure(end)
    # The error of a rank that lost a loading process names no memory. The kernel's count decides, as for a killed rank.
    if first and not first.lost_a_worker:
        return (
            memory_ladder.EVALUATION if first.memory == memory_ladder.DEVICE and first.was_evaluating else first.memory
        )
    was_killed = first is not None or (len(end.records) < end.ranks and end.was_sigkilled)
    return memory_ladder.HOST if was_killed and end.kernel_kills else ""


def verdict(end: AttemptEnd) -> Event:
    """The event of the lifecycle that the end of an attempt is."""
    outcomes = {record.outcome for record in end.records}
    if len(end.records) == end.ranks and RankOutcome.FAILED not in outcomes:
        if outcomes == {RankOutcome.FINISHED}:
            return _done(end)
        return AttemptUnsaved(_unsaved_cause(end)) if RankOutcome.UNSAVED in outcomes else AttemptSuspended()
    # The first record with a health issue decides: whatever else failed is collateral.
    issues = [(record.at_s, record.trouble) for record in end.records if record.trouble]
    if issues:
        return _remedy(min(issues, key=lambda item: item[0])[1], end)
    cause = first_cause(end)
    if memory := exhausted_memory(end):
        if end.rung:
            return OutOfMemory(cause, end.rung)
        # With progress it is a crash as any other: the run may come to its end with these settings.
        if not end.made_progress:
            advice = "; give the evaluation smaller batches" if memory == memory_ladder.EVALUATION else ""
            return RetriesExhausted(f"{cause} (the ladder is exhausted: no rung of it is left{advice})")
    if any(_is_permanent(record) for record in end.records) and not end.can_read_another:
        return RetriesExhausted(cause)
    if end.repeats and not end.made_progress:
        return RetriesExhausted(
            f"{cause} ({SAME_ERRORS} consecutive attempts ended with the same error in the same step)"
        )
    return exhausted(cause, end.made_progress, end.without_progress) or AttemptCrashed(cause)


def _unsaved_cause(end: AttemptEnd) -> str:
    """Why nothing was saved at the stop: what the agent of a foreign program says, else that the save failed."""
    messages = (_first_line(record.message) for record in end.records if record.message)
    return next(messages, "the last save failed")


def is_same_error(one: Sequence[RankRecord], other: Sequence[RankRecord]) -> bool:
    """Whether two attempts ended with the same exception at the same line and step, whatever its message.

    False where the line is not known, a rank was killed, memory ran out or a disk was full: these may end otherwise the next time.
    """
    signatures = [_signature(records) for records in (one, other)]
    return signatures[0] is not None and signatures[0] == signatures[1]


def _signature(records: Sequence[RankRecord]) -> tuple[str, str, int | None] | None:
    first = next(iter(failures_by_cause(records)), None)
    if first is None or first.is_collateral or first.memory or first.trouble or not first.line:
        return None
    if first.code is RankError.DISK_FULL:
        return None
    return first.error_type, first.line, first.step


def _done(end: AttemptEnd) -> Event:
    """The event after the scripts of all ranks have finished.

    The stage is finished if its final checkpoint is verified, too. Otherwise the attempt counts as a crash, and its last steps are
    repeated: a run must not succeed whose result cannot be read.
    """
    if not end.has_final:
        cause = "the stage is done, but its final checkpoint is not: it could not be written, or was read back broken"
        return exhausted(cause, end.made_progress, end.without_progress) or AttemptCrashed(cause)
    return StageFinished() if end.more_stages else RunFinished()


def final_step(records: Sequence[RankRecord]) -> int | None:
    """Step of the stage's final checkpoint according to its ranks; None where they track nothing."""
    return max((record.final_step for record in records if record.final_step is not None), default=None)


def exhausted(cause: str, made_progress: bool, without_progress: int) -> RetriesExhausted | None:
    """RetriesExhausted if too many attempts in a row have reached no new step; None while another attempt is allowed."""
    if made_progress or without_progress + 1 < ATTEMPTS_WITHOUT_PROGRESS:
        return None
    return RetriesExhausted(f"{cause} ({ATTEMPTS_WITHOUT_PROGRESS} consecutive attempts ended without progress)")


def failures_by_cause(records: Sequence[RankRecord]) -> list[RankRecord]:
    """The records of ranks that failed, the cause first: by time, collateral failures last.

    Time alone does not decide: a rank may notice the broken connection before the rank with the cause has ended.
    """
    failed = (record for record in records if record.outcome is RankOutcome.FAILED)
    return sorted(failed, key=lambda record: (record.is_collateral, record.at_s))


def _remedy(issue: HealthIssue, end: AttemptEnd) -> Event:
    remedy = training_health.next_remedy(end.remedies, end.past, issue.kind, issue.begins)
    if remedy is None:
        return RetriesExhausted(training_health.exhaustion_cause(end.past, issue))
    change = training_health.change_of(remedy, issue)
    return AttemptDiverged(issue.describe(), training_health.name_of(remedy.name, change), change)


def first_cause(end: AttemptEnd) -> str:
    """The cause in one line, for the user: which rank failed first, and with which error."""
    kernel = "; the kernel's OOM killer has killed a process" if end.kernel_kills else ""
    if first := _first_failure(end):
        message = _first_line(first.message)
        if first.code is RankError.LADDER_EXHAUSTED:
            return message  # it names the rank and the error itself
        place = " in an evaluation" if first.was_evaluating else ""
        line = f" ({first.line})" if first.line else ""
        return f"rank {first.rank}{place}: {first.error_type}: {message}{line}{kernel if first.lost_a_worker else ''}"
    killed = sorted(set(range(end.ranks)) - {record.rank for record in end.records})
    if len(killed) == end.ranks:
        return f"all ranks were killed before they could record an error ({end.torchrun_exit}{kernel})"
    return f"rank {', '.join(map(str, killed))} was killed ({end.torchrun_exit}{kernel})"


def _first_line(message: str) -> str:
    """The first line. PyTorch puts the error of a loading process last, below the traceback of that process."""
    lines = message.strip().splitlines() or ["no message"]
    if _WORKER_ERROR.match(lines[0]) and _ERROR_LINE.match(lines[-1]):
        return f"{lines[0].rstrip('.')}: {lines[-1]}"
    return lines[0]


def _first_failure(end: AttemptEnd) -> RankRecord | None:
    """The record of the cause; None when a rank was killed, and the others failed because of that."""
    failed = failures_by_cause(end.records)
    is_one_killed = len(end.records) < end.ranks
    return None if not failed or (is_one_killed and failed[0].is_collateral) else failed[0]


def _is_permanent(record: RankRecord) -> bool:
    """Whether the next attempt would fail alike: so would one whose user code was never reached."""
    return record.outcome is RankOutcome.FAILED and (not record.began or record.code in _PERMANENT)
