"""A loader that `accelerator.prepare` has returned, as the script iterates it under kgorch."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kgorch.worker import session_end
from kgorch.worker.audit import enumerations
from kgorch.worker.data.followed_loader import FollowedLoader
from kgorch.worker.data.loader_fast_forward import LoaderFastForward, LoaderState

if TYPE_CHECKING:
    from kgorch.worker.integrations.accelerate_carrier import AccelerateCarrier

WITHIN = "a loader that was prepared while another one was iterated begins anew in each session"

TWICE = "an epoch whose loader is iterated once more before its first step is saved at its end alone"


class StepLoader(FollowedLoader):
    """A loader that `prepare` has returned.

    Args:
        first_epoch: number of its first epoch; that of the training for a loader that is prepared anew for each epoch.

    Attributes:
        inner: Accelerate's own loader.
        name: in the checkpoint.
        number: of those that were prepared outside of all iterations; None for others.
        iterations: how often the script has iterated it, within no other iteration.
        is_forgotten: it was over, and checkpoints do not hold it any more.
        is_continued: its running epoch began in an earlier session.
        is_kept: it was iterated again after that, so it is not forgotten twice.
    """

    def __init__(
        self, loader: Iterable[Any], carried: AccelerateCarrier, name: str, number: int | None = None, first_epoch: int = 0
    ) -> None:  # fmt: skip
        super().__init__(loader, carried.session.world_size, carried.session.device)
        self.inner: Any = loader
        self.carrier, self.name, self.number, self.first_epoch = carried, name, number, first_epoch
        self.iterations = self._active = 0
        self._first: list[Any] = []
        self._begun = 0  # epochs that have begun
        self.is_continued = self.is_forgotten = self.is_kept = False
        self.start_at(first_epoch, 0)

    @property
    def order(self) -> int | None:
        """Accelerate's count of the epochs that were read to their end, unless the script has set another number."""
        return getattr(self.inner, "iteration", None)

    def resume(self, saved: LoaderState, ranks_before: int) -> None:
        super().resume(saved, ranks_before)
        order = saved.get("order_epoch")
        if self.order is not None:
            self.inner.iteration = order if type(order) is int else self.epoch

    @property
    def place(self) -> dict[str, Any] | None:
        place = super().place
        return place and {**place, "order_epoch": self.order}

    @property
    def samples_used(self) -> int:
        """Of a training loader; those of an evaluation are no samples of the training."""
        return super().samples_used if self.carrier.is_driver(self) else 0

    def before_batch(self) -> None:
        self.carrier.before_batch(self)

    @property
    def is_over(self) -> bool:
        """It was iterated once at most, and is not now."""
        return self.iterations <= 1 and not self._active and not self.is_kept

    @property
    def is_at_end(self) -> bool:
        """The running epoch has given its last batch; false also where the loader does not tell."""
        return bool(self.running and self.running.batches_used and getattr(self.inner, "end_of_dataloader", False))

    def __iter__(self) -> Iterator[Any]:
        """What it gives is decided at the first batch: the script may have made the iterator long before."""
        carried = self.carrier
        number = carried.enter(self)
        self._active += 1
        try:
            what = carried.gives(self, number)
            if number:
                session_end.empty_epoch = number - 1  # until it gives a batch
            while what == "one":
                within, is_left = carried.place_of_outer, True
                try:
                    yield from self._one(number)
                    is_left = False
                finally:
                    what = carried.after_one(self, number, within)
                    if is_left and what == "place":  # what is left of the epoch is nothing, but it has to be over
                        collections.deque(self._followed(number), 0)
            if what == "place":
                yield from self._followed(number)
            elif what == "all":
                session_end.empty_epoch = None
                yield from self.inner
        finally:
            self._active -= 1
            carried.leave(self, number)

    def _one(self, number: int) -> Iterator[Any]:
        """The first batch, as the last one of an epoch: a window of accumulation ends with it.

        It is read once, since many epochs may be done, and reading starts the loading processes.
        """
        if not self._first:
            batches = iter(self.inner)
            self._first = list(itertools.islice(batches, 1))
            del batches
            self._end_inner()
        self._begun += 1
        this = self._begun
        if number and hasattr(self.inner, "begin"):
            self.inner.begin()
            self.inner.end_of_dataloader = True  # until it begins again
        session_end.empty_epoch = None
        try:
            given = copy.deepcopy(self._first)  # the script may change it
        except Exception:  # of any object that a batch may hold
            given, self._first = self._first, []
        try:
            yield from given
        finally:
            if number and this == self._begun:  # and not an iterator that the script has kept until now
                self._end_inner()

    def _end_inner(self) -> None:
        """Accelerate's loader is in no epoch, for `Accelerator.accumulate` and `gather_for_metrics`."""
        state = getattr(self.inner, "gradient_state", None)
        if state is not None and any(item is self.inner for item in state.dataloader_references):
            state._remove_dataloader(self.inner)

    def forget_first(self) -> None:
        """Free the batch that was kept for epochs that are done."""
        self._first = []

    def _followed(self, number: int) -> Iterator[Any]:
        """The batches from its place on. The carrier knows where the script leaves them."""
        running, before, session = None, self.next_batch, self.carrier.session
        is_whole, is_counted = not before, self._ranks_before == self._world
        self.is_continued = self._saved is not None and not is_whole
        self._begun += 1
        is_within, step = self.name.startswith("within"), session.step
        try:
            for batch in itertools.islice(super().__iter__(), self._rest()):
                if number and number != self.iterations:
                    session.note_exactness(twice=TWICE)
                if is_within and session.step != step:
                    session.note_exactness(within=WITHIN)
                if running is None and self.is_continued:
                    self.carrier.windows.sort()
                    if is_counted:
                        enumerations.count_on(before)
                running, session_end.empty_epoch = self.running, None
                yield batch
        except GeneratorExit:
            self._leave(running, number if is_whole else 0)
            raise
        self._leave(running, number if is_whole else 0)

    def _rest(self) -> int | None:
        """Batches of an epoch that continues, where an iterator around it has left all before it at one batch; None for all.

        Its count begins anew, as that of `zip(range(100), loader)`.
        """
        if self._saved is None or self._ranks_before != self._world:
            return None
        left_at = self.carrier.left_at.get(self.name, 0)
        is_left = 0 < self.next_batch < left_at and enumerations.is_bounded()
        return left_at - self.next_batch if is_left else None

    def _leave(self, running: LoaderFastForward | None, whole: int) -> None:
        """The epoch is over. A loop that leaves it before its end goes on with the next one, also after a resume.

        Args:
            whole: number of the iteration; 0 for the rest of one, where a count of the script's own begins anew.
        """
        batch = 0
        if running is not None and running is self.running and not running.is_over:
            batch = running.batches_used + running.back
            self._end()
        self.carrier.note_left(self, batch, whole)


def follow_in_place(loader: Any, carried: AccelerateCarrier, name: str) -> StepLoader:
    """Follow a loader that the script iterates itself: its class becomes one whose `__iter__` is that of the StepLoader."""
    cls = type(loader)
    original = object.__new__(cls)
    original.__dict__ = loader.__dict__  # the same attributes: `set_epoch` of one is that of both
    followed = StepLoader(original, carried, name)
    # Accelerate's loaders have a property `__class__`, which cannot be assigned.
    vars(object)["__class__"].__set__(
        loader, type(cls.__name__, (cls,), {"__iter__": lambda _: iter(followed), "followed": followed})
    )
    return followed
