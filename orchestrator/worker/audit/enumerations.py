"""Counts of a script around a loader: in an epoch that a resume continues, an `enumerate` counts on instead of beginning anew.

A script decides by it when its optimizer steps (`if (i + 1) % 4 == 0`), so that other weights would come of another count.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import itertools
from collections.abc import Callable, Container, Generator, Iterator
from types import FrameType
from typing import Any, cast

from kgorch.worker.script_code import is_of_script


class CountedBatches(Iterator[Any]):
    """What `session.steps` returns: the batches that are still to do. Its length is that of the whole epoch, or of all epochs.

    Args:
        count: returns that length. Raises TypeError where the loader has none.
    """

    def __init__(self, batches: Generator[Any, None, None], count: Callable[[], int]) -> None:
        self._batches, self._count = batches, count

    def __next__(self) -> Any:
        return next(self._batches)

    def __bool__(self) -> bool:
        """As of a generator: also without a length, and with one of 0."""
        return True

    def close(self) -> None:
        self._batches.close()

    def __len__(self) -> int:
        return self._count()

    @property
    def gi_frame(self) -> FrameType | None:
        """As of a generator."""
        return cast(FrameType | None, getattr(self._batches, "gi_frame", None))


def count_on(batches: int, only: Container[int] | None = None) -> None:
    """Have each `enumerate` around the loader that is asked for a batch count on, after so many batches.

    Its count is an integer behind the head of the object; it is written where the object says the same number.

    Args:
        only: the counts that do, for with another one the script has begun at a place of its own; None for all.
    """
    for item in _around((enumerate,)) if batches else ():
        place = ctypes.c_ssize_t.from_address(id(item) + object.__basicsize__)
        if place.value == cast(tuple[Any, int], item.__reduce__()[1])[1] and (only is None or place.value in only):
            place.value += batches


def is_bounded() -> bool:
    """Whether what asks the loader for a batch may end by itself before it, with a count that begins anew in each session."""
    return bool(_around((zip, itertools.islice)))


def _around(kinds: tuple[type, ...]) -> list[Any]:
    """The objects of these types through which the script asks for a batch.

    Nothing of this may outlive the call: a loader's iterator that is left has to end at once. So its own frame is not in the set.
    """
    own, asked = inspect.currentframe(), set()
    frame = own and own.f_back
    del own
    while frame is not None and not is_of_script(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        asked.add(frame)
        frame = frame.f_back
    found = (item for item in gc.get_objects() if type(item) in kinds)
    return [item for item in found if any(getattr(one, "gi_frame", None) in asked for one in gc.get_referents(item))]
