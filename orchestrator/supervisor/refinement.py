"""Events that are looked into before they count: what they mean hangs on the disk, or on how attempts before ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from kgorch.core.codes import EventKind, Phase, Reason
from kgorch.core.session import events
from kgorch.core.session import lifecycle as core
from kgorch.core.session.events import Event
from kgorch.launch import launcher, stack_dumps
from kgorch.launch.attempts import LaunchedAttempt
from kgorch.supervisor.checkpoint_records import CheckpointRecords
from kgorch.supervisor.live_session import Input, LiveSession, Refined
from kgorch.supervisor.node_saves import NodeSaves
from kgorch.supervisor.recorder import Journal

STACKS_S = 2.0
"""Seconds that the stacks of a script that has not attached may take: the wall is near."""


REST_CUT = "what follows the training had the whole session and did not end"


class Refinement:
    """Looks twice at a hang that is one too many, at a wall that came before the first step or after the last one, and at a stop
    that seems to have saved nothing.

    Attributes:
        is_busy: a thread looks into an event, and Refined follows.
        is_killing: that thread kills the attempt: its end is no event of its own, Refined says what it comes to.
    """

    def __init__(
        self,
        live: LiveSession,
        journal: Journal,
        saves: tuple[CheckpointRecords, NodeSaves],
        post: Callable[[Input], None],
    ) -> None:
        self._live, self._journal, self._post = live, journal, post
        self._checkpoints, self._saves = saves
        self.is_busy = self.is_killing = False

    def refine(self, event: Event) -> Event | None:
        """What the event means; None while a thread looks into it."""
        live, attempt = self._live, self._live.attempt
        if attempt is None:
            return event
        if isinstance(event, events.Diagnosed):
            return attempt.judge_hang(event, attempt.progress_step(live.row.step, live.saved_step))
        if isinstance(event, events.GraceExpired):
            self._look_into(event, lambda: self._after_kill(event, attempt))
            return None
        # A later attempt follows a stage that was finished, or a crash, which is recorded already.
        is_first = attempt.row.number == 1
        if isinstance(event, events.ExitOverdue) and is_first and self._had_no_step_left(attempt):
            return events.ExitOverdue(REST_CUT)
        if isinstance(event, events.DeadlineReached) and is_first and live.state.phase is Phase.STARTING:
            self._look_into(event, lambda: self._without_a_step(event, attempt))
            return None
        return event

    def conclude(self, refined: Refined) -> Event | None:
        """In the loop: what was found; None where it means nothing any more."""
        self.is_busy = self.is_killing = False
        state = self._live.state
        if state.phase.is_over:
            return None
        if isinstance(refined.event, events.GraceExpired):  # what was found saved decides which end it is
            return next(core.due(state, self._live.clock.now_s()), refined.event)
        # What has attached meanwhile has another deadline, of which `due` tells.
        return refined.event if state.phase is Phase.STARTING else None

    def _look_into(self, event: Event, look: Callable[[], Event]) -> None:
        if self.is_busy:
            return
        self.is_busy, self.is_killing = True, isinstance(event, events.GraceExpired)

        def ask() -> None:
            found = event
            with contextlib.suppress(Exception):  # then the event means what it says
                found = look()
            self._post(Refined(found))

        threading.Thread(target=ask, name="refinement", daemon=True).start()

    def _had_no_step_left(self, attempt: LaunchedAttempt) -> bool:
        """Whether the session's time limit ended a script whose training was over before the session: all of it was spent on what
        follows. It is no end of the run: work that goes on by its own files may take several sessions, and the queue counts."""
        state = self._live.state
        return state.is_final and state.reason is Reason.TIME_LIMIT and self._live.row.step <= attempt.row.first_step

    def _after_kill(self, event: Event, attempt: LaunchedAttempt) -> Event:
        """The keeper may have saved, and not come to report it. What it holds is written before the lost steps are counted."""
        launcher.kill(attempt.folder)
        # Also where it was asked before: it may be writing, or the ranks may have given it a newer snapshot in their last second.
        self._saves.persist(self._live.left_s())
        self._checkpoints.verify_left_by(attempt)
        return event

    def _without_a_step(self, event: events.DeadlineReached, attempt: LaunchedAttempt) -> Event:
        """A session is over before its first step: once may be chance, after two in a row a third would do no better."""
        live = self._live
        look_s = min(STACKS_S, 0.5 * live.left_s())
        stacks = [] if live.is_attached else stack_dumps.collect_own(attempt.folder, attempt.row.ranks, look_s)
        where = next((f"; rank {stack.rank} is at {stack}" for stack in stacks if stack.frames), "")
        reason = "its first step took longer" if live.is_attached else "the script had not attached"
        took_s = (live.clock.utc() - attempt.row.started_at).total_seconds()
        cause = f"the wall came before the first step: {reason}, {took_s:.0f} s after its launch{where}"
        self._journal.note(EventKind.NO_STEP, {"attempt": attempt.name, "why": cause})
        # A spot notice may come at any time: it says nothing about how long the start takes.
        repeats = live.state.wall_kind is Reason.TIME_LIMIT and attempt.without_progress > 0
        return events.RetriesExhausted(f"{cause}; the attempt before it came to no step either") if repeats else event
