"""Room for the frames of Python's calls.

CPython 3.11 and later keeps the frames of a thread in pieces of 16 kB. It takes a piece from the kernel when a call does not fit
into the last one, and gives it back when that call returns. So a loop that makes its calls just where a piece ends pays for both,
and for page faults, each time: 7 µs a call instead of 0.1. At which depth of the stack that is, is chance: under kgorch, whose
frames are in it, a step of Lightning took 0.4 ms more. A call whose own frame is large has a large piece, which holds all frames
below it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

SLOTS = 1 << 16
"""Of the large frame, 8 bytes each: CPython doubles a piece until the frame fits, to 1 MiB, so half of it is left for other frames.
Memory is used by frames that are used, and not by this one."""


def _call(function: Callable[[], Result]) -> Result:
    return function()


call_with_room = types.FunctionType(_call.__code__.replace(co_stacksize=SLOTS), globals(), "call_with_room")
"""Calls a function without arguments, and returns what it returns."""
