"""Where a session stands, and when something is due for it.

Instants are seconds of CLOCK_BOOTTIME.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kgorch.core.checkpoint import checkpoint_interval, save_deadline
from kgorch.core.codes import Phase, Reason
from kgorch.core.session.events import Instant

LAST_WORDS_S = 0.5
"""What is kept between killing what did not end and the wall: time to write down how it ended."""

GAP_FADES = 0.9998
"""The longest gap between steps is half forgotten in an hour of reports: an evaluation comes again, a freak does not."""

CALIBRATION_S = 5.0
"""Of training before a session's first save."""

DIAGNOSIS_S = 30.0
"""What the stacks of all ranks may take to be collected, twice over (launch/stack_dumps.py)."""

STOP_GRACE_S = 120.0
"""How long a stop without a wall may take at least before what runs is killed."""

SCRIPT_GRACE_S = 30.0
"""How long a script whose training is over and saved may go on after a stop: it runs again from there in the next session."""


@dataclass(frozen=True, slots=True)
class LifecycleState:
    """Where a session stands, and all that its decisions hang on.

    Attributes:
        entered_s: when the phase began.
        wall_s: when something ends us, and `wall_kind` what; None for a machine without such an end.
        every_s: the plan's upper bound between two saves.
        saves: of this run, oldest first. guess_s: what to count on before the first one.
        state_bytes: what a save holds. write_bytes_per_s: of this session's disk, as measured at its beginning.
        gap_s, step_s: the longest time between two steps lately; an ordinary step.
        began_s: when training began, with all before it on disk; -inf when it is not known.
        saved_s: end of the last save, or the beginning of training.
        trained_s, failures: of the run before this session; blocking_s: of the last save.
        is_measured: a save of this very session has told how long it takes.
        is_in_order: a checkpoint was verified since the stop. is_rescued: the newest snapshot was asked for.
        has_saved: a checkpoint was verified in this session. save_error: why the newest save failed; empty once one did not.
        step: of the running stage, as the ranks reported it last; saved_step: the newest of them that is on disk.
        is_final: the stage's final checkpoint is verified, and its script still runs: there is nothing to save.
        stop_s: what a foreign program takes to stop, the copy of its last checkpoint included: it saves when it likes, and is
            asked for nothing else. None for one that saves when it is asked.
        reason: what ends or has ended the session. why: the same for people, with what came after.
    """

    phase: Phase = Phase.QUEUED
    entered_s: Instant = 0.0
    wall_s: Instant | None = None
    wall_kind: Reason = Reason.TIME_LIMIT
    margin_s: float = 5.0
    every_s: float | None = None
    saves: tuple[save_deadline.Save, ...] = ()
    state_bytes: int = 0
    guess_s: float = 2.0
    gap_s: float = 0.0
    step_s: float = 0.0
    began_s: Instant = -math.inf
    saved_s: Instant = 0.0
    blocking_s: float = 0.0
    trained_s: float = 0.0
    failures: int = 0
    write_bytes_per_s: float = 100e6
    is_measured: bool = False
    is_in_order: bool = False
    is_rescued: bool = False
    is_final: bool = False
    has_saved: bool = False
    save_error: str = ""
    step: int = 0
    saved_step: int = 0
    stop_s: float | None = None
    reason: Reason = Reason.NONE
    why: str = ""

    @property
    def is_stopped_by_user(self) -> bool:
        return self.reason is Reason.USER

    @property
    def save_s(self) -> float:
        """What to count on for the next save."""
        floor_s = self.state_bytes / max(self.write_bytes_per_s, 1.0)
        return max(save_deadline.save_s(self.saves, self.state_bytes, guess_s=self.guess_s), floor_s)

    @property
    def save_lead_s(self) -> float:
        """So long before the wall the last save is asked for. While a session comes up nothing is unsaved, and it may go on as
        long as any save may still come in time; a part of what it has left then is trained in any case."""
        if self.is_final:
            return self.margin_s
        if self.phase is Phase.STARTING:
            return self.least_lead_s
        left_s = math.inf if self.wall_s is None else max(0.0, self.wall_s - self.began_s)
        lead_s = self._lead_s(self.save_s) if self.stop_s is None else self.stop_s + self.margin_s
        return min(lead_s, (1 - save_deadline.TRAINS) * left_s)

    @property
    def least_lead_s(self) -> float:
        """A shorter one than that would be in vain."""
        return self._lead_s(save_deadline.least_s(self.saves, guess_s=self.guess_s))

    def _lead_s(self, save_s: float) -> float:
        return save_deadline.save_lead_s(save_s=save_s, gap_s=self.gap_s, step_s=self.step_s, margin_s=self.margin_s)

    @property
    def deadline_s(self) -> Instant | None:
        return None if self.wall_s is None else self.wall_s - self.save_lead_s

    @property
    def rescue_s(self) -> Instant | None:
        """When a last save that has not come would come too late. Ranks that answer have begun it by then: a snapshot written first
        would hold it up."""
        if self.wall_s is None:
            return None
        answer_s = min(
            save_deadline.agreed_s(self.step_s), save_deadline.TRAINS * max(0.0, self.wall_s - self.entered_s)
        )
        return max(self.wall_s - self.save_s - self.margin_s, self.entered_s + answer_s)

    @property
    def periodic_save_s(self) -> float:
        """Seconds from asking for a save during the training until it is over, and the ranks take the next request."""
        return save_deadline.agreed_s(self.step_s) + self.save_s

    @property
    def next_save_s(self) -> Instant:
        """When the next save is asked for; never of a foreign program."""
        if self.stop_s is not None:
            return math.inf
        if not self.is_measured:  # one early, so that the deadline's lead is measured, on this session's own disk
            return self.saved_s + min(CALIBRATION_S, self.every_s or CALIBRATION_S)
        interval = checkpoint_interval.interval_s(
            self.blocking_s, trained_s=self.trained_s, failures=self.failures, at_most_s=self.every_s
        )
        return self.saved_s + interval

    @property
    def kill_s(self) -> Instant:
        """When what has not ended after a stop is killed."""
        patience_s = max(SCRIPT_GRACE_S, self.margin_s) if self.is_final else max(STOP_GRACE_S, 4 * self.save_lead_s)
        graceful = self.entered_s + patience_s
        return graceful if self.wall_s is None else min(graceful, self.wall_s - LAST_WORDS_S)

    @property
    def diagnosed_s(self) -> Instant:
        """When a hang counts as diagnosed, whatever was learned."""
        return self.entered_s + DIAGNOSIS_S

    @property
    def overdue_s(self) -> Instant:
        """When a save that was asked for is given up as never coming."""
        return self.entered_s + max(300.0, 10 * self.save_lead_s)

    @property
    def ends_on_quota(self) -> bool:
        return self.reason is Reason.QUOTA

    def observing(self, *, gap_s: float, step_s: float) -> LifecycleState:
        """With the ranks' own times, told about once a second."""
        return replace(self, gap_s=max(gap_s, GAP_FADES * self.gap_s, step_s), step_s=step_s)
