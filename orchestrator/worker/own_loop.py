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
        self._driver: FollowedLoader | None = None  # whose epochs are those of the loop
        self._epochs_before = 0  # epochs of other loaders

    def boundary(
        self, *, samples: int | None = None, epoch: int | None = None, open_batches: int | None = None
    ) -> None:
        """See Session.boundary.

        Args:
            open_batches: see FollowedLoader.
        """
        state, at = self._state, self._state.position
        self._see_loaders(open_batches)
        # Before the step before it is ended: what is saved there goes on with this epoch, as the loaders do.
        if epoch is not None:
            at.epoch = epoch
        elif self._driver is not None and not self._loop.counts_epochs:
            at.epoch = self._epochs_before + self._driver.epoch
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

    def _see_loaders(self, open_batches: int | None) -> None:
        """A loader whose batches come before the boundary drives the loop. Another may take its place, as one with larger batches
        in later epochs; one that is read within the steps does not."""
        loaders, is_first = list(self._state.followed.values()), not self._is_begun
        if len(loaders) == 1 and loaders[0] is self._driver and self._driver.running is not None:  # nearly always
            self._driver.at_boundary(is_first=is_first, open_batches=open_batches)
            return
        given = [loader for loader in loaders if loader.has_given]
        driving = [loader for loader in given if is_first or loader.open_batches]
        for loader in loaders:
            is_unknown = open_batches is None and loader.open_batches is None and loader not in driving
            is_within = is_unknown and (bool(driving) if loader.running is not None else not given)
            loader.at_boundary(is_first=is_first, open_batches=0 if is_within else open_batches)
        driving = [loader for loader in given if loader.open_batches]
        if self._driver is None or (driving and self._driver not in driving):
            self._drive(next(iter(driving or loaders), None))

    def _drive(self, driver: FollowedLoader | None) -> None:
        at = self._state.position
        if driver is not None and driver is not self._driver and len(self._state.followed) > 1:
            is_next = self._driver is not None  # else the place is that of the checkpoint
            self._epochs_before = at.epoch + is_next - driver.epoch
        self._driver = driver

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
        at, driver = self._state.position, self._driver
        if driver is not None:
            at.epoch += max(driver.epochs_done - driver.epoch, driver.has_given_all)
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
        before, self._used = self._used, 0
        for loader in self._state.followed.values():
            self._used += loader.samples_used
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
