"""What may happen to a session. The lifecycle's table (lifecycle.py) says what each event leads to.

Instants are seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kgorch.core.codes import EventKind, Outcome, Reason
from kgorch.core.limits.wall import Wall

Instant = float


class Event:
    """Something that has happened."""

    __slots__ = ()
    kind: ClassVar[EventKind]


@dataclass(frozen=True, slots=True)
class JournalNote:
    """An entry of the journal that the lifecycle does not act on, for whoever watches the session.

    Attributes:
        kind: of the entry. facts: as in the journal; some come from ranks.
    """

    kind: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SessionOpened(Event):
    kind = EventKind.SESSION_OPENED


@dataclass(frozen=True, slots=True)
class Attached(Event):
    """A rank tracks its state and is ready to step. `stop_s`: as in Session."""

    kind = EventKind.ATTACHED
    state_bytes: int = 0
    stop_s: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointDue(Event):
    kind = EventKind.CHECKPOINT_DUE


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    kind = EventKind.SAVE_REQUESTED


@dataclass(frozen=True, slots=True)
class CheckpointVerified(Event):
    """`took_s`: asked for to read back; `blocking_s`: of it, what held the training up; `rescued`: no rank asked for it;
    `final`: of a stage whose steps are all done: what its script still does changes no state."""

    kind = EventKind.CHECKPOINT_VERIFIED
    step: int
    took_s: float
    blocking_s: float = 0.0
    bytes: int = 0
    rescued: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class SaveFailed(Event):
    """A save has failed, or is overdue: then nobody knows whether it will come."""

    kind = EventKind.SAVE_FAILED
    why: str
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class DeadlineReached(Event):
    kind = EventKind.DEADLINE_REACHED


@dataclass(frozen=True, slots=True)
class WallMoved(Event):
    """The nearest of the session's walls is another, or stands elsewhere; None when nothing ends it any more."""

    kind = EventKind.WALL_MOVED
    wall: Wall | None


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """`wall_s` when something outside will end us then; None when the user asks, who can wait for the save."""

    kind = EventKind.STOP_REQUESTED
    reason: Reason
    wall_s: Instant | None = None


@dataclass(frozen=True, slots=True)
class LastSaveLate(Event):
    """What was asked to stop has not saved, and a save begun later would not be done before the wall."""

    kind = EventKind.LAST_SAVE_LATE


@dataclass(frozen=True, slots=True)
class GraceExpired(Event):
    """What was asked to stop has neither saved nor ended."""

    kind = EventKind.GRACE_EXPIRED


@dataclass(frozen=True, slots=True)
class ExitOverdue(Event):
    """What was asked to stop has saved, and has not ended. `cause`: why the next session will come to the same; else empty."""

    kind = EventKind.EXIT_OVERDUE
    cause: str = ""


@dataclass(frozen=True, slots=True)
class StageFinished(Event):
    """All ranks have come to the end of a stage that is not the last."""

    kind = EventKind.STAGE_FINISHED


@dataclass(frozen=True, slots=True)
class RunFinished(Event):
    kind = EventKind.RUN_FINISHED


@dataclass(frozen=True, slots=True)
class AttemptSuspended(Event):
    """All ranks have ended at a step boundary, as asked or by their own watch."""

    kind = EventKind.ATTEMPT_SUSPENDED


@dataclass(frozen=True, slots=True)
class AttemptUnsaved(Event):
    """The same, but the save at that boundary failed."""

    kind = EventKind.ATTEMPT_UNSAVED
    cause: str


@dataclass(frozen=True, slots=True)
class AttemptCrashed(Event):
    kind = EventKind.ATTEMPT_CRASHED
    cause: str


@dataclass(frozen=True, slots=True)
class OutOfMemory(Event):
    """Memory ran out, and not so that the ranks could try again; `rung`: what the next attempt does otherwise."""

    kind = EventKind.ATTEMPT_OUT_OF_MEMORY
    cause: str
    rung: str


@dataclass(frozen=True, slots=True)
class AttemptDiverged(Event):
    """The ranks ended because loss or weights went bad; the next attempt makes this change of the schedule
    (core/health/training_health.py)."""

    kind = EventKind.ATTEMPT_DIVERGED
    cause: str
    remedy: str
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hung(Event):
    """A rank has been `where` it is (core/session/hang_detection.py) for longer than that can take."""

    kind = EventKind.RANKS_HUNG
    rank: int
    where: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Diagnosed(Event):
    """What could be learned of a hang is written down; its processes are to end."""

    kind = EventKind.HANG_DIAGNOSED
    cause: str


@dataclass(frozen=True, slots=True)
class RetriesExhausted(Event):
    kind = EventKind.RETRIES_EXHAUSTED
    cause: str


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A new supervisor has found the attempt running."""

    kind = EventKind.ADOPTED


@dataclass(frozen=True, slots=True)
class SessionLost(Event):
    """A new supervisor has found nothing running."""

    kind = EventKind.SESSION_LOST
    why: str
    outcome: Outcome = Outcome.LOST
