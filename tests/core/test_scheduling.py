"""Who goes next, told in stories; and how long what cannot begin waits."""

from __future__ import annotations

import pytest

from kgorch.core.scheduling import (
    BACKOFF,
    RESERVE_AFTER_S,
    FreeDevices,
    QueuedRun,
    back_off_s,
    choose,
    fits,
    has_room,
)


def machine(gpus: int = 2, free: int = 2, **changes) -> FreeDevices:
    return FreeDevices(
        **({"gpus": gpus, "free": free, "shared": 0, "at_once": None, "running": 0, "sharing": 0} | changes)
    )


def one(number: int = 1, ranks: int | None = 1, *, share: bool = False, waits_s: float = 0.0) -> QueuedRun:
    return QueuedRun(number, ranks, share, waits_s)


def test_the_first_in_the_order_that_fits_goes_next():
    assert choose([one(1), one(2)], machine()) == 1
    assert choose([one(1, ranks=2), one(2)], machine(free=1)) == 2


def test_nobody_goes_where_nothing_is_free():
    assert choose([one(1), one(2, ranks=None)], machine(free=0, running=2)) is None


def test_what_becomes_free_is_kept_for_a_large_run_that_has_waited_long():
    large = one(1, ranks=2, waits_s=RESERVE_AFTER_S)
    assert choose([large._replace(waits_s=RESERVE_AFTER_S - 1), one(2)], machine(free=1)) == 2
    assert choose([large, one(2)], machine(free=1)) is None
    assert choose([large, one(2)], machine(free=2)) == 1


def test_a_run_before_the_large_one_in_the_order_is_not_held_up_by_it():
    large = one(2, ranks=2, waits_s=RESERVE_AFTER_S)
    assert choose([one(1), large], machine(free=1)) == 1


def test_a_run_of_all_gpus_waits_until_all_are_free():
    assert not fits(one(ranks=None), machine(free=1))
    assert fits(one(ranks=None), machine(free=2))


def test_a_run_of_more_gpus_than_there_are_begins_when_all_are_free():
    assert fits(one(ranks=8), machine(free=2)) and not fits(one(ranks=8), machine(free=1))


def test_without_a_gpu_one_session_runs_at_once_or_as_many_as_a_person_allows():
    cpu = machine(gpus=0, free=0)
    assert fits(one(ranks=2), cpu) and not fits(one(), cpu._replace(running=1))
    assert fits(one(), cpu._replace(running=1, at_once=2))


def test_runs_that_share_go_beside_one_another_and_never_beside_one_that_does_not():
    shared = machine(gpus=1, free=0, shared=1, sharing=1)
    assert fits(one(share=True), shared) and not fits(one(), shared)
    assert not fits(one(share=True), shared._replace(shared=0))


def test_so_many_share_a_device_and_no_more():
    assert not fits(one(share=True), machine(gpus=1, free=0, shared=1, sharing=4))
    assert not fits(one(share=True), machine(gpus=1, free=0, shared=1, sharing=1, at_once=1))


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_there_is_room_exactly_where_the_smallest_run_fits(gpus):
    busy = machine(gpus=gpus, free=0, running=max(gpus, 1))
    for share in (False, True):
        assert has_room(machine(gpus=gpus, free=gpus), share=share)
    assert not has_room(busy, share=False) and not has_room(busy._replace(sharing=99), share=True)


def test_the_back_off_doubles_up_to_an_hour_and_spreads():
    assert [back_off_s(tries, 0.5) for tries in (1, 2, 3)] == [
        BACKOFF.first_s,
        2 * BACKOFF.first_s,
        4 * BACKOFF.first_s,
    ]
    assert back_off_s(50, 0.5) == BACKOFF.longest_s
    assert back_off_s(1, 0.0) == pytest.approx(0.8 * BACKOFF.first_s) and back_off_s(1, 1.0) == pytest.approx(
        1.2 * BACKOFF.first_s
    )
