"""A training loader of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kgorch.worker.data.followed_loader import FollowedLoader


class TrainingLoader(FollowedLoader):
    """A training loader.

    Attributes:
        is_open: it gives its batches. Before the state is restored it gives none: of a loader without a length the Trainer reads
            one batch ahead when it creates the iterators.
        is_over: its next iteration gives none: it was at its end in the epoch that continues.
    """

    is_open = is_over = False

    @property
    def loader(self) -> Any:
        """The one that is followed."""
        return self._loader

    @property
    def has_no_length(self) -> bool:
        try:
            return len(self) < 0
        except TypeError:
            return True

    def leave(self) -> None:
        """The epoch is over: of a loader with a length nobody asks for a batch after the last one."""
        if self.running is not None and not self.running.is_over:
            self._end()

    def __iter__(self) -> Iterator[Any]:
        is_over, self.is_over = self.is_over, False
        return super().__iter__() if self.is_open and not is_over else iter(())
