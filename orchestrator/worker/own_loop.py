"""Steps of a loop that the script, or another library, owns: `session.boundary()` and `session.follow()`.

The script calls `boundary` where a step begins. The step before it is over then: it is counted, and all ranks save or stop here
when it is time. At the first call after a resume the random states of the save are set, so that the step begins as it would have
begun.
"""

from __future__ import annotations

from kgorch.errors import KgorchError
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.session_state import SessionState
from kgorch.worker.step_loop import StepLoop


class OwnLoop:
    """Counts the steps of such a loop.

    Args:
        loop: what a step's begin and end have in common with `session.steps`.
    """

    def __init__(self, state: SessionState, loop: StepLoop) -> None:
        self._state, self._loop = state, loop
        self._is_begun = False
        self._samples: int | None = None
        self._used = 0  # samples of the followed loaders at the newest boundary

    def boundary(
        self, *, samples: int | None = None, epoch: int | None = None, open_batches: int | None = None
    ) -> None:
        """See Session.boundary.

        Args:
            open_batches: see FollowedLoader.
        """
        state, at = self._state, self._state.position
        for loader in state.followed.values():
            loader.at_boundary(is_first=not self._is_begun, open_batches=open_batches)
        # Before the step before it is ended: what is saved there goes on with this epoch, as the loaders do.
        if epoch is not None:
            at.epoch = epoch
        elif state.followed and not self._loop.counts_epochs:
            at.epoch = next(iter(state.followed.values())).epoch
        if self._is_begun:
            self._loop.end_step(self._samples_of_step())
            self._samples = samples
        else:
            self._samples = samples
            self._begin()
        self._loop.set_epoch_of_metrics()
        if state.quick and (at.step or state.probe.is_probe) and state.probe.own_step(self._share, at.steps_total):
            raise SystemExit(
                0
            )  # the quick test, or the probe, of this stage is over; the rest of the script is not run
        self._loop.begin_step()

    def close(self) -> None:
        """The loop is over: count its last step. Where an earlier session has done all, what follows begins as it did there."""
        if self._is_begun:
            self._is_begun = False
            for loader in self._state.followed.values():
                loader.at_boundary(is_first=False, open_batches=0)
            self._loop.end_own(self._samples_of_step())
            if not self._loop.counts_epochs:
                self._end_epoch()
        elif self._loop.is_trained:
            self._loop.restore_random_states()

    def _end_epoch(self) -> None:
        """Count the last epoch, which no boundary follows."""
        at, first = self._state.position, next(iter(self._state.followed.values()), None)
        if first is not None:
            at.epoch += max(first.epochs_done - first.epoch, first.has_given_all)
        elif at.epoch + 1 == at.epochs_total:  # session.expect(epochs=…)
            at.epoch += 1

    def _begin(self) -> None:
        loop = self._loop
        if loop.is_trained:
            raise KgorchError(
                "the stage is finished, and its loop takes a further step",
                next_step="guard the loop with `if not session.resumed.is_finished:`, or count its steps from session.step",
            )
        self._is_begun = True
        loop.begin_own(self._share)
        self._state.division.refuse("session.boundary() gives no batches, so they cannot be divided")
        self._state.report_loader()

    def undo_begin(self) -> None:
        """The first step was not taken: the next boundary is the first one."""
        self._is_begun = self._loop.in_step = False

    @property
    def _share(self) -> int:
        """Samples of this rank's share of a step; 0 where it is not known."""
        of_loaders = max((loader.share for loader in self._state.followed.values()), default=0)
        return of_loaders or (self._samples or 0) // self._state.member.world_size

    def _samples_of_step(self) -> int:
        if self._samples is not None:
            return self._samples
        before, self._used = self._used, sum(loader.samples_used for loader in self._state.followed.values())
        return self._used - before

    def follow(self, loader: object, name: str | None) -> FollowedLoader:
        """See Session.follow."""
        state = self._state
        name = name or f"loader{len(state.followed)}"
        if name in state.followed:
            raise KgorchError(f"session.follow(name={name!r}) was called twice", next_step="give each loader a name")
        followed = FollowedLoader(loader, state.member.world_size, state.member.device)  # type: ignore[arg-type]
        self.add(followed, name)
        return followed

    def add(self, followed: FollowedLoader, name: str) -> None:
        """Keep the position of this loader, in place of one that had the name before."""
        self.drop(name)
        self._state.followed[name] = followed
        self._loop.resume_followed()

    def drop(self, name: str) -> None:
        """Follow the loader of this name no longer, if there is one."""
        if (dropped := self._state.followed.pop(name, None)) is not None:
            dropped.at_boundary(is_first=False, open_batches=0)  # all that it has given is used
            self._used -= dropped.samples_used
