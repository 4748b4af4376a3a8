"""How an attempt ended, from what its ranks wrote down: one event for the lifecycle.

torchrun's exit code tells nothing. Each rank leaves a record; the earliest failure is the cause, what follows in the
other ranks (a broken connection, the launcher's SIGTERM) is collateral. A rank without a record was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.core.session import (
    AttemptCrashed,
    AttemptSuspended,
    AttemptUnsaved,
    Event,
    RetriesExhausted,
    RunFinished,
    StageFinished,
)

ATTEMPTS_WITHOUT_PROGRESS = 3

_COLLATERAL = (
    "connection closed by peer",
    "connection reset",
    "socket closed",
    "connection refused",
    "broken pipe",
    "remote process exiting",
    "peerslost",
)
_HOPELESS = ("ModuleNotFoundError", "ImportError", "SyntaxError", "orchestrator.errors.")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank wrote down last. `outcome`: finished, suspended, unsaved or failed; `began`: the person's code was reached."""

    rank: int
    outcome: str
    at_s: float
    began: bool = True
    error_type: str = ""
    message: str = ""

    @property
    def is_collateral(self) -> bool:
        text = f"{self.error_type} {self.message}".lower()
        return any(sign in text for sign in _COLLATERAL)


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt whose processes are gone.

    Attributes:
        launcher: how torchrun ended, in words.
        gained: it came to a step that no attempt of the run had come to.
        without_progress: attempts in a row before this one that gained nothing.
    """

    ranks: int
    records: Sequence[RankRecord]
    launcher: str
    gained: bool
    without_progress: int
    more_stages: bool


def verdict(ended: Ended) -> Event:
    """The end of an attempt as one event."""
    outcomes = {record.outcome for record in ended.records}
    if len(ended.records) == ended.ranks and "failed" not in outcomes:
        if outcomes == {"finished"}:
            return StageFinished() if ended.more_stages else RunFinished()
        return AttemptUnsaved("the last save failed") if "unsaved" in outcomes else AttemptSuspended()
    cause = first_cause(ended)
    if any(_is_hopeless(record) for record in ended.records):
        return RetriesExhausted(cause)
    if not ended.gained and ended.without_progress + 1 >= ATTEMPTS_WITHOUT_PROGRESS:
        return RetriesExhausted(f"{cause} ({ATTEMPTS_WITHOUT_PROGRESS} attempts in a row came no step further)")
    return AttemptCrashed(cause)


def first_cause(ended: Ended) -> str:
    """One line: which rank failed first, and of what."""
    failed = sorted(
        (record for record in ended.records if record.outcome == "failed"),
        key=lambda record: (record.is_collateral, record.at_s),
    )
    killed = sorted(set(range(ended.ranks)) - {record.rank for record in ended.records})
    if failed and not (killed and failed[0].is_collateral):
        first = failed[0]
        said = first.message.strip().splitlines() or ["no message"]
        return f"rank {first.rank}: {first.error_type}: {said[0]}"
    if len(killed) == ended.ranks:
        return f"no rank left a word ({ended.launcher})"
    return f"rank {', '.join(map(str, killed))} was killed ({ended.launcher})"


def _is_hopeless(record: RankRecord) -> bool:
    return record.outcome == "failed" and (not record.began or record.error_type.startswith(_HOPELESS))
