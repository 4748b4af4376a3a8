"""Python's garbage collector, out of the way where training waits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

USUAL, SELDOM = gc.get_threshold(), (50_000, 20, 20)


def seldom() -> None:
    """While things are imported, which make many objects and drop few: a sixth of PyTorch's time went into looking for some."""
    gc.set_threshold(*SELDOM)


def as_usual() -> None:
    if gc.get_threshold() == SELDOM:  # the script may have one of its own
        gc.set_threshold(*USUAL)


@contextmanager
def paused() -> Iterator[None]:
    """No collection starts meanwhile: a full one goes through all that PyTorch has made, tens of milliseconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
