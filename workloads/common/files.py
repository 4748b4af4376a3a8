"""Files of a data set: read, or said which one is broken; and left out only where the plan says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image

from kgorch import KgorchError

if TYPE_CHECKING:
    from kgorch import Session

Item = TypeVar("Item")


class DataError(KgorchError):
    """What lies on disk is not what the data set promises."""


def picture(path: Path, mode: str = "RGB") -> np.ndarray:
    """A picture as uint8: [H, W, 3] for "RGB", [H, W] for "L". Raises DataError when it cannot be read."""
    try:
        with Image.open(path) as found:
            return np.asarray(found.convert(mode))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        # Pillow's PNG reader calls a broken chunk a SyntaxError
        raise DataError(
            f"{path.name} cannot be read", f"{path}: expected a picture, found: {problem}",
            next_step="fetch this file again, or leave such samples out: skip_broken = true",
        ) from problem  # fmt: skip


def readable(
    items: Sequence[Item], read: Callable[[Item], object], *, skip_broken: bool
) -> tuple[list[Item], list[str]]:
    """The items that can be read whole, and the errors of those that cannot, in words.

    Without `skip_broken` all are taken as they are, unread: what is broken then ends the training, named, when it is its turn.
    """
    if not skip_broken:
        return list(items), []
    sound, broken = [], []
    for item in items:
        try:
            read(item)
            sound.append(item)
        except DataError as problem:
            broken.append(str(problem))
    return sound, broken


def tell_left_out(session: Session, errors: Sequence[str]) -> None:
    """Count the samples that were left out, and name them on the first rank's output."""
    session.report(skipped=len(errors))
    if session.rank == 0:
        for said in dict.fromkeys(errors):  # several samples may share a file
            print(f"left out: {said}", flush=True)
