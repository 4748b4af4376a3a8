"""Whether a dataset changes as it is read. Then a batch hangs on those before it, and a resume has to read these again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kgorch.worker.data.dataset_memory import remembered_values

BATCHES = 4
"""After so many a dataset is compared with itself before the first."""


class DatasetChanges:
    """What a dataset and its `collate_fn` remember before the first batch, and after some (`remembered_values`).

    Args:
        is_known: it was found unchanged before, and is taken for it until it is compared again.

    Attributes:
        is_unchanged: nothing has changed; false as long as that is not known.
        changed: path of something that has, as `dataset.count`, or why that is not known; empty where nothing has.
    """

    def __init__(self, dataset: Any, collate_fn: Any, *, is_known: bool = False) -> None:
        self.is_unchanged, self.changed = is_known, ""
        self._things, self._batches = SimpleNamespace(dataset=dataset, collate_fn=collate_fn), 0
        self._before = self._now()

    def count_batch(self) -> None:
        """A batch has been read."""
        self._batches += 1
        if self._batches == BATCHES:
            before, now, self._before = self._before, self._now(), {}
            changed = min((path for path in before.keys() | now.keys() if _differ(before, now, path)), default="")
            self.changed = changed.removeprefix("loader.")
            self.is_unchanged = not self.changed

    def _now(self) -> dict[str, Any]:
        try:
            return remembered_values(self._things)
        except Exception as error:  # of objects of any kind: what cannot be looked at may change
            return {f"{type(error).__name__} at a look: {error}"[:300]: object()}


def _differ(before: dict[str, Any], now: dict[str, Any], path: str) -> bool:
    if path not in before or path not in now:
        return True
    try:
        return before[path] is not now[path] and bool(before[path] != now[path])
    except Exception:  # of a number or text of a class of the script's
        return True
