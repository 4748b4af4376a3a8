"""Which loader of a script around Accelerate ends the windows of accumulation: of those that it is in, the one that began last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kgorch.worker.integrations.accelerate_loader import StepLoader
from kgorch.worker.session import Session

WINDOWS = "where a loader is kept over epochs, windows of accumulation end after a resume as they did if it is asked in each step"


class AccumulationWindows:
    """The order in which the running epochs have begun, over sessions.

    Args:
        loaders: returns those that are followed.
    """

    def __init__(self, accelerator: Any, session: Session, loaders: Callable[[], Iterable[StepLoader]]) -> None:
        self._accelerator, self._session, self._loaders = accelerator, session, loaders
        self._former: list[str] = session.resumed.get("active", [])
        self._noted = self._former

    def note(self) -> None:
        """Remember the order where there are several."""
        names = [loader.name for loader in self._running()]
        if (names := names if len(names) > 1 else []) != self._noted:
            self._noted = names
            self._session.remember(active=names)
            if names and self._accelerator.gradient_accumulation_steps > 1:
                self._session.note_exactness(windows=WINDOWS)

    def sort(self) -> None:
        """An epoch of an earlier session goes on. It began before those of this one, in the order of then."""
        state = self._accelerator.gradient_state
        place = {name: number for number, name in enumerate(self._former)}
        continued = [loader for loader in self._running() if loader.is_continued]
        before = [loader.inner for loader in sorted(continued, key=lambda loader: place.get(loader.name, 0))]
        items = [item for item in state.dataloader_references if item is not None]
        for item in items:
            state._remove_dataloader(item)
        for item in (*before, *(item for item in items if not any(item is one for one in before))):
            state._add_dataloader(item)

    def _running(self) -> list[StepLoader]:
        """The followed loaders in whose epochs the script is, in the order in which they have begun."""
        known = {id(loader.inner): loader for loader in self._loaders()}
        begun = [id(item) for item in self._accelerator.gradient_state.dataloader_references if id(item) in known]
        # One that was left early may be there more than once.
        return [known[item] for number, item in enumerate(begun) if item not in begun[number + 1 :]]
