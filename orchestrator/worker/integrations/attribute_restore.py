"""When the attributes of the script's objects are put back, where a session continues within an epoch.

The hooks with which an epoch begins run once more, though they had run before the save. What they set is put back behind them; what
the loader reads by, when it begins; and all of it at the first step, at which it was saved: a data set or `collate_fn` that counts
has counted the batches that were read again. While it reads them again it has the attributes with which the epoch had begun.
"""

from __future__ import annotations

from typing import Any

from kgorch.worker.integrations.own_attributes import OwnAttributes


class AttributeRestore:
    """Of one training.

    Attributes:
        attributes: None before the training begins.
    """

    def __init__(self) -> None:
        self.attributes: OwnAttributes | None = None
        self._saved: list[list[Any]] = []
        # of the objects of each loader: their states when the running epoch began, and marks before they are read by once more
        self._of_epoch: dict[str, list[list[Any]]] = {}
        self._marks: dict[str, list[dict[str, Any]]] = {}

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        attributes = self.attributes.state() if self.attributes else []
        return {"attributes": attributes, "attributes_of_epoch": self._of_epoch}

    def load(self, saved: dict[str, Any]) -> None:
        """What `state` has returned, also that of an earlier version."""
        self._saved = saved.get("attributes", [])
        of_epoch = saved.get("attributes_of_epoch")
        self._of_epoch = of_epoch if isinstance(of_epoch, dict) else {}

    def begin(self, *, is_rest: bool) -> None:
        """The hooks of an epoch's begin have run, of its rest; or they are to run, of a whole one."""
        if self.attributes and self._saved:
            self.attributes.put_back(self._saved, loader="" if is_rest else None, is_rest=is_rest)
        if not is_rest:
            self._saved = []

    def begin_loader(self, loader: str, *, begins_again: bool) -> None:
        """A loader begins an epoch.

        Args:
            loader: see `Root`.
            begins_again: it reads the rest of an epoch from the beginning on.
        """
        self._marks.pop(loader, None)
        if self.attributes and self._saved:
            self.attributes.put_back(self._of_epoch.get(loader) if begins_again else self._saved, loader=loader)
            if begins_again:
                self._marks[loader] = self.attributes.marks_of(loader)
        elif self.attributes:
            self._of_epoch[loader] = self.attributes.state_of(loader)

    def end_reading_again(self, loader: str) -> None:
        """What an epoch had used is read. What that has not changed hangs on the steps: it is as it was at the save."""
        if self.attributes and loader in self._marks:
            self.attributes.put_back(self._saved, loader=loader, marks=self._marks[loader])

    def begin_step(self) -> None:
        """A step begins; the first one of a rest is the one before which the checkpoint was written."""
        if self.attributes and self._saved:
            self.attributes.put_back(self._saved)
            self._saved = []
