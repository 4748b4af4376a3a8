"""When memory is watched: down before it runs out, up when there was room for long, and no flapping."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.memory.memory_pressure import (
    HIGH,
    LOW,
    SETTLE_S,
    MemorySample,
    PressureState,
    decide,
    memory_use,
)


def _told(looks, *, tries=0, climb_after_s=600.0):
    """What a second-by-second series of looks leads to, as (second, what)."""
    watch, said = PressureState(0.0), []
    for second, seen in enumerate(looks):
        watch, what = decide(watch, seen, float(second), climb_after_s=climb_after_s, tries=tries)
        if what:
            said.append((second, what))
    return said


def test_memory_that_stays_full_takes_a_rung_once_and_then_waits_to_see():
    said = _told([MemorySample(0.5)] * 30 + [MemorySample(0.99)] * 10)
    assert said == [(32, "down")]


def test_a_moment_that_passes_takes_no_rung():
    assert _told([MemorySample(0.5)] * 30 + [MemorySample(0.99), MemorySample(0.99), MemorySample(0.7)] * 20) == []


def test_an_allocator_that_tries_again_and_again_takes_a_rung():
    retries = [MemorySample(0.8, 0)] * 30 + [MemorySample(0.8, count) for count in (1, 1, 2, 2, 3, 3)]
    assert _told(retries) == [(34, "down")]
    assert _told([MemorySample(0.8, count // 40) for count in range(200)]) == []  # seldom is no trouble


def test_long_room_climbs_once_and_not_while_it_is_being_seen():
    said = _told([MemorySample(0.3)] * 1300)
    assert [what for _, what in said] == ["up", "up"]
    assert said[0][0] == 600 and said[1][0] >= 1200


def test_what_came_down_twice_is_not_climbed_to_again():
    assert _told([MemorySample(0.3)] * 5000, tries=2) == []
    assert _told([MemorySample(0.3)] * 5000, climb_after_s=None) == []


def test_room_must_last_without_a_break():
    assert _told(([MemorySample(0.3)] * 500 + [MemorySample(0.6)]) * 5) == []


def test_what_was_not_measured_decides_nothing():
    assert _told([MemorySample(None)] * 3000) == []


@given(st.lists(st.tuples(st.floats(0, 1.2) | st.none(), st.integers(0, 5) | st.none()), max_size=300))
def test_changes_are_never_closer_than_it_takes_to_settle(looks):
    said = _told([MemorySample(*item) for item in looks], climb_after_s=30.0)
    seconds = [0, *(second for second, _ in said)]
    assert all(later - earlier >= SETTLE_S for earlier, later in pairwise(seconds))


def test_a_ranks_share_counts_its_own_need_and_what_others_hold_of_its_gpu():
    values = {
        "gpu0.mem_total": 100.0, "gpu0.mem_used": 99.0,  # nobody of ours
        "gpu1.mem_used": 90.0, "rank0.total": 100.0, "rank0.peak": 50.0, "rank0.reserved": 80.0,
        "gpu2.mem_used": 70.0, "rank1.total": 100.0, "rank1.peak": 20.0, "rank1.reserved": 30.0, "rank1.alloc_retries": 2.0,
    }  # fmt: skip
    assert memory_use(values, device="cuda", gpus=[1, 2]) == MemorySample(0.6, 2)  # a cache that is held is no need
    assert memory_use(values, device="cuda", gpus=[None]) == MemorySample(0.5)
    assert memory_use({"gpu0.mem_used": 99.0, "gpu0.mem_total": 100.0}, device="cuda", gpus=[0]) == MemorySample(None)
    host = {"host.mem_total": 4.0, "host.mem_used": 4.0, "rank0.rss": 1.0, "rank1.rss": 2.0}
    assert memory_use(host, device="cpu", gpus=[None, None]) == MemorySample(
        0.75
    )  # what others and the page cache hold is no need of ours
    assert memory_use({}, device="cpu", gpus=[None]) == memory_use({}, device="cuda", gpus=[0]) == MemorySample(None)
    assert LOW < HIGH


def test_ranks_of_another_node_fill_its_memory_and_not_this_ones():
    values = {"host.mem_total": 100.0} | {f"rank{rank}.rss": 30.0 for rank in range(4)}
    nodes = {"gpus": [None] * 4, "nodes": [0, 0, 1, 1]}
    assert memory_use(values, device="cpu", **nodes) == MemorySample(0.6), "what is not known of a node decides nothing"
    assert memory_use(values | {"node1.host.mem_total": 80.0}, device="cpu", **nodes) == MemorySample(0.75)


T4_BYTES, T4_FOR_PYTORCH = 15360 << 20, 15095 << 20
"""What NVML says a T4 has, and PyTorch: the driver reserves the difference, and NVML counts it as used."""


def test_a_training_that_fits_a_t4_is_not_ordered_down():
    peak = 0.931 * T4_FOR_PYTORCH
    values = {
        "gpu0.mem_total": float(T4_BYTES),
        "gpu0.mem_used": peak + (450 << 20),  # with 450 MiB of the driver, CUDA's context and NCCL
        "rank0.total": float(T4_FOR_PYTORCH),
        "rank0.peak": peak,
        "rank0.reserved": peak,
    }
    share = memory_use(values, device="cuda", gpus=[0])
    assert share.used_share < 0.945
    assert _told([share] * 60) == []
    assert memory_use(values, device="cuda", gpus=[None]).used_share < 0.945, (
        "a GPU that NVML does not tell of has its peak alone"
    )


def test_ranks_that_share_a_gpu_fill_it_together():
    values = {"gpu0.mem_total": 100.0, "gpu0.mem_used": 90.0}
    for rank in (0, 1):
        values |= {f"rank{rank}.total": 98.0, f"rank{rank}.peak": 30.0, f"rank{rank}.reserved": 40.0}
    assert memory_use(values, device="cuda", gpus=[0, 0]) == MemorySample(0.7), "both peaks, and 10 that are neither's"
    assert memory_use(values, device="cuda", gpus=[None, None]) == MemorySample(30 / 98)
