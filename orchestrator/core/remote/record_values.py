"""What a session has recorded of itself at its end. The record outranks what the place says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RecordOutcome(StrEnum):
    """How a session ended, by its own record."""

    FINISHED = "finished"
    SUSPENDED = "suspended"
    QUOTA = "quota"
    FAILED = "failed"
    NO_STATE = "no_state"  # the state to go on from was not attached: nothing was trained
    NO_BUNDLE = "no_bundle"  # the bundle was not attached: nothing was trained
    ERROR = "error"  # of the bootstrap, or of kgorch

    @property
    def is_unprepared(self) -> bool:
        """Nothing was trained, because an input was missing."""
        return self in (RecordOutcome.NO_STATE, RecordOutcome.NO_BUNDLE)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The record of a session.

    Attributes:
        nonce, run, run_id, number: of the order that it was started by.
        exit_code: of `kgorch start` in it.
        stage: of the newest verified checkpoint; empty for none.
        step: of that checkpoint; -1 for none.
        checkpoint: its folder relative to the session's output; empty for none.
        bytes: of the output.
        gpus: names of the GPUs that were visible.
        began_at, ended_at: ISO 8601 in UTC.
        message: for people; foreign text.
    """

    nonce: str
    run: str
    run_id: str
    number: int
    outcome: RecordOutcome
    exit_code: int
    stage: str
    step: int
    checkpoint: str
    bytes: int
    gpus: tuple[str, ...]
    began_at: str
    ended_at: str
    message: str
