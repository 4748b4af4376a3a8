"""What the figures of a training say: a story for every band and cause, and nothing that breaks it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kgorch.core.health.bottlenecks import TrainingSetup, advise, sparkline

GIB = 2**30
BUSY = {
    "gpu0.util": 92.0, "gpu0.mem_used": 12 * GIB, "gpu0.mem_total": 15 * GIB, "gpu0.power_w": 66.0, "gpu0.power_limit_w": 70.0,
    "gpu0.temp_c": 71.0, "gpu0.sm_mhz": 1500.0, "gpu0.throttle": 0.0, "host.cpu": 40.0, "host.cores": 4.0,
    "rank0.cpu": 60.0, "rank0.step_s": 0.3, "rank0.data_wait": 0.01,
}  # fmt: skip
TWO = {key.replace("0.", "1."): value for key, value in BUSY.items() if not key.startswith("host")}


def _of(*facts: TrainingSetup, **changes: float):
    row = BUSY | {key.replace("_", ".", 1): value for key, value in changes.items()}
    return advise([row] * 5, *facts)


@pytest.mark.parametrize(("util", "band"), [(97, "good"), (80, "good"), (79, "fair"), (60, "fair"), (59, "bad")])
def test_a_gpus_utilization_falls_into_a_band(util, band):
    found = _of(gpu0_util=util)
    assert (found.of, found.percent, found.band) == ("gpu", util, band)


def test_a_well_used_gpu_needs_no_change():
    assert _of().findings == ()


def test_samples_before_the_first_step_say_nothing_of_the_training():
    starting = {"gpu0.util": 0.0, "host.cpu": 100.0}
    assert advise([starting] * 50 + [BUSY] * 5).percent == 92


def test_waiting_for_data_without_loading_processes_asks_for_some_and_says_what_they_could_win():
    [found] = _of(TrainingSetup(workers=0, ranks=1), gpu0_util=30, rank0_data_wait=0.6).findings
    assert found.cause == "waiting_for_data" and found.change.startswith("num_workers = 4")
    assert found.saves == pytest.approx(0.6)
    assert found.figures["data_wait"] == pytest.approx(0.6) and "num_workers 0, ranks 1, cores 4" in found.what


def test_loading_processes_are_shared_out_over_the_ranks():
    found = advise([BUSY | TWO | {"rank0.data_wait": 0.5, "rank1.data_wait": 0.5}], TrainingSetup(workers=1, ranks=2))
    assert found.findings[0].change.startswith("num_workers = 2") and found.findings[0].saves == pytest.approx(0.5)


def test_more_loading_processes_than_full_cores_can_carry_are_too_many():
    [found] = _of(TrainingSetup(workers=8, ranks=1), gpu0_util=50, rank0_data_wait=0.4, host_cpu=98).findings
    assert found.change.startswith("num_workers = 4")


def test_cores_that_are_all_busy_loading_want_prepared_samples():
    [found] = _of(TrainingSetup(workers=4, ranks=1), gpu0_util=50, rank0_data_wait=0.4, host_cpu=98).findings
    assert "prepare samples once" in found.change


def test_loading_processes_that_rest_themselves_want_a_local_disk_and_once_they_have_it_larger_files():
    waiting = {"gpu0_util": 50, "rank0_data_wait": 0.4, "rank0_loaders": 20, "host_cpu": 15}
    assert "[data] cache" in _of(TrainingSetup(workers=2, ranks=1), **waiting).findings[0].change
    assert "larger files" in _of(TrainingSetup(workers=2, ranks=1, cached=True), **waiting).findings[0].change


def test_one_rank_that_waits_holds_up_the_others_and_is_named():
    row = BUSY | TWO | {"rank1.data_wait": 0.7}
    assert advise([row]).findings[0].what.startswith("rank1 waits for data 70% of the time, the others for it")


def test_a_full_core_an_idle_gpu_and_room_in_memory_mean_a_small_batch():
    [found] = _of(gpu0_util=40, rank0_cpu=99, gpu0_mem_used=3 * GIB).findings
    assert found.cause == "small_batch" and "twice as large" in found.change
    assert found.saves == pytest.approx(1 - 40 / 95)


def test_a_microbatch_that_memory_no_longer_needs_is_raised_to_the_same_result():
    [found] = _of(TrainingSetup(microbatch=4, batch=16), gpu0_util=40, rank0_cpu=99, gpu0_mem_used=3 * GIB).findings
    assert found.change.startswith("memory.microbatch = 8")


def test_a_full_core_and_an_idle_gpu_without_room_are_bound_by_the_cpu():
    [found] = _of(gpu0_util=40, rank0_cpu=99).findings
    assert found.cause == "cpu_bound" and "torch.compile" in found.change


def test_busy_gpus_at_half_their_power_wait_for_each_other():
    row = BUSY | TWO | {"gpu0.power_w": 28.0, "gpu1.power_w": 28.0}
    [found] = advise([row]).findings
    assert found.cause == "communication" and "40% of their power" in found.what


def test_ranks_that_neither_compute_nor_load_wait_for_each_other():
    row = BUSY | TWO | {"gpu0.util": 30.0, "gpu1.util": 30.0, "rank0.cpu": 20.0, "rank1.cpu": 20.0}
    [found] = advise([row]).findings
    assert found.cause == "communication"


def test_heat_is_told_from_the_power_cap_that_a_small_card_always_runs_at():
    assert _of(gpu0_throttle=0x4).findings == ()
    rows = [BUSY] * 5 + [BUSY | {"gpu0.throttle": float(0x20), "gpu0.sm_mhz": 900.0, "gpu0.temp_c": 90.0}] * 5
    [found] = advise(rows).findings
    assert found.cause == "throttled" and "heat in 50%" in found.what
    assert found.saves == pytest.approx(1 - 1200 / 1500)


def test_hardware_that_slows_down_is_no_matter_of_heat():
    assert "hardware" in _of(gpu0_throttle=0x80).findings[0].what


def test_an_allocator_that_keeps_trying_again_is_told():
    rows = [BUSY | {"rank0.alloc_retries": float(count)} for count in (3, 4, 9)]
    [found] = advise(rows).findings
    assert found.cause == "memory_tight" and found.figures["alloc_retries"] == 6


def test_without_a_gpu_the_ranks_cores_are_the_measure():
    row = {"host.cpu": 98.0, "host.cores": 2.0, "rank0.cpu": 97.0, "rank0.step_s": 0.1, "rank0.data_wait": 0.0}
    found = advise([row])
    assert (found.of, found.band, found.findings) == ("cpu", "good", ())
    waiting = advise([row | {"rank0.cpu": 20.0, "rank0.data_wait": 0.8, "host.cpu": 12.0}], TrainingSetup(workers=0))
    assert waiting.band == "bad" and waiting.findings[0].cause == "waiting_for_data"


def test_one_thread_a_rank_leaves_cores_idle_without_a_gpu():
    row = {"host.cpu": 14.0, "host.cores": 8.0, "rank0.cpu": 100.0, "rank0.step_s": 0.1, "rank0.data_wait": 0.0}
    [found] = advise([row]).findings
    assert found.cause == "cpu_bound" and found.change.startswith("OMP_NUM_THREADS=8")


def test_a_gpu_that_idles_for_no_known_reason_is_called_that():
    assert _of(gpu0_util=50).findings[0].cause == "unexplained"


def test_nothing_measured_is_nothing_said():
    assert advise([]) == advise([{"host.cores": 4.0}]) and advise([]).percent is None and advise([]).findings == ()


def test_the_weightiest_finding_comes_first():
    rows = [BUSY | {"rank0.data_wait": 0.6, "gpu0.util": 30.0, "gpu0.throttle": float(0x40)}] * 3
    rows[0] = rows[0] | {"gpu0.sm_mhz": 1600.0}
    assert [finding.cause for finding in advise(rows, TrainingSetup(workers=0)).findings] == [
        "waiting_for_data",
        "throttled",
    ]


KEYS = sorted(
    {*BUSY, *TWO, "gpu0.mem_used.max", "rank0.loaders", "rank0.alloc_retries", "host.disk_read_bps", "rank.x", "gpu"}
)
COUNTS = st.none() | st.integers(0, 200)


@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from(KEYS), st.floats() | st.floats(0, 100) | st.integers(-5, 2**70)), max_size=6
    ),
    facts=st.builds(
        TrainingSetup, workers=COUNTS, ranks=COUNTS, cores=COUNTS, batch=COUNTS, microbatch=COUNTS, cached=st.booleans()
    ),
)
def test_whatever_was_measured_advice_is_finite_and_never_raises(rows, facts):
    found = advise(rows, facts)
    assert (found.percent is None) == (found.band is None)
    for finding in found.findings:
        assert finding.what and finding.change
        assert finding.saves is None or 0 <= finding.saves <= 1
        assert all(math.isfinite(value) for value in finding.figures.values())
        json.dumps(dict(finding.figures), allow_nan=False)
        assert "nan" not in finding.what and "inf" not in finding.what.replace("info", "")


@given(st.lists(st.none() | st.floats(), max_size=300), st.floats(0, 1e9), st.integers(1, 100))
def test_a_sparkline_is_never_wider_than_asked(values, top, width):
    assert len(sparkline(values, top=top, width=width)) == min(width, len(values))


def test_a_sparkline_rises_with_its_values_and_leaves_a_gap_where_nothing_was_measured():
    assert sparkline([0, 50, None, 100], top=100) == "▁▅ █"
