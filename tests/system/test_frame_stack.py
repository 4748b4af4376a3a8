"""Room for Python's frames: no depth at which each call maps memory."""

from __future__ import annotations

import resource
import sys

import pytest

from kgorch.system.frame_stack import call_with_room

CALLS = 300


def _leaf() -> int:
    return 1


def _at_depth(depth: int) -> None:
    if depth:
        _at_depth(depth - 1)
        return
    for _ in range(CALLS):
        _leaf()


def _most_faults() -> int:
    """The most page faults of CALLS calls, over the depths at which they are made."""
    found = []
    for depth in range(300):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        _at_depth(depth)
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return max(found)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="of CPython")
def test_a_call_with_room_has_no_depth_at_which_calls_map_memory_each_time():
    _most_faults()  # what is touched for the first time
    assert _most_faults() >= CALLS, "CPython has mended it: the module is not needed any more"
    assert call_with_room(_most_faults) < CALLS // 4


def test_what_the_function_returns_or_raises_comes_through():
    assert call_with_room(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_with_room(lambda: 1 / 0)
