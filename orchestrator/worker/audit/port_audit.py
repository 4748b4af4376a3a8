"""What the script's use of the SDK gives up, for `exactness`: looked at after the steps 1, 2, 4, 8, … of a session."""

from __future__ import annotations

from kgorch.worker.audit.untracked_state import UntrackedState
from kgorch.worker.memory.microbatch import MicrobatchRunner
from kgorch.worker.optimizer_steps import OptimizerSteps
from kgorch.worker.session_state import SessionState

MOST_NAMED = 5
"""Objects that are named, because `exactness` is part of every status."""

MOST_CHARACTERS = 200

NO_LADDER = "none: the steps do not use session.backward, so running out of memory ends the attempt"
SOME_LADDER = "only in the steps that use session.backward"


class PortAudit:
    """Looks at the script seldom enough to cost nothing.

    Args:
        optimizers: observes those that step.
        is_guest: another library owns the loop, and its integration decides what is tracked: it is not looked at.
    """

    def __init__(
        self, state: SessionState, runner: MicrobatchRunner, optimizers: OptimizerSteps, *, is_guest: bool
    ) -> None:
        self._state, self._runner, self._optimizers = state, runner, optimizers
        self._untracked = None if is_guest else UntrackedState()
        self._is_guest, self._tracks_by = is_guest, "session.track()"
        self._steps, self._next = 0, 1
        self._warned: set[str] = set()

    def name_untracked(self, tracks_by: str) -> None:
        """See Session.name_untracked."""
        self._untracked, self._tracks_by = UntrackedState(counts_numbers=False), tracks_by

    def after_step(self) -> None:
        """A step of this session was counted."""
        self._steps += 1
        if self._steps < self._next or not self._state.launch:
            return
        self._next *= 2
        if self._steps > 1 and self._optimizers.is_used:  # else it predicts
            self._report_ladder()
        if self._untracked is not None and self._state.tracked:
            marker = self._state.marker
            where = marker.where
            marker.enter("save")  # a `state_dict` may take longer than a step
            try:
                self._report_untracked(self._untracked)
            except Exception as error:  # of any object that a script may hold; no look may cost a run
                self._untracked = None
                text = f"not known: {type(error).__name__}: {error}"[:MOST_CHARACTERS]
                self._state.exactness.update(untracked=text)
            finally:
                marker.enter(where)

    def _report_ladder(self) -> None:
        exactness = self._state.exactness
        if not self._runner.is_used:
            self._runner.report_use()
            if "ladder" not in exactness.facts:  # else a Trainer's integration has said why
                exactness.update(ladder=NO_LADDER)
        elif exactness.facts.get("ladder") == NO_LADDER:
            exactness.update(ladder=SOME_LADDER)

    def _report_untracked(self, untracked: UntrackedState) -> None:
        state, stepped = self._state, self._optimizers.take_stepped()
        running = [state.foreign_loader, *(loader.running for loader in state.followed.values())]
        loaders = [loader for loader in running if loader is not None]
        generators = [item for loader in loaders for item in loader.generators]
        # A script that does not know of sessions cannot set its schedule to the step of this one.
        is_resumed = not self._is_guest and state.position.step > self._steps
        # On all ranks, which are at the same step: a `state_dict` may be collective. One of them tells.
        found = untracked.look(state.tracked.things, stepped, generators, is_resumed=is_resumed)
        if state.member.rank:
            return
        # A loader that is read again after a resume may hold further ones, which it alone knows.
        if not loaders and untracked.reads_unknown_loader():
            found.append("the place in a DataLoader (session.follow keeps it)")
        if not found:
            return
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        advice = f"give it to {self._tracks_by}, or a resume begins it anew, unless the script restores it"
        text = f"{', '.join(found[:MOST_NAMED])}{more}: changes from step to step and is not saved; {advice}"
        state.exactness.update(untracked=text)
        if new := [name for name in found if name not in self._warned]:
            self._warned.update(new)
            print(f"kgorch: {', '.join(new)}: changes from step to step and is not saved; {advice}", flush=True)
